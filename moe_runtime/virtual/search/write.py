"""Write: a candidate as the text of a plan file, and the lines that launch it. Touches no file itself."""

from typing import Any

import yaml

from moe_runtime.virtual.search.candidate import Candidate
from moe_runtime.virtual.search.option import Option
from moe_runtime.virtual.search.query import Query
from moe_runtime.virtual.search.room import cluster_section, deployment_section, most_blocks

WIDTH = 110


def plan_text(
    query: Query, candidate: Candidate, *, about: tuple[str, ...], loads: dict[str, str] | None = None
) -> str:
    """YAML of a candidate that plans of this version can say. Memory that is left goes to the caches.

    `about` are lines of its heading; `loads`, by deployment, the file of expert loads that its placement is
    solved for, relative to the plan.
    """
    assert candidate.written, "neither tensor parallelism nor drafts have a key"
    deployments: dict[str, Any] = {}
    for option, copies in ((candidate.prefill, candidate.copies[0]), (candidate.decode, candidate.copies[1])):
        if option is not None:
            name = option.choice.phase
            deployments[name] = _deployment(query, option, copies)
            if loads is not None and option.choice.ranks > 1:
                deployments[name]["balancing"] = {"initial": loads[name]}
    ranks = candidate.ranks
    plan = {
        "model": {"path": query.name},
        "cluster": cluster_section(query, ranks),
        "deployments": deployments,
        "slo": {
            "ttft_ms": round(query.objectives.ttft * 1e3, 3),
            "tpot_ms": round(query.objectives.tpot * 1e3, 3),
        },
    }
    heading = "".join(f"# {line}\n" for line in about)
    return heading + yaml.safe_dump(plan, sort_keys=False, default_flow_style=None, width=WIDTH)


def _deployment(query: Query, option: Option, copies: int) -> dict[str, Any]:
    blocks = most_blocks(query, option.choice, option.blocks)
    section = {"instances": copies, **deployment_section(query, option.choice, blocks)}
    if section["dispatch"] == {"backend": "local"}:
        del section["dispatch"]
    return section


def expectation(query: Query, candidate: Candidate) -> tuple[str, ...]:
    """What the search expects of a candidate, for the heading of its file."""
    work = query.workload
    return (
        f"Expected for {work.input:.0f} tokens in, {work.output:.0f} out, {work.prefix:.0%} cached:"
        f" {candidate.throughput:,.0f} output tokens/s per node of {query.nodes},",
        f"{candidate.speed:.1f} tokens/s per user, TTFT {candidate.ttft:.2f} s at the 90th percentile,"
        f" TPOT {candidate.tpot * 1e3:.1f} ms; {candidate.limit} gives no more.",
    )


def launch_lines(query: Query, candidate: Candidate, path: str) -> tuple[str, ...]:
    """One line per launcher."""
    cluster = cluster_section(query, candidate.ranks)
    nodes, per_node = cluster["nodes"], cluster["ranks_per_node"]
    if nodes == 1:
        return (
            f"torchrun --nproc-per-node {per_node} -m moe_runtime serve {path}",
            f"mpirun -n {per_node} python -m moe_runtime serve {path}",
        )
    rendezvous = "--rdzv-backend c10d --rdzv-endpoint HOST:29500"
    return (
        f"torchrun --nnodes {nodes} --nproc-per-node {per_node} {rendezvous} -m moe_runtime serve {path}",
        f"mpirun -n {nodes * per_node} --map-by ppr:{per_node}:node python -m moe_runtime serve {path}",
    )
