"""Where a rank stands: its instance, its number there, and which of the others share its node."""

from dataclasses import dataclass

from moe_runtime.plan.effective import EffectiveDeployment, EffectivePlan, InstancePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """`rank` and `nodes` are numbers within the instance: the ranks on each of its nodes, and this one's."""

    instance: InstancePlan
    deployment: EffectiveDeployment
    rank: int
    nodes: tuple[range, ...]

    @property
    def num_ranks(self) -> int:
        return len(self.instance.ranks)

    @property
    def node(self) -> int:
        """Index into `nodes`."""
        return next(i for i, ranks in enumerate(self.nodes) if self.rank in ranks)

    @property
    def here(self) -> range:
        """The instance's ranks on this node."""
        return self.nodes[self.node]

    @property
    def leads(self) -> bool:
        """The first of the instance's ranks on its node makes the windows that they share."""
        return self.rank == self.here.start


def place_of(effective: EffectivePlan, global_rank: int) -> Place:
    """IndexError beyond the plan's last rank."""
    instance = effective.instance_of(global_rank)
    ranks = instance.ranks
    starts = [r for r in ranks if r == ranks.start or effective.node_of(r) != effective.node_of(r - 1)]
    ends = [*starts[1:], ranks.stop]
    return Place(
        instance=instance,
        deployment=effective.deployment(instance.deployment),
        rank=global_rank - ranks.start,
        nodes=tuple(range(a - ranks.start, b - ranks.start) for a, b in zip(starts, ends, strict=True)),
    )
