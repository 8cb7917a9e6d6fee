"""Turns scheduled rows into StepInputs: array arithmetic over the sequence table."""

import numpy as np
from numpy.typing import NDArray

from moe_runtime.scheduler.sampling import SamplingInputs, with_history
from moe_runtime.scheduler.sequences import SequenceTable
from moe_runtime.scheduler.step_inputs import StepInputs
from moe_runtime.spec.kv import INDEX_MASK

_NONE = np.zeros(0, np.int32)


class RowBuilder:
    """Builds the rows of a step and advances `num_computed` of the rows it uses."""

    def __init__(self, table: SequenceTable, block_tokens: int) -> None:
        self.table = table
        self.block_tokens = block_tokens

    def build(
        self, decode: NDArray[np.intp], chunks: list[tuple[int, int]], scores: list[range]
    ) -> tuple[StepInputs, NDArray[np.intp]]:
        """`decode`: table rows with one token each; `chunks`: (table row, tokens) of prefill; `scores`: the
        positions of each chunk whose logprobs are wanted.

        Returns the inputs, and the table row of every sample.
        """
        table = self.table
        starts = np.cumsum([len(decode), *(count for _, count in chunks)], dtype=np.int32)
        chunk_rows = np.array([row for row, _ in chunks], np.intp)
        context = table.num_computed[chunk_rows].astype(np.int32)
        counts = np.array([count for _, count in chunks], np.int32)

        last = table.last_sample[decode]
        token_ids = [np.where(last >= 0, -(last + 1), table.last_token[decode]).astype(np.int32)]
        positions = [table.num_computed[decode].astype(np.int32)]
        score_rows, score_tokens = [_NONE], [_NONE]
        for index, (row, begin, count) in enumerate(zip(chunk_rows, context, counts, strict=True)):
            sequence = table.sequences[row]
            assert sequence is not None
            token_ids.append(sequence.tokens[begin : begin + count])
            positions.append(np.arange(begin, begin + count, dtype=np.int32))
            if wanted := scores[index]:
                first = starts[index] - begin
                score_rows.append(np.arange(first + wanted.start, first + wanted.stop, dtype=np.int32))
                score_tokens.append(sequence.tokens[wanted.start + 1 : wanted.stop + 1])
        positions_T = np.concatenate(positions)
        sequence_T = np.concatenate([decode, np.repeat(chunk_rows, counts)]).astype(np.int32)

        # A chunk that reaches the newest token is sampled from.
        complete = context + counts == table.num_tokens[chunk_rows]
        sampled = np.concatenate([decode, chunk_rows[complete]])
        sample_rows = np.concatenate([np.arange(len(decode)), starts[1:][complete] - 1]).astype(np.int32)
        inputs = StepInputs(
            token_ids_T=np.concatenate(token_ids),
            positions_T=positions_T,
            sequence_T=sequence_T,
            kv_slots_GT=self._kv_slots(sequence_T, positions_T)[None],
            decode_blocks_DB=self._blocks(decode),
            decode_context_D=(table.num_computed[decode] + 1).astype(np.int32),
            segment_starts_P1=starts,
            segment_context_P=context,
            segment_blocks_PB=self._blocks(chunk_rows),
            sample_rows_N=sample_rows,
            sampling=self._sampling(sampled),
            score_rows_S=np.concatenate(score_rows),
            score_tokens_S=np.concatenate(score_tokens),
        )
        table.num_computed[decode] += 1
        table.num_computed[chunk_rows] += counts
        return inputs, sampled

    def _sampling(self, rows_N: NDArray[np.intp]) -> SamplingInputs:
        table = self.table
        position_N = table.num_tokens[rows_N] - table.prompt_len[rows_N]
        inputs = SamplingInputs(
            temperature_N=table.temperature[rows_N],
            seed_N=table.seed[rows_N],
            output_position_N=position_N,
            top_p_N=table.top_p[rows_N],
            top_k_N=table.top_k[rows_N],
            min_p_N=table.min_p[rows_N],
            num_logprobs_N=table.num_logprobs[rows_N],
            want_logits_N=table.want_logits[rows_N] & (position_N == 0),
        )
        if not table.adjusted[rows_N].any():
            return inputs
        return with_history(inputs, [s for row in rows_N if (s := table.sequences[row]) is not None])

    def _kv_slots(self, rows_T: NDArray[np.int32], positions_T: NDArray[np.int32]) -> NDArray[np.int64]:
        blocks = self.table.blocks[rows_T, positions_T // self.block_tokens].astype(np.int64) & INDEX_MASK
        return blocks * self.block_tokens + positions_T % self.block_tokens

    def _blocks(self, rows: NDArray[np.intp]) -> NDArray[np.int32]:
        width = int(self.table.num_blocks[rows].max(initial=0))
        return self.table.blocks[rows, :width]
