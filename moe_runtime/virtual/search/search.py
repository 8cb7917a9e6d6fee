"""Search: every option of every phase, joined; the front, the winner, the rivals.

Owns the order of work. Deterministic: no clock, no randomness but the seeded draws of expert loads.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from moe_runtime.errors import InputError
from moe_runtime.virtual.search.candidate import Candidate, candidates, first_token, front, order, useful
from moe_runtime.virtual.search.evaluate import Evaluator
from moe_runtime.virtual.search.option import KINDS, Choice, Option, Phase, bare
from moe_runtime.virtual.search.query import Query, checked
from moe_runtime.virtual.search.space import backends, batches, instances, variants

PHASES: tuple[Phase, ...] = ("prefill", "decode", "unified")
SLOWEST = 1.5
"""Options whose tokens take longer than this times the objective are not even in the front."""
UNIFIED = "one deployment for both phases"
BEYOND: Mapping[Phase, str] = MappingProxyType(
    {
        "prefill": "larger ones are not searched",
        "decode": "larger ones are not searched: one round of dispatch carries no more",
        "unified": "larger ones are not searched",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search found.

    front    from most throughput to most speed, all of them within the objective of the first token
    winner   most throughput within both objectives
    plan     the same among what a plan of this version can say; None: none of them is
    kinds    the best within both objectives by how decode is cut, and of one deployment for both phases
    rivals   the winner with one thing changed: what -> the best such candidate within both objectives
    stops    why the winner's phases have no larger batches
    options  evaluated, by phase
    pairs    candidates looked at
    recorded whether expert loads are the model's own
    """

    query: Query
    front: tuple[Candidate, ...]
    winner: Candidate
    plan: Candidate | None
    kinds: dict[str, Candidate]
    rivals: dict[str, Candidate]
    stops: dict[Phase, str]
    options: dict[Phase, int]
    pairs: int
    recorded: bool


def search(query: Query) -> Found:
    """The best plans of a query. InputError if nothing fits, or nothing meets the objectives."""
    evaluator = Evaluator(checked(query))
    ladders = {phase: Ladders(evaluator, phase) for phase in PHASES}
    prefill, decode, unified = (useful(ladders[phase].options()) for phase in PHASES)
    every = list(candidates(query, prefill, decode, unified))
    if not every:
        raise InputError(_nothing_fits(query, ladders))
    prompt = [c for c in every if c.ttft <= query.objectives.ttft]
    good = sorted((c for c in prompt if c.tpot <= query.objectives.tpot), key=order)
    if not good:
        raise InputError(_nothing_meets(query, every))
    winner = good[0]
    return Found(
        query=query,
        front=tuple(front(prompt)),
        winner=winner,
        plan=next((c for c in good if c.written), None),
        kinds=_kinds(query, good),
        rivals=_rivals(query, winner, ladders),
        stops=_stops(query, winner, ladders),
        options={phase: len(ladders[phase].options()) for phase in PHASES},
        pairs=len(every),
        recorded=evaluator.recorded,
    )


class Ladders:
    """Options of one phase by instance, batches ascending, and why each has no larger ones."""

    def __init__(self, evaluator: Evaluator, phase: Phase) -> None:
        self._query = evaluator.query
        self._rungs: dict[Choice, tuple[list[Option], str]] = {}
        for instance in instances(self._query, phase):
            for choice in variants(self._query, instance):
                self._rungs[bare(choice)] = self._climb(evaluator, choice)

    def options(self) -> list[Option]:
        return [option for rungs, _ in self._rungs.values() for option in rungs]

    def ends(self) -> list[str]:
        """Why instances without any option have none."""
        return [end for rungs, end in self._rungs.values() if not rungs]

    def above(self, option: Option) -> Option | str:
        """The next larger batch of an option's instance, or why there is none."""
        rungs, end = self._rungs[bare(option.choice)]
        at = rungs.index(option) + 1
        return rungs[at] if at < len(rungs) else end

    def _climb(self, evaluator: Evaluator, instance: Choice) -> tuple[list[Option], str]:
        rungs: list[Option] = []
        for choice in batches(self._query, instance):
            option: Option | str = ""
            for tried in backends(self._query, choice):
                option = evaluator.option(tried)
                if not isinstance(option, str):
                    break
            if isinstance(option, str):
                return rungs, option
            slow = self._too_slow(option)
            if slow and rungs:
                return rungs, slow
            rungs.append(option)
            if slow:  # kept: what the shortest times are is asked when nothing meets the objectives
                return rungs, slow
        return rungs, BEYOND[instance.phase]

    def _too_slow(self, option: Option) -> str:
        objectives = self._query.objectives
        if option.tpot > SLOWEST * objectives.tpot:
            return f"TPOT would be {option.tpot * 1e3:.1f} ms"
        if option.choice.chunk:
            seconds = first_token(option, self._query.workload, 0.0)
            if seconds > objectives.ttft:
                return f"TTFT would be {seconds:.2f} s before any queue"
        return ""


def _kinds(query: Query, good: Iterable[Candidate]) -> dict[str, Candidate]:
    best: dict[str, Candidate] = {}
    for candidate in good:
        kind = candidate.decode.choice.kind(query.ranks_per_node) if candidate.prefill else UNIFIED
        best.setdefault(kind, candidate)
    return {kind: best[kind] for kind in (*KINDS, UNIFIED) if kind in best}


def _rivals(query: Query, winner: Candidate, ladders: dict[Phase, Ladders]) -> dict[str, Candidate]:
    """Other options of one phase beside the winner's of the other."""
    if winner.prefill is None:
        pools = {"unified": candidates(query, [], [], ladders["unified"].options())}
    else:
        first, second = [winner.prefill], [winner.decode]
        pools = {
            "decode": candidates(query, first, ladders["decode"].options(), []),
            "prefill": candidates(query, ladders["prefill"].options(), second, []),
        }
    best: dict[str, Candidate] = {}
    for phase, pool in pools.items():
        mine = _choice(winner, phase)
        for candidate in sorted(pool, key=order):
            if candidate.meets(query.objectives):
                what = _difference(mine, _choice(candidate, phase))
                if what:
                    best.setdefault(f"{phase} {what}", candidate)
    return dict(sorted(best.items(), key=lambda item: order(item[1])))


def _choice(candidate: Candidate, phase: str) -> Choice:
    option = candidate.prefill if phase == "prefill" else candidate.decode
    assert option is not None
    return option.choice


def _difference(mine: Choice, other: Choice) -> str:
    """What sets another choice apart, if it is one thing; what follows from it, as batches, may differ."""
    if other.group != mine.group or other.whole != mine.whole:
        return "" if other.ranks != mine.ranks else other.label
    if other.queries != mine.queries:
        return "" if other.ranks != mine.ranks else ("with drafts" if other.queries > 1 else "without drafts")
    if other.ranks != mine.ranks:
        return other.label
    if other.redundant != mine.redundant:
        return f"{other.redundant} redundant"
    if other.micro_batches != mine.micro_batches:
        return "one micro-batch" if other.micro_batches == 1 else "two micro-batches"
    return "" if other.cut == mine.cut else ("larger chunks" if other.cut > mine.cut else "smaller chunks")


def _stops(query: Query, winner: Candidate, ladders: dict[Phase, Ladders]) -> dict[Phase, str]:
    stops: dict[Phase, str] = {}
    for option in (winner.prefill, winner.decode):
        if option is not None:
            stops[option.choice.phase] = _stop(query, winner, option, ladders[option.choice.phase])
    return stops


def _stop(query: Query, winner: Candidate, option: Option, ladder: Ladders) -> str:
    above = ladder.above(option)
    if isinstance(above, str):
        return above
    if above.tpot > query.objectives.tpot:
        return f"TPOT would be {above.tpot * 1e3:.1f} ms"
    if option.choice.phase == "decode" and winner.limit != "decode":
        return f"decode waits already: {winner.limit} gives no more"
    if option.choice.phase == "prefill":
        seconds = first_token(above, query.workload, winner.busy[0])
        if seconds > query.objectives.ttft:
            return f"TTFT would be {seconds:.2f} s"
        if winner.limit not in ("prefill", "TTFT"):
            return f"prefill waits already: {winner.limit} gives no more"
    return "throughput would not rise"


def _nothing_fits(query: Query, ladders: dict[Phase, Ladders]) -> str:
    ends = [end for phase in PHASES for end in ladders[phase].ends()]
    memory = sorted({end for end in ends if end.startswith("memory")}, key=_gib)
    least = f"; the least needed: {memory[0]}" if memory else ""
    nodes = "1 node" if query.nodes == 1 else f"{query.nodes} nodes"
    return f"no plan fits {nodes} of {query.ranks_per_node} {query.hardware}{least}"


def _gib(end: str) -> int:
    return int("".join(c for c in end.split("GiB")[0] if c.isdigit()))


def _nothing_meets(query: Query, every: Iterable[Candidate]) -> str:
    asked, found = query.objectives, list(every)
    first, token = min(found, key=lambda c: c.ttft), min(found, key=lambda c: c.tpot)
    return (
        f"no plan meets --slo ttft={asked.ttft:g}s, tpot={asked.tpot * 1e3:g}ms: the shortest TTFT found is"
        f" {first.ttft:.2f} s, the shortest TPOT {token.tpot * 1e3:.1f} ms"
    )
