"""OverlapGain: what ranks expect to save with two micro-batches: what the step times say of both.

In the engine a rank learns it from its own steps (`engine.overlap_policy`); here it is known. It is asked for
anew when the rows of a rank change, and offered by every rank alike.
"""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moe_runtime.engine.agree import AgreeLimits, StepDecision, StepProposal, agree
from moe_runtime.virtual.cluster.ranks import Ranks
from moe_runtime.virtual.cluster.times import StepTimes
from moe_runtime.virtual.cost.shapes import StepShape

_NO_ROWS: NDArray[np.int64] = np.zeros((2, 0), np.int64)


@dataclass(slots=True)
class OverlapGain:
    """The gain of one instance; 0 where it decides nothing."""

    limits: AgreeLimits
    _rows_R: NDArray[np.int64] = field(default_factory=_NO_ROWS.copy)
    _gain: int = 0
    _decisions: dict[tuple[int, int, bool], StepDecision] = field(default_factory=dict)

    def forget(self) -> None:
        """Step times have changed."""
        self._rows_R = _NO_ROWS.copy()

    def microseconds(self, times: StepTimes, ranks: Ranks) -> int:
        """What a step of the rows that the ranks propose would save."""
        if self.limits.micro_batches != "per_step":
            return 0
        rows_R = np.stack([ranks.decode_R, ranks.prefill_R])
        if np.array_equal(rows_R, self._rows_R):
            return self._gain
        self._rows_R, self._gain = rows_R, 0
        most = int(rows_R[0].max()), int(rows_R[1].max())
        if sum(most) >= 2:
            plain, split = self._seconds(times, ranks, most, 1), self._seconds(times, ranks, most, 2)
            self._gain = round(1e6 * (plain - split))
        return self._gain

    def _seconds(
        self, times: StepTimes, ranks: Ranks, most: tuple[int, int], micro_batches: Literal[1, 2]
    ) -> float:
        decision = self._decide(most, split=micro_batches == 2)
        room_R = np.maximum(decision.token_level - ranks.decode_R, 0)
        prefill_R = np.minimum(np.minimum(ranks.prefill_R, room_R), decision.chunk_tokens).astype(np.float64)
        shape = StepShape(
            decode_sequences_R=ranks.decode_R.astype(np.float64),
            decode_context_R=ranks.context_R.astype(np.float64),
            prefill_tokens_R=prefill_R,
            prefill_pairs_R=prefill_R * (prefill_R + 1) / 2,
            prefill_prefix_R=np.zeros(len(ranks)),
            mode=decision.dispatch_mode,
            micro_batches=micro_batches,
            rounds=decision.rounds,
        )
        return times.step(shape).seconds

    def _decide(self, most: tuple[int, int], *, split: bool) -> StepDecision:
        """What would be agreed if the fullest rank were all, and two micro-batches paid or did not."""
        key = (*most, split)
        found = self._decisions.get(key)
        if found is None:
            proposal = StepProposal(
                decode_tokens=most[0],
                prefill_tokens=most[1],
                in_flight=0,
                stop=False,
                placement_epoch=0,
                membership_epoch=0,
                alive=(True,),
                overlap_gain=1 if split else -1,
            )
            found = self._decisions[key] = agree([proposal], self.limits)
        return found
