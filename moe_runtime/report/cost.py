"""What tokens cost: a price per node-hour over the tokens a node makes in an hour. Pure arithmetic.

All nodes of the denominator are charged to one kind of token, so costs of several kinds are alternatives
for `all` and for a unified deployment, and add up over prefill and decode.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from moe_runtime.report.schema import Report
from moe_runtime.report.show import number

Kind = Literal["new_prefill", "output"]
_OWN: dict[str, tuple[Kind, ...]] = {"prefill": ("new_prefill",), "decode": ("output",)}
_BOTH: tuple[Kind, ...] = ("new_prefill", "output")


def kinds_of(role: str) -> tuple[Kind, ...]:
    """The tokens that a role is there for."""
    return _OWN.get(role, _BOTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Cost of a million tokens of a kind; None if there were none. Without a role: of all deployments."""

    role: str | None
    kind: Kind
    per_million: float | None

    @property
    def nodes(self) -> str:
        """Who is charged."""
        return "all nodes" if self.role is None else f"nodes of {self.role}"


def costs(report: Report, price_per_node_hour: float) -> tuple[Cost, ...]:
    """In the currency of the price. Roles are charged their own nodes, `all` every node."""
    rates: list[tuple[str | None, Kind, float]] = [
        (None, kind, getattr(report.system.throughput, kind).per_node_of_all) for kind in _BOTH
    ]
    for d in report.deployments:
        rates += [(d.name, kind, getattr(d.throughput, kind).per_node_of_role) for kind in kinds_of(d.name)]
    return tuple(
        Cost(role=role, kind=kind, per_million=per_million(price_per_node_hour, rate) if rate > 0 else None)
        for role, kind, rate in rates
    )


def per_million(price_per_node_hour: float, tokens_per_second: float) -> float:
    """Of a million tokens, at so many tokens/s > 0 per node; in the currency of the price."""
    return price_per_node_hour / (3600 * tokens_per_second) * 1e6


def costs_as_text(reports: Sequence[tuple[str, Report]], price_per_node_hour: float) -> str:
    """A line for each cost, under a title that says the price."""
    lines = [f"Cost of a million tokens, at {price_per_node_hour:g} per node-hour"]
    for run, report in reports:
        prefix = f"{run}: " if len(reports) > 1 else ""
        lines += [
            f"  {prefix}{c.kind.replace('_', ' ')}, charged to {c.nodes}: {number(c.per_million)}"
            for c in costs(report, price_per_node_hour)
        ]
    return "\n".join(lines)
