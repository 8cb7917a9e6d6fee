"""Sequences and the table of running ones: numbers in arrays, one row per running sequence.

Knows nothing of blocks' contents, devices or clocks.
"""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_runtime.scheduler.constraint import Constraint
from moe_runtime.spec.requests import Request

FIRST_WIDTH = 16
NO_SCORES = 1 << 62  # beyond every row


class State(IntEnum):
    """Where a sequence is. PULLING: its blocks are allocated, its KV is still on the way."""

    WAITING = 0
    PULLING = 1
    RUNNING = 2
    FINISHED = 3


class Scores(NamedTuple):
    """Of S prompt rows: the next token's logprob [S], and the K best tokens [S, K] with theirs [S, K]."""

    chosen_S: NDArray[np.float32]
    top_ids_SK: NDArray[np.int32]
    top_SK: NDArray[np.float32]


@dataclass(slots=True, eq=False)
class Sequence:
    """One request on one rank.

    tokens        int32 [prompt + max_tokens]; the first `num_known` are known. If no tokens are wanted
                  one is drawn all the same: it tells that the prompt is through
    stop_tokens   ids that end the sequence
    handoff       the sequence leaves for a decode instance after its first token
    transferred   it came from a prefill instance: its first `prompt` tokens have KV elsewhere
    pending       sampled tokens still on the device
    row           its row in the table, -1 when it is not running
    high_water    prompt tokens that are accounted for: computed here or on the prefill side, or found cached
    cached_tokens prompt tokens found in the prefix cache
    urgency, arrival   place in the queue, the smaller pair first
    block_keys, prefix_hash, kept_blocks, keep_at   belong to PrefixCache
    constraint    what the output must look like
    outdated      blocks that it found instead of fetching them are of weights that are gone
    next_score    the first prompt row whose scores are wanted of a step yet; NO_SCORES: none is
    scores        those that steps gave, in the order of their rows
    """

    request: Request
    tokens: NDArray[np.int32]
    num_known: int
    stop_tokens: frozenset[int]
    handoff: bool = False
    transferred: bool = False
    state: State = State.WAITING
    pending: int = 0
    row: int = -1
    preemptions: int = 0
    high_water: int = 0
    cached_tokens: int = 0
    urgency: int = 0
    arrival: int = 0
    block_keys: list[bytes] = field(default_factory=list)
    prefix_hash: bytes = b""
    kept_blocks: int = 0
    keep_at: int = 0
    constraint: Constraint | None = None
    outdated: bool = False
    next_score: int = NO_SCORES
    scores: list[Scores] = field(default_factory=list)

    @property
    def edited(self) -> bool:
        """Single logits of its samples are changed."""
        params = self.request.sampling
        return bool(params.logit_bias) or params.min_tokens > 0 or self._penalised

    @property
    def needs_history(self) -> bool:
        """The next sample needs the tokens before it on the host, not only on the device."""
        return self._penalised or self.constraint is not None

    @property
    def _penalised(self) -> bool:
        params = self.request.sampling
        changes = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
        return changes != (0.0, 0.0, 1.0)

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt)

    @property
    def num_tokens(self) -> int:
        """Known tokens and those sampled but not read yet."""
        return self.num_known + self.pending

    def take_scores(self, begin: int, end: int) -> range:
        """Of the rows [begin, end), which a step runs: those whose scores are wanted. Nobody is told twice.

        Row p tells of prompt token p + 1, so the last token's row has none.
        """
        rows = range(max(begin, self.next_score), min(end, self.prompt_len - 1))
        if rows:
            self.next_score = rows.stop if rows.stop < self.prompt_len - 1 else NO_SCORES
        return rows

    def score_anew(self) -> None:
        """Begin with the first row, if scores are wanted and were not handed on with the first token."""
        wanted = self.request.sampling.prompt_logprobs >= 0 and self.num_known == self.prompt_len > 1
        self.next_score = 0 if wanted else NO_SCORES
        self.scores = []


def make_sequence(
    request: Request,
    eos_token_ids: tuple[int, ...],
    *,
    handoff: bool = False,
    first_token: int | None = None,
    constraint: Constraint | None = None,
) -> Sequence:
    """A waiting sequence. With `first_token` it was prefilled elsewhere and has one output.

    The model's own end-of-sequence tokens end it unless `ignore_eos`, the request's stop ids always.
    """
    prompt = np.asarray(request.prompt, np.int32)
    tokens = np.zeros(len(prompt) + max(1, request.sampling.max_tokens), np.int32)
    tokens[: len(prompt)] = prompt
    known = len(prompt)
    if first_token is not None:
        tokens[known] = first_token
        known += 1
        if constraint is not None:
            constraint.accept(first_token)
    params = request.sampling
    stop = frozenset(params.stop_token_ids).union(() if params.ignore_eos else eos_token_ids)
    sequence = Sequence(
        request=request,
        tokens=tokens,
        num_known=known,
        stop_tokens=stop,
        handoff=handoff,
        transferred=first_token is not None,
        high_water=len(prompt) if first_token is not None else 0,
        constraint=constraint,
    )
    sequence.score_anew()
    return sequence


class SequenceTable:
    """Running sequences as arrays; row r of every array belongs to `sequences[r]`.

    stamp         int64, order of admission; -1 is a free row
    urgency       int64, and arrival int64: which rows go first, the smaller pair
    num_tokens    int32, tokens known or sampled in flight
    num_computed  int32, tokens whose KV is written or being written
    max_tokens    int32, num_tokens at which nothing more is to be computed
    num_blocks    int32, and blocks int32 [rows, width]; the width grows up to max_blocks
    last_token    int32, the newest known token
    last_sample   int32, index of the newest sample in the previous step, -1 when it is known
    ready         bool, KV is here (False while PULLING)
    adjusted      bool, single logits are changed or masked before it is sampled
    waits         bool, it cannot be sampled while a sample of it is still on the device
    """

    def __init__(self, rows: int, max_blocks: int) -> None:
        self.sequences: list[Sequence | None] = [None] * rows
        self.stamp = np.full(rows, -1, np.int64)
        self.urgency = np.zeros(rows, np.int64)
        self.arrival = np.zeros(rows, np.int64)
        self.num_tokens = np.zeros(rows, np.int32)
        self.num_computed = np.zeros(rows, np.int32)
        self.max_tokens = np.zeros(rows, np.int32)
        self.num_blocks = np.zeros(rows, np.int32)
        self._max_blocks = max_blocks
        self.blocks = np.full((rows, min(max_blocks, FIRST_WIDTH)), -1, np.int32)
        self.last_token = np.zeros(rows, np.int32)
        self.last_sample = np.full(rows, -1, np.int32)
        self.ready = np.zeros(rows, bool)
        self.temperature = np.zeros(rows, np.float32)
        self.seed = np.zeros(rows, np.int64)
        self.prompt_len = np.zeros(rows, np.int32)
        self.top_p = np.ones(rows, np.float32)
        self.top_k = np.zeros(rows, np.int32)
        self.min_p = np.zeros(rows, np.float32)
        self.num_logprobs = np.full(rows, -1, np.int32)
        self.want_logits = np.zeros(rows, bool)
        self.adjusted = np.zeros(rows, bool)
        self.waits = np.zeros(rows, bool)
        self._some_wait = False
        self._stamps = 0
        self.num_running = 0
        self.num_ready = 0

    def free_row(self) -> int:
        """The first free row, or -1."""
        if self.num_running == len(self.stamp):
            return -1
        return int((self.stamp < 0).argmax())

    def enter(self, sequence: Sequence, row: int, blocks: NDArray[np.int32], computed: int) -> None:
        """Give `sequence` the row and its blocks; `computed` tokens have KV (or are being pulled)."""
        params = sequence.request.sampling
        self.sequences[row] = sequence
        sequence.row = row
        self.stamp[row] = self._stamps
        self._stamps += 1
        self.num_running += 1
        self.urgency[row] = sequence.urgency
        self.arrival[row] = sequence.arrival
        self.num_tokens[row] = sequence.num_tokens
        self.num_computed[row] = computed
        self.prompt_len[row] = sequence.prompt_len
        self.max_tokens[row] = sequence.prompt_len + 1 if sequence.handoff else len(sequence.tokens)
        self.num_blocks[row] = len(blocks)
        self._widen(len(blocks))
        self.blocks[row] = -1
        self.blocks[row, : len(blocks)] = blocks
        self.last_token[row] = sequence.tokens[sequence.num_known - 1]
        self.last_sample[row] = -1
        self.temperature[row] = params.temperature
        self.seed[row] = params.seed
        self.top_p[row] = params.top_p
        self.top_k[row] = params.top_k
        self.min_p[row] = params.min_p
        self.num_logprobs[row] = params.logprobs
        self.want_logits[row] = params.want_logits
        self.adjusted[row] = sequence.edited or sequence.constraint is not None
        self.waits[row] = sequence.needs_history
        self._some_wait |= sequence.needs_history
        if sequence.state is not State.PULLING:
            self.set_ready(row)

    def set_ready(self, row: int) -> None:
        """The row's KV is here, or will be computed here."""
        self.ready[row] = True
        self.num_ready += 1

    def leave(self, row: int) -> NDArray[np.int32]:
        """Clear the row; returns the blocks it held."""
        sequence = self.sequences[row]
        assert sequence is not None
        sequence.row = -1
        self.sequences[row] = None
        self.stamp[row] = -1
        self.num_running -= 1
        self.num_ready -= int(self.ready[row])
        self.ready[row] = False
        blocks = self.blocks[row, : self.num_blocks[row]].copy()
        self.num_blocks[row] = 0
        return blocks

    def add_block(self, row: int, block: int) -> None:
        n = int(self.num_blocks[row])
        if n == self.blocks.shape[1]:
            self._widen(n + 1)
        self.blocks[row, n] = block
        self.num_blocks[row] = n + 1

    def decode_rows(self) -> NDArray[np.intp]:
        """Rows whose next step is one token: only their newest token lacks KV. Ascending."""
        want = self.ready & (self.num_computed == self.num_tokens - 1) & (self.num_tokens < self.max_tokens)
        want &= self.num_tokens > self.prompt_len
        if self._some_wait:
            want &= ~(self.waits & (self.last_sample >= 0))
        rows: NDArray[np.intp] = want.nonzero()[0]
        return rows

    def prefill_rows(self) -> NDArray[np.intp]:
        """Rows that still have prompt (or recomputed) tokens to compute. Ascending."""
        behind = self.num_tokens - self.num_computed
        want = self.ready & ((behind > 1) | ((behind == 1) & (self.num_tokens <= self.prompt_len)))
        rows: NDArray[np.intp] = want.nonzero()[0]
        return rows

    def in_order(self, rows: NDArray[np.intp]) -> NDArray[np.intp]:
        """The same rows, the most urgent first."""
        return rows[np.lexsort((self.arrival[rows], self.urgency[rows]))]

    def _widen(self, width: int) -> None:
        """Make room for `width` blocks a row. Who holds a view of a row keeps what it saw."""
        have = self.blocks.shape[1]
        if width <= have:
            return
        wider = np.full((len(self.blocks), min(self._max_blocks, max(width, 2 * have))), -1, np.int32)
        wider[:, :have] = self.blocks
        self.blocks = wider
