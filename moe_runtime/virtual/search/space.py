"""Space: the choices that are searched, in a fixed order.

Owns the ladders of EP degrees, batches and chunks. Decoding batches beyond one round of low-latency dispatch
are left out: each round reads the experts' weights anew.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from moe_runtime.spec.bytes import even_redundant_experts
from moe_runtime.spec.limits import DOCUMENTED_LOW_LATENCY_TOKENS
from moe_runtime.virtual.search.option import Choice, Phase
from moe_runtime.virtual.search.query import Query

BATCHES = (1, 2, 4, *range(8, 128, 8), *range(128, 252, 16), 252, *range(288, 504, 32), 504)
WHOLE_BATCHES = (*BATCHES, 640, 768, 1024)
CHUNKS = (512, 1024, 2048, 4096, 8192, 16384)
GROUPS = (2, 4, 8)
EVERY_NODE = 16  # nodes up to which every number of nodes is an EP degree
SOME_NODES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 18, 20, 24, 28, 32, 40, 48, 64, 80, 96, 128)
ROUND = DOCUMENTED_LOW_LATENCY_TOKENS // 4 * 4
REDUNDANT_SHARES = (0, 1 / 8, 1 / 4)
TORCH_ROUND = 2048
CHUNK_UNIT = 16
CUTS = (2, 4)


def degrees(query: Query) -> Iterator[int]:
    """EP degrees: parts of a node, then whole nodes."""
    part = 1
    while part < query.ranks_per_node:
        yield part
        part *= 2
    for nodes in range(1, query.nodes + 1):
        if nodes <= EVERY_NODE or nodes in SOME_NODES:
            yield nodes * query.ranks_per_node


def redundancies(query: Query, ranks: int) -> Iterator[int]:
    """Numbers of redundant experts that leave no slot surplus: none or the least, then more."""
    experts = query.model.moe.num_experts
    if query.redundant_experts is not None:
        if experts + query.redundant_experts >= ranks:
            yield query.redundant_experts
        return
    seen: set[int] = set()
    for share in REDUNDANT_SHARES:
        wanted = max(round(experts * share), ranks - experts, 0)
        redundant = even_redundant_experts(experts, wanted, ranks)
        if redundant not in seen and redundant <= experts and (ranks > 1 or redundant == 0):
            seen.add(redundant)
            yield redundant


def instances(query: Query, phase: Phase) -> Iterator[Choice]:
    """Choices without batch sizes: expert parallelism by degree, then with groups, then whole slices."""
    for ranks in degrees(query):
        for redundant in redundancies(query, ranks):
            yield from _micro_batches(query, Choice(phase=phase, ranks=ranks, redundant=redundant))
    if phase == "unified":
        return
    heads, moe = query.model.attention.num_heads, query.model.moe
    for ranks in degrees(query):
        least = next(redundancies(query, ranks), None)
        for group in GROUPS:
            if least is not None and group <= ranks and ranks % group == 0 and heads % group == 0:
                yield from _micro_batches(
                    query, Choice(phase=phase, ranks=ranks, group=group, redundant=least)
                )
        if ranks > 1 and heads % ranks == 0 and moe.intermediate % (ranks * 16) == 0:
            yield Choice(phase=phase, ranks=ranks, group=ranks, whole=True, backend="torch")


def _micro_batches(query: Query, choice: Choice) -> Iterator[Choice]:
    splits: tuple[Literal[1, 2], ...] = (1, 2) if choice.ranks > 1 else (1,)
    for split in splits:
        if query.micro_batches in (None, split):
            yield replace(choice, micro_batches=split, backend="deepep" if choice.ranks > 1 else "local")


def batches(query: Query, choice: Choice) -> Iterator[Choice]:
    """The choice with batch sizes, ascending."""
    match choice.phase:
        case "prefill":
            for chunk in CHUNKS:
                yield replace(choice, chunk=chunk, max_tokens=chunk)
        case "decode":
            yield from _decode(choice)
        case "unified":
            yield from _unified(query, choice)


def _decode(choice: Choice) -> Iterator[Choice]:
    one_round = choice.ranks > 1 and not choice.whole
    for sequences in WHOLE_BATCHES if choice.whole else BATCHES:
        rows = -(-sequences * choice.queries // choice.micro_batches)
        if one_round and rows > ROUND:
            return
        if sequences >= choice.micro_batches:
            yield replace(choice, sequences=sequences, max_tokens=-(-rows // 4) * 4)


def _unified(query: Query, choice: Choice) -> Iterator[Choice]:
    """Chunks that prompts fill as far as prefill may be busy, or that part of it that `cut` says."""
    busy = query.objectives.utilisation / choice.cut
    for sequences in BATCHES:
        tokens = replaced_tokens(query, sequences)
        chunk = math.ceil(tokens / busy / CHUNK_UNIT) * CHUNK_UNIT
        if sequences > ROUND or chunk > CHUNKS[-1]:
            return
        if sequences >= choice.micro_batches:
            yield replace(choice, sequences=sequences, chunk=chunk, max_tokens=sequences + chunk)


def replaced_tokens(query: Query, sequences: int) -> float:
    """Prompt tokens a step, so that as many sequences begin as end."""
    return sequences * query.workload.computed / query.workload.output


def variants(query: Query, choice: Choice) -> Iterator[Choice]:
    """The choice; in decode also with drafts, if the workload says how many are accepted; other chunks."""
    yield choice
    if choice.phase == "unified":
        yield from (replace(choice, cut=cut) for cut in CUTS)
    if choice.phase == "decode" and query.workload.acceptance is not None:
        yield replace(choice, queries=2)


def backends(query: Query, choice: Choice) -> Iterator[Choice]:
    """The choice with backends to try; the first that is possible is taken.

    NCCL stands in for DeepEP's normal mode only where all ranks share one scale-up domain: the cost model has
    no table of it between nodes.
    """
    yield choice
    hardware = query.machine.hardware
    if choice.phase != "decode" and choice.backend == "deepep" and choice.ranks <= hardware.scaleup_world:
        yield replace(choice, backend="torch", max_tokens=min(choice.max_tokens, TORCH_ROUND))
