"""Agreement: what the ranks of an instance propose in a turn, and what `agree` makes of it.

Owns that nothing is computed twice: ranks with the same rows propose the same, and turns with the same
proposals decide the same. Knows no time.
"""

from dataclasses import dataclass, field

from moe_runtime.engine.agree import NO_OFFER, AgreeLimits, MoveOffer, StepDecision, StepProposal, agree
from moe_runtime.scheduler.budget import ChunkBudget
from moe_runtime.virtual.cluster.ranks import Ranks

KNOWN = 4096  # proposals kept for ranks with the same rows


@dataclass(slots=True)
class Agreement:
    """Of one instance, turn after turn. `budget` is the same for all ranks: they measure the same steps."""

    limits: AgreeLimits
    alive: tuple[bool, ...]
    budget: ChunkBudget | None
    epoch: int = 0
    _held_steps: int = 0
    _common: tuple[int, int, int, int, MoveOffer] = (0, 0, 0, 0, NO_OFFER)
    _known: dict[tuple[int, int], StepProposal] = field(default_factory=dict)
    _proposals: list[StepProposal] = field(default_factory=list)
    _decision: StepDecision | None = None

    def decide(self, ranks: Ranks, *, in_flight: int, gain: int, offer: MoveOffer) -> StepDecision:
        """The decision of a turn.

        in_flight  steps that have begun and not ended; `gain` microseconds two micro-batches would save
        offer      where every rank stands with moving experts
        """
        common = (in_flight, self.epoch, gain, self._held_steps, offer)
        if self.budget is not None or common != self._common or len(self._known) > KNOWN:
            self._common = common
            self._known.clear()
        pairs = zip(ranks.decode_R.tolist(), ranks.prefill_R.tolist(), strict=True)
        proposals = [self._known.get(pair) or self._propose(*pair) for pair in pairs]
        if self._decision is None or proposals != self._proposals:
            self._decision, self._proposals = agree(proposals, self.limits), proposals
        self._held_steps = self._held_steps + 1 if self._decision.held else 0
        return self._decision

    def _propose(self, decode: int, prefill: int) -> StepProposal:
        """What a rank with such rows proposes in this turn."""
        in_flight, epoch, gain, held, offer = self._common
        self._known[decode, prefill] = proposal = StepProposal(
            decode_tokens=decode,
            prefill_tokens=prefill,
            in_flight=in_flight,
            stop=False,
            placement_epoch=epoch,
            membership_epoch=0,
            alive=self.alive,
            overlap_gain=gain,
            chunk_tokens=None if self.budget is None else self.budget.rows(decode),
            held_steps=held,
            move=offer,
        )
        return proposal
