"""Cuts StepInputs in two micro-batches along their rows: decode by sequences, prefill by tokens.

A cut may fall inside a prefill segment: the second part then has the first one's tokens as
context, whose KV the first micro-batch writes in the same layer before the second reads it.
Pure numpy. T rows, D decode rows, P segments, N samples, S scored rows.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

import numpy as np

from moe_runtime.scheduler.step_inputs import StepInputs


def halves(inputs: StepInputs) -> tuple[StepInputs, StepInputs]:
    """Two micro-batches of nearly equal rows; either may be empty, as on an idle rank."""
    middle = -(-inputs.num_tokens // 2)
    return cut(inputs, 0, middle), cut(inputs, middle, inputs.num_tokens)


def cut(inputs: StepInputs, start: int, stop: int) -> StepInputs:
    """Rows [start, stop) as inputs of their own; samples keep their order."""
    values: dict[str, Any] = {}
    for field in fields(StepInputs):
        value, rule = getattr(inputs, field.name), field.metadata.get("split")
        if rule == "split":
            values[field.name] = value[start:stop]
        elif rule == "copy":
            values[field.name] = value
        elif rule == "drop":
            values[field.name] = REBUILT[field.name](inputs, start, stop)
        else:
            raise TypeError(f"StepInputs.{field.name} does not declare how it is split")
    return StepInputs(**values)


def _decode(array_D: Any, start: int, stop: int) -> Any:
    """Decode rows are the first rows, so the slice clips by itself."""
    return array_D[start : min(stop, len(array_D))]


def _segments(inputs: StepInputs, start: int, stop: int) -> slice:
    """The segments that have rows in [start, stop)."""
    starts = inputs.segment_starts_P1
    first = int(np.searchsorted(starts[1:], start, side="right"))
    last = int(np.searchsorted(starts[:-1], stop, side="left"))
    return slice(first, max(first, last))


def _starts(inputs: StepInputs, start: int, stop: int) -> Any:
    part = _segments(inputs, start, stop)
    edges = inputs.segment_starts_P1[part.start : part.stop + 1]
    if part.stop == part.start:
        return np.array([stop - start], np.int32)
    return (np.clip(edges, start, stop) - start).astype(np.int32)


def _context(inputs: StepInputs, start: int, stop: int) -> Any:
    part = _segments(inputs, start, stop)
    cut_off = np.maximum(start - inputs.segment_starts_P1[:-1][part], 0)
    return (inputs.segment_context_P[part] + cut_off).astype(np.int32)


def _samples(inputs: StepInputs, start: int, stop: int) -> slice:
    return _within(inputs.sample_rows_N, start, stop)


def _scores(inputs: StepInputs, start: int, stop: int) -> slice:
    return _within(inputs.score_rows_S, start, stop)


def _within(rows: Any, start: int, stop: int) -> slice:
    """Those of ascending rows that are in [start, stop)."""
    return slice(int(np.searchsorted(rows, start)), int(np.searchsorted(rows, stop)))


REBUILT: Mapping[str, Callable[[StepInputs, int, int], Any]] = MappingProxyType(
    {
        "kv_slots_GT": lambda inputs, start, stop: inputs.kv_slots_GT[:, start:stop],
        "decode_blocks_DB": lambda inputs, start, stop: _decode(inputs.decode_blocks_DB, start, stop),
        "decode_context_D": lambda inputs, start, stop: _decode(inputs.decode_context_D, start, stop),
        "segment_starts_P1": _starts,
        "segment_context_P": _context,
        "segment_blocks_PB": lambda i, start, stop: i.segment_blocks_PB[_segments(i, start, stop)],
        "sample_rows_N": lambda i, start, stop: i.sample_rows_N[_samples(i, start, stop)] - np.int32(start),
        "score_rows_S": lambda inputs, start, stop: (
            inputs.score_rows_S[_scores(inputs, start, stop)] - np.int32(start)
        ),
        "score_tokens_S": lambda inputs, start, stop: inputs.score_tokens_S[_scores(inputs, start, stop)],
        "sampling": lambda i, start, stop: i.sampling.cut(_samples(i, start, stop)),
    }
)
