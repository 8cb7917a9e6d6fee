"""From StepInputs (host arrays) to StepContext (device tensors), and through the model once."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_runtime.engine import overlap
from moe_runtime.engine.agree import StepDecision, StepKind
from moe_runtime.engine.sampler import TopLogprobs, sample, top_logprobs
from moe_runtime.errors import CheckpointError
from moe_runtime.models.context import Clock, PrefillSegment, StepContext
from moe_runtime.models.decoder import Decoder
from moe_runtime.scheduler.sampling import greedy
from moe_runtime.scheduler.step_inputs import StepInputs

MAX_TOP_LOGPROBS = 20  # what the API allows; one size, so that micro-batches can be joined
SCORE_LOGITS_BYTES = 32 << 20
"""Logits of prompt rows that are alive at once, as float32; their logprobs take as much again."""


@dataclass(frozen=True, slots=True)
class Samples:
    """What a step leaves on the device.

    tokens_N     int64
    logits_WV    float32, of the samples whose logits are wanted, in their order
    logprobs     of the samples whose logprobs are wanted, in their order
    scores       of the prompt rows whose logprobs are wanted, in their order
    """

    tokens_N: Tensor
    logits_WV: Tensor | None = None
    logprobs: TopLogprobs | None = None
    scores: TopLogprobs | None = None


NO_SAMPLES = Samples(torch.zeros(0, dtype=torch.int64))


def make_context(
    inputs: StepInputs,
    decision: StepDecision,
    *,
    previous: Samples,
    kv_cache: list[Tensor],
    block_tokens: int,
    clock: Clock,
) -> StepContext:
    """The device's view of a step; references into `previous` samples are resolved on the device."""
    device = kv_cache[0].device
    token_ids_T = _to(inputs.token_ids_T, device)
    refs = np.flatnonzero(inputs.token_ids_T < 0)
    if len(refs):
        rows = _to(refs, device)
        token_ids_T[rows] = previous.tokens_N[_to(-inputs.token_ids_T[refs] - 1, device)]
    starts, context = inputs.segment_starts_P1.tolist(), inputs.segment_context_P.tolist()
    segments = tuple(
        PrefillSegment(
            start=starts[p],
            stop=starts[p + 1],
            context=context[p],
            blocks=_to(
                _used(inputs.segment_blocks_PB[p], context[p] + starts[p + 1] - starts[p], block_tokens),
                device,
            ),
        )
        for p in range(inputs.num_segments)
    )
    longest = int(inputs.decode_context_D.max(initial=0))
    width = -(-longest // block_tokens)
    return StepContext(
        token_ids_T=token_ids_T,
        positions_T=_to(inputs.positions_T, device),
        kv_slots_T=_to(inputs.kv_slots_GT[0], device),
        num_decode=inputs.num_decode,
        decode_blocks_DB=_to(np.maximum(inputs.decode_blocks_DB[:, :width], 0), device),
        decode_context_D=_to(inputs.decode_context_D, device),
        max_context=longest,
        segments=segments,
        kv_cache=kv_cache,
        clock=clock,
        rounds=decision.rounds,
        round_tokens=decision.round_tokens,
        dispatch_mode=decision.dispatch_mode,
    )


def run(decoder: Decoder, parts: Sequence[tuple[StepInputs, StepContext]], *, decode_only: bool) -> Samples:
    """COLLECTIVE: one forward pass of one or two micro-batches, and its samples in their order.

    `decode_only` is the agreed kind of the step, not what this rank happens to hold.
    """
    hidden = overlap.run(
        [(decoder.embed(step), step) for _, step in parts],
        list(decoder.layers),
        order=overlap.order_of(decode_only=decode_only),
    )
    samples = [
        replace(_sample(decoder, x_TH, inputs), scores=score(decoder, x_TH, inputs))
        for x_TH, (inputs, _) in zip(hidden, parts, strict=True)
    ]
    return samples[0] if len(samples) == 1 else _joined(samples)


def _joined(parts: Sequence[Samples]) -> Samples:
    logits = [s.logits_WV for s in parts if s.logits_WV is not None]
    return Samples(
        torch.cat([s.tokens_N for s in parts]),
        torch.cat(logits) if logits else None,
        _concatenated([s.logprobs for s in parts if s.logprobs is not None]),
        _concatenated([s.scores for s in parts if s.scores is not None]),
    )


def _concatenated(parts: Sequence[TopLogprobs]) -> TopLogprobs | None:
    if not parts:
        return None
    return TopLogprobs(
        torch.cat([p.chosen_W for p in parts]),
        torch.cat([p.top_ids_WK for p in parts]),
        torch.cat([p.top_WK for p in parts]),
    )


def score(
    decoder: Decoder, x_TH: Tensor, inputs: StepInputs, *, most_bytes: int = SCORE_LOGITS_BYTES
) -> TopLogprobs | None:
    """What the scored rows say of the tokens that follow them; None where there are none. LOCAL.

    A prompt has many rows: their logits are made for a few rows at a time, `most_bytes` or one row.
    """
    total = len(inputs.score_rows_S)
    if not total:
        return None
    rows_S, tokens_S = _to(inputs.score_rows_S, x_TH.device), _to(inputs.score_tokens_S, x_TH.device)
    rows = max(1, most_bytes // (4 * decoder.spec.vocab_size))
    return _concatenated(
        [
            top_logprobs(
                decoder.logits(x_TH[rows_S[at : at + rows]]), tokens_S[at : at + rows], MAX_TOP_LOGPROBS
            )
            for at in range(0, total, rows)
        ]
    )


def _sample(decoder: Decoder, x_TH: Tensor, inputs: StepInputs) -> Samples:
    if not len(inputs.sample_rows_N):
        return NO_SAMPLES
    logits_NV = decoder.logits(x_TH[_to(inputs.sample_rows_N, x_TH.device)])
    tokens_N = sample(logits_NV, inputs.sampling)
    wanted = np.flatnonzero(inputs.sampling.want_logits_N)
    probed = np.flatnonzero(inputs.sampling.num_logprobs_N >= 0)
    logits_WV = logits_NV[_to(wanted, x_TH.device)] if len(wanted) else None
    if not len(probed):
        return Samples(tokens_N, logits_WV)
    rows_W = _to(probed, x_TH.device)
    return Samples(tokens_N, logits_WV, top_logprobs(logits_NV[rows_W], tokens_N[rows_W], MAX_TOP_LOGPROBS))


def warm_up(
    decoder: Decoder, kv_cache: list[Tensor], *, block_tokens: int, num_tokens: int, clock: Clock
) -> None:
    """COLLECTIVE: two passes of prefill and decode rows in every dispatch mode over free KV blocks, so that
    the first request pays for no lazy allocation, thread pool or communicator. Every rank passes the same
    numbers.

    Raises CheckpointError where the model answers NaN or infinity, which would serve as its first token.
    """
    rows = min(num_tokens, block_tokens * len(kv_cache[0]) - 1)
    if rows < 1:
        return
    blocks = np.arange(-(-(rows + 1) // block_tokens), dtype=np.int32)[None]
    inputs = StepInputs(
        token_ids_T=np.zeros(rows + 1, np.int32),
        positions_T=np.array([rows, *range(rows)], np.int32),
        sequence_T=np.zeros(rows + 1, np.int32),
        kv_slots_GT=np.array([[rows, *range(rows)]], np.int64),
        decode_blocks_DB=blocks,
        decode_context_D=np.array([rows + 1], np.int32),
        segment_starts_P1=np.array([1, rows + 1], np.int32),
        segment_context_P=np.zeros(1, np.int32),
        segment_blocks_PB=blocks,
        sample_rows_N=np.array([0, rows], np.int32),
        sampling=replace(greedy(2), want_logits_N=np.ones(2, bool)),
        score_rows_S=np.zeros(0, np.int32),
        score_tokens_S=np.zeros(0, np.int32),
    )
    for mode in 2 * decoder.dispatch_modes:
        decision = StepDecision(kind=StepKind.FORWARD, dispatch_mode=mode, rounds=1, round_tokens=rows + 1)
        step = make_context(
            inputs, decision, previous=NO_SAMPLES, kv_cache=kv_cache, block_tokens=block_tokens, clock=clock
        )
        logits_WV = run(decoder, [(inputs, step)], decode_only=False).logits_WV
        if logits_WV is None or not bool(logits_WV.isfinite().all()):
            raise CheckpointError(
                "the first pass of the model gives logits that are NaN or infinite: its config is not that of"
                f" its weights, or they overflow in {decoder.spec.dtype}; see model.path and model.dtype"
            )


def _used(blocks_B: NDArray[np.int32], num_tokens: int, block_tokens: int) -> NDArray[np.int32]:
    return blocks_B[: -(-num_tokens // block_tokens)]


def _to(array: NDArray[np.generic], device: torch.device) -> Tensor:
    return torch.from_numpy(array.astype(np.int64)).to(device)
