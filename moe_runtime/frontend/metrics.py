"""Metrics: what /metrics says, in Prometheus form.

Owns names, labels and buckets. Latencies are what each frontend saw of its own requests, told apart by
the label `frontend`; everything else is what the ranks say of themselves (`Board`). Whichever of several
frontends is asked answers for all: with every frontend's own numbers, and with the ranks' as the first one
heard them, so that no counter goes back when the next scrape meets another frontend.
"""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from moe_runtime.engine.messages import ROWS_BUCKETS, Status
from moe_runtime.frontend.admission import Admission, Verdict
from moe_runtime.frontend.balancing_metrics import balancing_metrics
from moe_runtime.frontend.board import KINDS, Board, RankView, tokens_of
from moe_runtime.frontend.families import pack, write
from moe_runtime.report.records import OVERLAP_REASONS, PHASES
from moe_runtime.spec.limits import DISPATCH_MODES

PREFIX = "moe_runtime"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKENS = tuple(float(4**i) for i in range(1, 11))
_RANK = ("deployment", "instance", "rank")
_FRONTEND = "frontend"


class Metrics:
    """The metrics of one frontend, number `frontend` of `frontends`."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(
        self,
        board: Board,
        *,
        ranks_per_node: int,
        admission: Admission | None = None,
        frontend: int = 0,
        frontends: int = 1,
    ) -> None:
        self.board = board
        self._frontend, self._frontends = frontend, frontends
        self._registry = r = CollectorRegistry()
        self._ranks = _RankMetrics(board, ranks_per_node)
        me = self._me = str(frontend)
        self._ttft = _histogram(r, me, "time_to_first_token_seconds", "From arrival to the first token")
        self._itl = _histogram(r, me, "inter_token_latency_seconds", "Between tokens of a request")
        self._queue = _histogram(r, me, "queue_seconds", "From arrival at a rank to admission there")
        self._end_to_end = _histogram(
            r, me, "request_seconds", "From arrival to the last token", (*_SECONDS, 300.0)
        )
        self._prompt = _histogram(r, me, "request_prompt_tokens", "Prompt lengths", _TOKENS)
        self._output = _histogram(r, me, "request_output_tokens", "Output lengths", _TOKENS)
        labels = [_FRONTEND, "finish_reason"]
        self._requests = Counter(f"{PREFIX}_requests", "Requests that ended, by reason", labels, registry=r)
        self._refused = Counter(
            f"{PREFIX}_requests_refused",
            "Requests not let in, by HTTP status",
            [_FRONTEND, "status"],
            registry=r,
        )
        if admission is not None:
            _gauge(r, me, "frontend_requests", "Requests let in and not ended").set_function(
                lambda: admission.num_requests
            )
            _gauge(r, me, "frontend_requests_waiting", "Those without a first token").set_function(
                lambda: admission.num_waiting
            )
            _gauge(r, me, "frontend_tokens", "Their prompt and requested output tokens").set_function(
                lambda: admission.tokens
            )

    def observe_verdict(self, verdict: Verdict) -> None:
        """Admission answered."""
        if not verdict.admitted:
            self._refused.labels(self._me, str(int(verdict.status))).inc()

    def observe_first_token(self, *, ttft: float, queue: float) -> None:
        """Seconds from arrival to the first token, and those of them queued at a rank."""
        self._ttft.observe(ttft)
        self._queue.observe(queue)

    def observe_token(self, *, gap: float) -> None:
        """Seconds since the request's previous token."""
        self._itl.observe(gap)

    def observe_finished(
        self, *, finish_reason: str, seconds: float, prompt_tokens: int, output_tokens: int
    ) -> None:
        """A request ended; `seconds` since its arrival."""
        self._requests.labels(self._me, finish_reason).inc()
        self._end_to_end.observe(seconds)
        self._prompt.observe(prompt_tokens)
        self._output.observe(output_tokens)

    def observe_status(self, status: Status, now: float) -> None:
        """A rank's status came."""
        self.board.observe(status, now)

    def export(self) -> bytes:
        """What this frontend has to say for a scrape, for the one that is scraped; the first one also
        tells what ranks say."""
        return self._packed(ranks=self._frontend == 0)

    def render(self, answers: Mapping[int, bytes] | None = None) -> bytes:
        """The text that /metrics answers: `answers` are the exports of all frontends that gave one."""
        known = dict(answers) if answers else {self._frontend: self.export()}
        if 0 not in known:
            known[self._frontend] = self._packed(ranks=True)
        up = GaugeMetricFamily(f"{PREFIX}_frontend_up", "1 for a frontend that answered", labels=[_FRONTEND])
        for number in range(self._frontends):
            up.add_metric([str(number)], number in known)
        return write([*(known[number] for number in sorted(known)), pack([up])])

    def _packed(self, *, ranks: bool) -> bytes:
        return pack([*self._registry.collect(), *(self._ranks.collect() if ranks else ())])


class _RankMetrics(Collector):
    """Reads the board whenever somebody asks: counters are the ranks' own, never summed up here."""

    def __init__(self, board: Board, ranks_per_node: int) -> None:
        self._board = board
        self._ranks_per_node = ranks_per_node

    def collect(self) -> Iterator[Metric]:
        views = self._board.ranks()
        yield from _gauges(views)
        yield from _counters(views)
        rows = HistogramMetricFamily(f"{PREFIX}_step_rows", "Rows of a rank's steps", labels=_RANK)
        for view in views:
            total = view.status.totals.decode_rows + view.status.totals.prefill_rows
            rows.add_metric(_labels(view), _buckets(view.status.totals.rows_histogram), sum_value=total)
        yield rows
        fill = GaugeMetricFamily(
            f"{PREFIX}_step_fill", "Rows of all ranks / (ranks x rows of the fullest)", labels=["instance"]
        )
        for view in views:
            if view.status.rank == 0 and view.did.steps:
                fill.add_metric([view.status.instance], view.did.step_fill / view.did.steps)
        yield fill
        balance = GaugeMetricFamily(
            f"{PREFIX}_balancedness", "Mean rank load / max rank load", labels=["instance"]
        )
        for instance, value in self._board.balancedness().items():
            balance.add_metric([instance], value)
        yield balance
        per_node = GaugeMetricFamily(
            f"{PREFIX}_tokens_per_second_per_node",
            "Throughput of a role over its nodes",
            labels=["deployment", "kind"],
        )
        for role, rates in self._board.role_rates(self._ranks_per_node).items():
            for kind, rate in rates.items():
                per_node.add_metric([role, kind], rate)
        yield per_node
        yield from balancing_metrics(views, PREFIX)


def _gauges(views: list[RankView]) -> Iterator[Metric]:
    for name, help_text, attribute in (
        ("requests_running", "Sequences in the running batch of a rank", "running"),
        ("requests_waiting", "Requests queued at a rank", "waiting"),
        ("requests_pulling", "Sequences whose KV is on the way", "pulling"),
        ("waiting_tokens", "Tokens that queued requests still have to compute", "waiting_tokens"),
        ("kv_blocks", "KV blocks of a rank", "kv_blocks"),
        ("kv_blocks_used", "KV blocks of live sequences and leases", "kv_used"),
        ("kv_blocks_cached", "Free KV blocks that hold a reusable prefix", "kv_cached"),
        ("chunk_tokens", "Prefill rows a step may take", "chunk_tokens"),
        ("heartbeat_seconds", "Monotonic time of a rank's newest status", "time"),
    ):
        family = GaugeMetricFamily(f"{PREFIX}_{name}", help_text, labels=_RANK)
        for view in views:
            family.add_metric(_labels(view), getattr(view.status, attribute))
        yield family


def _counters(views: list[RankView]) -> Iterator[Metric]:
    tokens = CounterMetricFamily(f"{PREFIX}_tokens", "Tokens by kind, each once", labels=[*_RANK, "kind"])
    for view in views:
        for kind in KINDS:
            tokens.add_metric([*_labels(view), kind], tokens_of(view.status.totals, kind))
    yield tokens
    moved = CounterMetricFamily(
        f"{PREFIX}_handed_over_tokens", "Prompt tokens prefilled elsewhere", labels=[*_RANK, "kv"]
    )
    for view in views:
        totals = view.status.totals
        moved.add_metric([*_labels(view), "pulled"], totals.pulled_tokens)
        moved.add_metric([*_labels(view), "reused"], totals.reused_tokens)
    yield moved
    for name, help_text, label, kinds, attribute in (
        ("step_phase_seconds", "Wall seconds of steps by phase", "phase", PHASES, "phase_seconds"),
        ("steps_by_dispatch_mode", "Steps by how rows travelled", "mode", DISPATCH_MODES, "dispatch_modes"),
        (
            "steps_by_overlap_reason",
            "Steps by why they ran as one or two micro-batches",
            "reason",
            OVERLAP_REASONS,
            "overlap_reasons",
        ),
    ):
        family = CounterMetricFamily(f"{PREFIX}_{name}", help_text, labels=[*_RANK, label])
        for view in views:
            for kind, value in zip(kinds, getattr(view.status.totals, attribute), strict=False):
                family.add_metric([*_labels(view), kind], value)
        yield family
    for name, help_text, attribute in (
        ("steps", "Steps taken", "steps"),
        ("step_seconds", "Wall seconds of steps", "step_seconds"),
        ("preemptions", "Sequences preempted", "preemptions"),
    ):
        family = CounterMetricFamily(f"{PREFIX}_{name}", help_text, labels=_RANK)
        for view in views:
            family.add_metric(_labels(view), getattr(view.status.totals, attribute))
        yield family


def _labels(view: RankView) -> list[str]:
    return [view.status.deployment, view.status.instance, str(view.status.rank)]


def _buckets(counts: list[int]) -> list[tuple[str, float]]:
    """Cumulative counts with their upper bounds, as the exposition format wants them."""
    bounds = [*(str(float(b)) for b in ROWS_BUCKETS), "+Inf"]
    total, out = 0, []
    for bound, count in zip(bounds, counts or [0] * len(bounds), strict=True):
        total += count
        out.append((bound, float(total)))
    return out


def _histogram(
    registry: CollectorRegistry, me: str, name: str, help_text: str, buckets: tuple[float, ...] = _SECONDS
) -> Histogram:
    return Histogram(f"{PREFIX}_{name}", help_text, [_FRONTEND], buckets=buckets, registry=registry).labels(
        me
    )


def _gauge(registry: CollectorRegistry, me: str, name: str, help_text: str) -> Gauge:
    return Gauge(f"{PREFIX}_{name}", help_text, [_FRONTEND], registry=registry).labels(me)
