"""A device whose KV cache holds token ids: every read is checked against the sequence's history."""

import hashlib

import numpy as np

from moe_runtime.scheduler.scheduler import Scheduler
from moe_runtime.scheduler.step import Scheduled
from moe_runtime.scheduler.step_inputs import StepInputs

POISON = -77


def next_token(history: list[int], vocab: int = 50) -> int:
    """A model: the next token is a hash of the whole history."""
    digest = hashlib.blake2b(np.array(history, np.int64).tobytes(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % vocab


def expected_output(prompt: list[int], max_tokens: int, eos: int | None = None) -> list[int]:
    history, out = list(prompt), []
    for _ in range(max_tokens):
        out.append(next_token(history))
        history.append(out[-1])
        if out[-1] == eos:
            break
    return out


class FakeDevice:
    """Runs StepInputs: writes each row's token to its KV slot, samples from what it reads back."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.kv = np.full(num_blocks * block_tokens, POISON, np.int64)
        self.previous = np.zeros(0, np.int64)

    def run(self, inputs: StepInputs) -> np.ndarray:
        tokens = inputs.token_ids_T.astype(np.int64)
        refs = tokens < 0
        tokens[refs] = self.previous[-tokens[refs] - 1]
        assert len(np.unique(inputs.kv_slots_GT[0])) == len(tokens), "two rows write the same KV slot"
        self.kv[inputs.kv_slots_GT[0]] = tokens
        samples = [self._sample(inputs, int(row)) for row in inputs.sample_rows_N]
        self.previous = np.array(samples, np.int64)
        return self.previous.astype(np.int32)

    def _sample(self, inputs: StepInputs, row: int) -> int:
        return next_token(self.history(inputs, row))

    def history(self, inputs: StepInputs, row: int) -> list[int]:
        """What a row attends to, as its KV says."""
        if row < inputs.num_decode:
            blocks, length = inputs.decode_blocks_DB[row], int(inputs.decode_context_D[row])
        else:
            p = int(np.searchsorted(inputs.segment_starts_P1, row, side="right")) - 1
            blocks = inputs.segment_blocks_PB[p]
            length = int(inputs.segment_context_P[p]) + row - int(inputs.segment_starts_P1[p]) + 1
        assert length == inputs.positions_T[row] + 1
        history = self.read(blocks, length)
        assert POISON not in history, "read KV that was never written, or was freed"
        return history

    def read(self, blocks: np.ndarray, length: int) -> list[int]:
        slots = (blocks[:, None].astype(np.int64) * self.block_tokens + np.arange(self.block_tokens)).reshape(
            -1
        )
        return [int(t) for t in self.kv[slots[:length]]]

    def poison(self, blocks: list[int]) -> None:
        for block in blocks:
            self.kv[block * self.block_tokens : (block + 1) * self.block_tokens] = POISON


class Runner:
    """Drives one scheduler against a fake device at a pipeline depth, as the engine does."""

    def __init__(self, scheduler: Scheduler, depth: int, device: FakeDevice | None = None) -> None:
        self.scheduler = scheduler
        self.depth = depth
        self.device = device or FakeDevice(scheduler.limits.num_blocks, scheduler.limits.block_tokens)
        self.in_flight: list[tuple[Scheduled, np.ndarray]] = []
        self.outputs: dict[int, list[int]] = {}
        self.reasons: dict[int, str] = {}
        self.handoffs: dict[int, np.ndarray] = {}
        self.preemptions = self.fresh = self.cached = self.again = 0

    def step(self, level: int | None = None) -> bool:
        """One step; False when there was nothing to run and nothing in flight."""
        limits = self.scheduler.limits
        work = self.scheduler.propose()
        self.device.poison(self.scheduler.pool.take_stale())
        if not (work.decode_tokens or work.prefill_tokens):
            had = bool(self.in_flight)
            self._commit(0)
            return had
        if level is None:
            level = min(limits.max_batch_tokens, work.decode_tokens + limits.chunk_tokens)
        scheduled = self.scheduler.build(level)
        self.fresh += scheduled.prefill_tokens
        self.cached += scheduled.cached_tokens
        self.again += scheduled.recomputed_tokens
        inputs = scheduled.inputs
        assert inputs.num_decode == work.decode_tokens
        assert inputs.num_tokens <= max(level, work.decode_tokens)
        self.in_flight.append((scheduled, self.device.run(inputs)))
        self._commit(self.depth)
        return True

    def run(self, max_steps: int = 5000) -> None:
        for _ in range(max_steps):
            if not self.step():
                return
        raise AssertionError("the scheduler makes no progress")

    def _commit(self, leave: int) -> None:
        while len(self.in_flight) > leave:
            scheduled, tokens = self.in_flight.pop(0)
            for event in self.scheduler.commit(scheduled, tokens):
                request = event.sequence.request.id
                self.outputs.setdefault(request, []).append(event.token)
                if event.finish_reason:
                    self.reasons[request] = event.finish_reason
                if event.blocks is not None:
                    self.handoffs[request] = event.blocks
        leased = sum(len(b) for b in self.handoffs.values())
        self.scheduler.check_invariants(leased=leased)
        self.preemptions += self.scheduler.take_preemptions()
