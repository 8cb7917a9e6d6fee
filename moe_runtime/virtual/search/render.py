"""Render: what `plan` prints. Owns words and columns; computes nothing but differences and percentages."""

from collections.abc import Iterator, Sequence

from moe_runtime.report.cost import per_million
from moe_runtime.spec.bytes import parameter_counts
from moe_runtime.virtual.search.candidate import Candidate, order
from moe_runtime.virtual.search.explain import IDLE, account, why
from moe_runtime.virtual.search.option import Option
from moe_runtime.virtual.search.query import Query
from moe_runtime.virtual.search.room import FREE
from moe_runtime.virtual.search.search import Found

FRONT_ROWS = 12
RIVALS = 7
LEAST_SHARE = 0.1
TOLD_APART = 0.17
"""What the cost model is away from published figures at most (docs/cost-model.md)."""


def render(found: Found, *, price_per_node_hour: float | None = None) -> str:
    """The report of one search, without a newline at the end."""
    sections = (
        _head(found),
        _front(found, price_per_node_hour),
        _winner(found, price_per_node_hour),
        _account(found),
        _rivals(found),
        _kinds(found),
    )
    return "\n\n".join("\n".join(lines) for lines in sections)


def render_change(before: Found, then: Query, after: Found | str, same: Candidate | str, what: str) -> str:
    """A what-if question's answer: the best plan `then`, and what the present winner gives then.

    `after` and `same` are messages where there is none.
    """
    old = before.winner.throughput
    lines = [f"what if {what}"]
    kept = same if isinstance(same, str) else _delta(same, old)
    lines.append(f"  the same plan     {kept}")
    if isinstance(same, Candidate) and not same.meets(then.objectives):
        lines.append("                    which misses an objective")
    if isinstance(after, str):
        lines.append(f"  the best plan     {after}")
    else:
        lines.append(f"  the best plan     {_delta(after.winner, old)}")
        lines.append(f"                    {describe(after.winner)}")
    return "\n".join(lines)


def describe(candidate: Candidate) -> str:
    """Instances in a line."""
    parts = []
    if candidate.prefill is not None:
        p = candidate.prefill.choice
        parts.append(
            f"prefill {candidate.copies[0]} x {p.label}, {p.redundant} redundant, {p.chunk} tokens a step"
        )
    d = candidate.decode.choice
    name = "decode" if candidate.prefill is not None else "unified"
    drafts = ", drafts" if d.queries > 1 else ""
    parts.append(
        f"{name} {candidate.copies[1]} x {d.label}, {d.redundant} redundant, {d.sequences} sequences{drafts}"
    )
    return "; ".join(parts)


def _delta(candidate: Candidate, before: float) -> str:
    change = candidate.throughput / before - 1
    return (
        f"{candidate.throughput:,.0f} output tokens/s per node ({change:+.1%}), TTFT {candidate.ttft:.2f} s,"
        f" TPOT {candidate.tpot * 1e3:.1f} ms"
    )


def _head(found: Found) -> Iterator[str]:
    q = found.query
    work, asked, counts = q.workload, q.objectives, parameter_counts(q.model)
    yield (
        f"model     {q.name}: {counts.total / 1e9:.0f} G parameters, weights"
        f" {q.model.weight_dtype(q.model.dtype)}"
    )
    yield f"cluster   {q.nodes} nodes of {q.ranks_per_node} {q.hardware}, {FREE:.0%} of the memory left free"
    cached = f", {work.prefix:.0%} of the input cached" if work.prefix else ""
    drafts = "" if work.acceptance is None else f", drafts accepted with {work.acceptance:.0%}"
    yield (
        f"workload  {work.input:.0f} tokens in, {work.output:.0f} out{cached}{drafts};"
        f" a decoding sequence has {work.context:.0f} on average"
    )
    yield (
        f"objective TTFT {asked.ttft:g} s at the 90th percentile with prefill at most {asked.utilisation:.0%}"
        f" busy, TPOT {asked.tpot * 1e3:g} ms"
    )
    loads = "the model's recorded ones" if found.recorded else "a power law as uneven as DeepSeek-V3's"
    place = "placed by the balancer" if q.balanced else "in order"
    yield f"experts   loads: {loads}, {place}, with the drift between steps of the cost model"
    options = ", ".join(f"{count} {phase}" for phase, count in found.options.items())
    yield f"searched  {options} options, {found.pairs} deployments of them"


COLUMNS = (
    f"{'out tok/s':>9} {'in tok/s':>9} {'tok/s per':>9} {'TTFT':>5} {'TPOT':>6}",
    f"{'per node':>9} {'per node':>9} {'user':>9} {'s':>5} {'ms':>6}",
)


def _front(found: Found, price: float | None) -> Iterator[str]:
    yield "front: throughput against speed, plans within the TTFT (* and the TPOT, > the winner)"
    yield "  prefill: tokens of a step; decode: sequences; both of a group; /2: as two micro-batches"
    cost = f" {'$/M out':>8}" if price is not None else ""
    yield f"    {COLUMNS[0]}{cost}  prefill            decode"
    yield f"    {COLUMNS[1]}{' ' * len(cost)}"
    for c in _thinned(found):
        star = "*" if c.meets(found.query.objectives) else " "
        mark = ">" if c is found.winner else " "
        cut = f"{_short(c.prefill, c.copies[0]):<18} {_short(c.decode, c.copies[1])}"
        yield f"  {mark}{star}{_figures(found.query, c, price)}  {cut}"


def _thinned(found: Found) -> list[Candidate]:
    """Rows of the front: the winner, and others spread evenly, none with a tenth of its throughput."""
    front = [c for c in found.front if c.throughput > LEAST_SHARE * found.winner.throughput]
    if len(front) <= FRONT_ROWS:
        return list(front)
    step = (len(front) - 1) / (FRONT_ROWS - 1)
    kept = {round(i * step) for i in range(FRONT_ROWS)}
    kept |= {i for i, c in enumerate(front) if c is found.winner}
    return [front[i] for i in sorted(kept)]


def _figures(query: Query, c: Candidate, price: float | None) -> str:
    inputs = c.throughput / query.workload.output * query.workload.input
    text = f"{c.throughput:>9,.0f} {inputs:>9,.0f} {c.speed:>9.1f} {c.ttft:>5.2f} {c.tpot * 1e3:>6.1f}"
    return text if price is None else f"{text} {dollars(c, price):>8.3f}"


def dollars(candidate: Candidate, price_per_node_hour: float) -> float:
    """Of a million output tokens, their input and idle nodes included."""
    return per_million(price_per_node_hour, candidate.throughput)


def _short(option: Option | None, copies: int) -> str:
    if option is None:
        return "-"
    c = option.choice
    size = f"{c.chunk} tok" if c.phase == "prefill" else f"{c.sequences} seq"
    split = "/2" if c.micro_batches == 2 else ""
    return f"{copies} x {c.label}, {size}{split}{'+draft' if c.queries > 1 else ''}"


def _winner(found: Found, price: float | None) -> Iterator[str]:
    w, q = found.winner, found.query
    yield f"winner: {w.throughput:,.0f} output tokens/s per node, {w.speed:.1f} tokens/s per user"
    if price is not None:
        yield f"  {dollars(w, price):.3f} $ per million output tokens at {price:g} $ per node and hour"
    for option, copies, busy in (
        (w.prefill, w.copies[0], w.busy[0]),
        (w.decode, w.copies[1], w.busy[1]),
    ):
        if option is not None:
            yield from _instance(q, option, copies, busy, found.stops[option.choice.phase])
    yield f"  {w.limit} is what gives no more; {w.ranks} of {q.ranks} ranks are used"
    if found.plan is None:
        yield "  no plan of this version can say any of the plans within the objectives (see below)"
    elif found.plan is not w:
        yield "  plans of this version have neither tensor parallelism nor drafts: the best they can say is"
        yield f"  {found.plan.throughput:,.0f}: {describe(found.plan)}"


def _instance(query: Query, option: Option, copies: int, busy: float, stop: str) -> Iterator[str]:
    c = option.choice
    memory = option.budget.total / query.machine.hardware.memory_bytes
    sizes = []
    if c.sequences:
        sizes.append(f"{c.sequences} sequences")
    if c.chunk:
        sizes.append(f"{c.chunk} prompt tokens")
    group = "a rank" if c.group == 1 else f"a group of {c.group} ranks"
    yield (
        f"  {c.phase:<8} {copies} x {c.label}, {c.redundant} redundant experts,"
        f" {' and '.join(sizes)} {group}, {c.micro_batches} micro-batch{'es' if c.micro_batches > 1 else ''}"
    )
    yield (
        f"           step {option.step * 1e3:.1f} ms, bound by {option.cost.bound}; busy {busy:.0%};"
        f" at least {memory:.0%} of the memory"
    )
    yield f"           no larger batch: {stop}"


def _account(found: Found) -> Iterator[str]:
    q = found.query
    shown = _shown(found)
    yield "GPU microseconds per output token: the winner, and the winner with one thing changed"
    yield f"  {'':<29}{'winner':>9}" + "".join(f"{f'({i})':>9}" for i in range(1, len(shown) + 1))
    columns = [account(q, c) for c in (found.winner, *(c for _, c in shown))]
    tables = [{(s.where, s.part): s.seconds for s in column} for column in columns]
    keys = list(dict.fromkeys(key for table in tables for key in table))
    keys = [k for k in keys if k[0] != IDLE] + [(IDLE, IDLE)]
    for where, part in keys:
        name = where if part == IDLE else f"{where:<8} {part}"
        yield f"  {name:<29}" + "".join(f"{table.get((where, part), 0.0) * 1e6:>9.1f}" for table in tables)
    yield f"  {'all':<29}" + "".join(f"{sum(table.values()) * 1e6:>9.1f}" for table in tables)


def _shown(found: Found) -> Sequence[tuple[str, Candidate]]:
    """Rivals in order of throughput."""
    return list(found.rivals.items())[:RIVALS]


def _rivals(found: Found) -> Iterator[str]:
    yield "runners-up"
    for i, (what, c) in enumerate(_shown(found), 1):
        change = c.throughput / found.winner.throughput - 1
        reason = why(found.query, found.winner, c)
        if change > -0.0005:
            change, reason = 0.0, f"as much, but TTFT {c.ttft:.2f} s, TPOT {c.tpot * 1e3:.1f} ms"
        yield f"  ({i}) {what:<27} {change:>6.1%}  {reason}"


def _kinds(found: Found) -> Iterator[str]:
    yield "the best within both objectives by how decode is cut"
    best = found.winner.throughput
    for kind, c in found.kinds.items():
        first = "" if c.prefill is None else f"{_short(c.prefill, c.copies[0])} + "
        cut = f"{first}{_short(c.decode, c.copies[1])}"
        yield f"  {kind:<31} {c.throughput:>8,.0f} {c.throughput / best - 1:>7.1%}  {cut}"
    yield f"  {_verdict(found)}"


def _verdict(found: Found) -> str:
    """Whether experts of decode over several nodes pay, as far as the cost model can tell."""
    per_node = found.query.ranks_per_node
    wide = {kind: c for kind, c in found.kinds.items() if _is_wide(c, per_node)}
    rest = {kind: c for kind, c in found.kinds.items() if kind not in wide}
    if not wide:
        return "wide EP meets the objectives nowhere: it does not pay here"
    if not rest:
        return "wide EP pays here: nothing else meets the objectives"
    (_, best), (other, rival) = (min(some.items(), key=lambda item: order(item[1])) for some in (wide, rest))
    name = "wide EP" if best.decode.choice.group == 1 else "wide EP with tensor-parallel attention"
    lead = best.throughput / rival.throughput
    if max(lead, 1 / lead) < 1 + TOLD_APART:
        ahead, behind = (name, other) if lead >= 1 else (other, name)
        more = max(lead, 1 / lead) - 1
        return f"{ahead} has {more:.1%} more than {behind}, which is less than the cost model may err"
    if lead > 1:
        return f"{name} pays here"
    return f"wide EP does not pay here: {other} has {1 / lead - 1:.1%} more"


def _is_wide(candidate: Candidate, ranks_per_node: int) -> bool:
    choice = candidate.decode.choice
    return candidate.prefill is not None and not choice.whole and choice.ranks > ranks_per_node
