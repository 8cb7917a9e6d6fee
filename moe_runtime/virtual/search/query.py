"""Query: what a plan is searched for, as frozen data: model, machine, workload, objectives, restrictions.

Owns the meaning of the command's short forms `input=1200,output=1500` and `ttft=2s,tpot=50ms`. Knows no
formula of costs and no file.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from moe_runtime.errors import InputError
from moe_runtime.spec.hardware import Hardware
from moe_runtime.spec.model import ModelSpec
from moe_runtime.virtual.common import require_rates
from moe_runtime.virtual.cost.constants import Constants, Machine

MOST_NODES = 128
NODE_RANKS = 8
QUANTILES = 64
WIDE_NODE_RANKS = 4  # of a machine whose scale-up domain is wider than a node: NVL72 trays have 4 GPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests in steady state, lengths in tokens.

    input, output  means
    prefix         share of the prompts' tokens that the prefix cache has
    acceptance     probability that a drafted token is accepted; None: no multi-token prediction
    context        mean context of a decoding sequence, long outputs weighted as long as they stay
    spread         standard deviation of that context
    variation      squared coefficient of variation of a prompt's computed tokens
    lengths        computed tokens of the prompt that a computed token is of, over their mean: its quantiles
                   at (i + 1/2) / n, rising
    """

    input: float
    output: float
    prefix: float = 0.0
    acceptance: float | None = None
    context: float = 0.0
    spread: float = 0.0
    variation: float = 0.0
    lengths: tuple[float, ...] = (1.0,)

    @property
    def computed(self) -> float:
        """Prompt tokens that prefill computes."""
        return self.input * (1 - self.prefix)

    @property
    def cached(self) -> float:
        return self.input * self.prefix


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """What users are promised, seconds: `ttft` at the 90th percentile, `tpot` on average.

    utilisation  the share of the time that prefill may be busy
    """

    ttft: float
    tpot: float
    utilisation: float = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Everything a search depends on.

    name              the model as `model.path` of a plan has it
    redundant_experts, micro_batches  None: searched
    balanced          experts sit where the balancer puts them; False: in order
    known             constants of the cost model, the machine's possibly changed by a what-if question
    """

    name: str
    model: ModelSpec
    hardware: str
    nodes: int
    workload: Workload
    objectives: Objectives
    known: Constants
    redundant_experts: int | None = None
    micro_batches: int | None = None
    balanced: bool = True

    @property
    def machine(self) -> Machine:
        return self.known.machine(self.hardware)

    @property
    def ranks_per_node(self) -> int:
        return WIDE_NODE_RANKS if self.machine.hardware.scaleup_world > NODE_RANKS else NODE_RANKS

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


def checked(query: Query) -> Query:
    """The query itself. InputError naming what cannot be."""
    require_rates(query.machine, query.model, query.model.dtype, where=f"--model {query.name}")
    if not 1 <= query.nodes <= MOST_NODES:
        raise InputError(f"--nodes is {query.nodes}, must be from 1 to {MOST_NODES}")
    work = query.workload
    if work.acceptance is not None and not query.model.mtp_layers:
        raise InputError("--workload acceptance: the model has no layers for multi-token prediction")
    longest = work.input + work.output
    if longest > query.model.max_positions:
        raise InputError(
            f"--workload: input + output = {longest:g} tokens, the model has positions for"
            f" {query.model.max_positions}"
        )
    return query


def parse_workload(text: str) -> Workload:
    """`input=1200,output=1500[,prefix=0.5][,acceptance=0.8]`, all requests alike. InputError."""
    values = _pairs(text, "--workload", ("input", "output"), ("prefix", "acceptance"), number)
    for name in ("input", "output"):
        if values[name] < 1:
            raise InputError(f"--workload {name} = {values[name]:g}: must be at least 1 token")
    prefix, acceptance = values.get("prefix", 0.0), values.get("acceptance")
    if not 0 <= prefix < 1:
        raise InputError(f"--workload prefix = {prefix:g}: must be from 0 to below 1")
    if acceptance is not None and not 0 <= acceptance <= 1:
        raise InputError(f"--workload acceptance = {acceptance:g}: must be from 0 to 1")
    return uniform(values["input"], values["output"], prefix, acceptance)


def uniform(prompt: float, output: float, prefix: float = 0.0, acceptance: float | None = None) -> Workload:
    """All requests alike: a sequence is anywhere in its output, so its context is uniform over that range."""
    return Workload(
        input=prompt,
        output=output,
        prefix=prefix,
        acceptance=acceptance,
        context=prompt + output / 2,
        spread=output / math.sqrt(12),
    )


def recorded(lengths: Iterable[tuple[int, int, float]]) -> Workload:
    """The workload of (prompt tokens, output tokens, cached prompt tokens) of recorded requests.

    A sequence stays as long as its output is, so at any moment there are more long ones: a request of n
    in and m out counts m times with contexts from n to n + m. InputError without requests.
    """
    rows = list(lengths)
    if not rows:
        raise InputError("--workload: the trace has no requests")
    count = len(rows)
    prompt, output, cached = (sum(float(r[i]) for r in rows) / count for i in range(3))
    computed = [n - c for n, _, c in rows]
    mean = sum(computed) / count
    variance = sum((c - mean) ** 2 for c in computed) / count
    steps = output * count
    context = sum(m * (n + m / 2) for n, m, _ in rows) / steps
    square = sum(m * ((n + m / 2) ** 2 + m * m / 12) for n, m, _ in rows) / steps
    return Workload(
        input=prompt,
        output=output,
        prefix=cached / prompt,
        context=context,
        spread=math.sqrt(max(square - context**2, 0.0)),
        variation=variance / mean**2,
        lengths=_by_token(computed),
    )


def _by_token(computed: list[float]) -> tuple[float, ...]:
    """Quantiles of `Workload.lengths`: long prompts count as often as they have tokens."""
    lengths = np.sort(np.asarray(computed))
    until = np.cumsum(lengths)
    at = np.searchsorted(until, (np.arange(QUANTILES) + 0.5) / QUANTILES * until[-1])
    return tuple((lengths[np.minimum(at, len(lengths) - 1)] / lengths.mean()).tolist())


def parse_objectives(text: str) -> Objectives:
    """`ttft=2s,tpot=50ms[,utilisation=0.8]`. InputError."""
    values = _pairs(text, "--slo", ("ttft", "tpot"), ("utilisation",), objective)
    return Objectives(**values)


def objective(text: str, what: str) -> float:
    """The value of an objective, the last word of `what`: its times have a unit. InputError naming `what`."""
    if what.endswith("utilisation"):
        value = number(text, what)
        if not 0 < value < 1:
            raise InputError(f"{what} = {value:g}: must be above 0 and below 1")
        return value
    value = seconds(text, what)
    if value <= 0:
        raise InputError(f"{what}: must be above 0 seconds")
    return value


def number(text: str, what: str) -> float:
    """A finite number. InputError naming `what`."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InputError(f"{what} = {text!r}: a number was expected")
    return value


def seconds(text: str, what: str) -> float:
    """Seconds of a time with its unit: a plain 50 could be meant as either. InputError naming `what`."""
    for unit, scale in (("ms", 1e-3), ("s", 1.0)):
        if text.endswith(unit):
            return number(text.removesuffix(unit).rstrip(), what) * scale
    raise InputError(f"{what} = {text!r}: a time with its unit was expected, as 50ms or 2s")


def _pairs(
    text: str,
    option: str,
    needed: tuple[str, ...],
    more: tuple[str, ...],
    read: Callable[[str, str], float],
) -> dict[str, float]:
    values: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals or name not in (*needed, *more):
            names = ", ".join((*needed, *more))
            raise InputError(f"{option}: {part.strip()!r} is not one of {names} with =value")
        if name in values:
            raise InputError(f"{option}: {name}= is given twice")
        values[name] = read(value.strip(), f"{option} {name}")
    for name in needed:
        if name not in values:
            raise InputError(f"{option}: {name}= is missing")
    return values


def with_hardware(query: Query, hardware: Hardware) -> Query:
    """The query on a machine whose datasheet row is another."""
    machine = replace(query.machine, hardware=hardware)
    return replace(
        query, known=replace(query.known, machines={**query.known.machines, query.hardware: machine})
    )
