"""StepInputs: what one rank feeds to one step, as numpy arrays and nothing else.

Rows: the decode rows first (one per sequence), then the prefill segments one after the
other. T rows, D decode rows, P prefill segments, N sampled rows, S scored rows, B blocks per
sequence, G KV groups. Every field declares how it behaves when a step is split into micro-batches:
`split` (along its first axis), `copy` (both halves get it), `drop` (rebuilt per half).
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from moe_runtime.scheduler.sampling import SamplingInputs

SplitRule = Literal["split", "copy", "drop"]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]


def declared(rule: SplitRule) -> Any:
    """A dataclass field that says how it is split."""
    return field(metadata={"split": rule})


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """One rank's share of a step. T = 0 is legal: an idle rank takes part with no rows.

    token_ids_T         int32; -(i+1) means sample i of the previous step, read on the device
    positions_T         int32; position of the row in its sequence
    sequence_T          int32; scheduler row of the sequence (sticky replica choice, debugging)
    kv_slots_GT         int64; block index * block_tokens + offset where the row's KV is written
    decode_blocks_DB    int32; block indices of each decode sequence, -1 padded (primary group)
    decode_context_D    int32; tokens attended to, the row itself included
    segment_starts_P1   int32; first row of each prefill segment, and T at the end
    segment_context_P   int32; tokens of the sequence already in the cache before the segment
    segment_blocks_PB   int32; block indices of each prefill sequence, -1 padded (primary group)
    sample_rows_N       int32; rows whose next token is sampled
    sampling            how they are sampled
    score_rows_S        int32; rows whose logprobs are wanted, ascending
    score_tokens_S      int32; the token that follows each of them in its prompt
    """

    token_ids_T: I32 = declared("split")
    positions_T: I32 = declared("split")
    sequence_T: I32 = declared("split")
    kv_slots_GT: I64 = declared("drop")
    decode_blocks_DB: I32 = declared("drop")
    decode_context_D: I32 = declared("drop")
    segment_starts_P1: I32 = declared("drop")
    segment_context_P: I32 = declared("drop")
    segment_blocks_PB: I32 = declared("drop")
    sample_rows_N: I32 = declared("drop")
    sampling: SamplingInputs = declared("drop")
    score_rows_S: I32 = declared("drop")
    score_tokens_S: I32 = declared("drop")

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids_T)

    @property
    def num_decode(self) -> int:
        return len(self.decode_context_D)

    @property
    def num_segments(self) -> int:
        return len(self.segment_context_P)
