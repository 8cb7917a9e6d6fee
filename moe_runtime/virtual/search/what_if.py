"""What if: a query with one thing changed, and a plan found before in the changed world.

Owns the keys that may be changed and what their values mean.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Literal

from moe_runtime.errors import InputError
from moe_runtime.virtual.search.candidate import Candidate, pair, unified_deployment
from moe_runtime.virtual.search.evaluate import Evaluator
from moe_runtime.virtual.search.option import Choice, Option
from moe_runtime.virtual.search.query import Query, checked, number, objective, with_hardware

Change = Callable[[Query, str], Query]
RATES = ("memory_bandwidth", "memory_bytes", "scaleup_bandwidth", "rdma_bandwidth")


def changed(query: Query, text: str) -> Query:
    """The query after `key=value`, checked. InputError naming the keys there are, or what is wrong."""
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or key not in CHANGES:
        raise InputError(f"--what-if {text!r}: not key=value with one of {', '.join(CHANGES)}")
    try:
        return checked(CHANGES[key](query, value))
    except InputError as error:
        raise InputError(f"--what-if {text}: {error}") from error


def again(query: Query, candidate: Candidate) -> Candidate | str:
    """The instances of a candidate under another query, or what stands against them.

    Restrictions of the query, of redundancy and overlap, are imposed on them.
    """
    evaluator = Evaluator(query)
    if candidate.ranks > query.ranks:
        return f"does not fit {query.ranks} ranks"
    second = evaluator.option(_restricted(query, candidate.decode.choice))
    if isinstance(second, str):
        return f"decode is not possible: {second}"
    if candidate.prefill is None:
        return unified_deployment(query, second, candidate.copies[1])
    first: Option | str = evaluator.option(_restricted(query, candidate.prefill.choice))
    if isinstance(first, str):
        return f"prefill is not possible: {first}"
    return pair(query, first, second, candidate.copies)


def _restricted(query: Query, choice: Choice) -> Choice:
    if query.redundant_experts is not None and not choice.whole:
        choice = replace(choice, redundant=query.redundant_experts)
    if query.micro_batches is not None and not choice.whole:
        split: Literal[1, 2] = 1 if query.micro_batches == 1 else 2
        rows = -(-choice.sequences * choice.queries // split)
        tokens = -(-rows // 4) * 4 if choice.phase == "decode" else choice.max_tokens
        choice = replace(choice, micro_batches=split, max_tokens=tokens)
    return choice


def _hardware(query: Query, value: str) -> Query:
    query.known.machine(value)
    return replace(query, hardware=value)


def _rate(name: str) -> Change:
    def change(query: Query, value: str) -> Query:
        """A number in bytes (per second), or xFACTOR of today's."""
        before = getattr(query.machine.hardware, name)
        if before is None:
            raise InputError(f"{query.hardware} has none")
        after = before * number(value[1:], "factor") if value.startswith("x") else number(value, name)
        if after <= 0:
            raise InputError("must be above 0")
        change = {name: type(before)(after)}
        return with_hardware(query, replace(query.machine.hardware, **change))

    return change


def _flops(query: Query, value: str) -> Query:
    factor = number(value.removeprefix("x"), "factor")
    if not value.startswith("x") or factor <= 0:
        raise InputError("a factor above 0 was expected, as x1.5")
    hardware = query.machine.hardware
    flops = {dtype: rate * factor for dtype, rate in hardware.flops.items()}
    return with_hardware(query, replace(hardware, flops=MappingProxyType(flops)))


def _objective(name: str) -> Change:
    def change(query: Query, value: str) -> Query:
        change = {name: objective(value, name)}
        return replace(query, objectives=replace(query.objectives, **change))

    return change


def _whole(name: str, low: int, high: int) -> Change:
    def change(query: Query, value: str) -> Query:
        count = number(value, "value")
        if count != int(count) or not low <= count <= high:
            raise InputError(f"must be a whole number from {low} to {high}")
        return replace(query, **{name: int(count)})  # type: ignore[arg-type]

    return change


def _overlap(query: Query, value: str) -> Query:
    return _whole("micro_batches", 1, 2)(query, value)


def _balancing(query: Query, value: str) -> Query:
    if value not in ("on", "off"):
        raise InputError("must be on or off")
    return replace(query, balanced=value == "on")


def _prefix(query: Query, value: str) -> Query:
    share = number(value, "prefix")
    if not 0 <= share < 1:
        raise InputError("must be from 0 to below 1")
    return replace(query, workload=replace(query.workload, prefix=share))


def _acceptance(query: Query, value: str) -> Query:
    share = number(value, "acceptance")
    if not 0 <= share <= 1:
        raise InputError("must be from 0 to 1")
    return replace(query, workload=replace(query.workload, acceptance=share))


CHANGES: Mapping[str, Change] = MappingProxyType(
    {
        "hardware": _hardware,
        "nodes": _whole("nodes", 1, 128),
        **{f"hardware.{name}": _rate(name) for name in RATES},
        "hardware.flops": _flops,
        "ttft": _objective("ttft"),
        "tpot": _objective("tpot"),
        "utilisation": _objective("utilisation"),
        "prefix": _prefix,
        "acceptance": _acceptance,
        "redundant_experts": _whole("redundant_experts", 0, 4096),
        "overlap": _overlap,
        "balancing": _balancing,
    }
)
