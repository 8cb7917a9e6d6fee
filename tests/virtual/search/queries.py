"""Small queries that tests of the search share."""

from typing import Any

from moe_runtime.spec.catalog import CATALOG, PREFIX
from moe_runtime.virtual.cost.constants import constants
from moe_runtime.virtual.search.query import Query, parse_objectives, parse_workload


def query(
    name: str = "deepseek-v3",
    hardware: str = "h200-sxm",
    nodes: int = 2,
    workload: str = "input=1200,output=500",
    slo: str = "ttft=2s,tpot=50ms",
    **restrictions: Any,
) -> Query:
    return Query(
        name=PREFIX + name,
        model=CATALOG[name],
        hardware=hardware,
        nodes=nodes,
        workload=parse_workload(workload),
        objectives=parse_objectives(slo),
        known=constants(),
        **restrictions,
    )


def narrow(**changes: Any) -> Query:
    """Two nodes, no redundancy, no overlap: a search of under a second."""
    return query(**{"redundant_experts": 0, "micro_batches": 1, **changes})
