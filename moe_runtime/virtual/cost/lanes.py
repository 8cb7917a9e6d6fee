"""Lanes: a layer's stages on one lane that computes and others that transfer, for one or two micro-batches.

Owns the order in which stages are issued. Each lane takes its tasks in that order, so a layer's end only
grows with the durations: longer stages never end it sooner. Knows no kernel and no link.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

FIRST, SECOND, SHARED, EXPERTS, FINISH = range(5)
NOTHING = -1
WARM = 2  # layers after which the pattern repeats

Order = Sequence[tuple[Literal[0, 1], int]]  # (micro-batch, stage) of one layer, in order of issue

# Decode: the second micro-batch two stages behind, as the engine has it. Rows of one travel beside the shared
# experts and the other's projections, results beside the other's attention core.
DECODE: Order = (
    (0, FIRST), (1, EXPERTS), (0, SECOND), (1, FINISH), (0, SHARED),
    (1, FIRST), (0, EXPERTS), (1, SECOND), (0, FINISH), (1, SHARED),
)  # fmt: skip
# Prefill: one after the other; shared experts and the next layer's attention beside the combine.
PREFILL: Order = (
    (0, SHARED), (0, FINISH), (0, FIRST), (0, SECOND),
    (1, SHARED), (1, FINISH), (1, FIRST), (1, SECOND),
    (0, EXPERTS), (1, EXPERTS),
)  # fmt: skip


class _Run(NamedTuple):
    """Stages between which nothing is waited for and nothing sent: of the first and the last, micro-batch and
    stage; `wait` and `send` say whether there is something before and behind.
    """

    batch: int
    wait: int
    stages: tuple[int, ...]
    sender: int
    send: int


def _runs(order: Order) -> tuple[_Run, ...]:
    runs: list[_Run] = []
    for batch, stage in order:
        wait = stage if stage >= EXPERTS else NOTHING
        send = stage if stage in (SECOND, EXPERTS) else NOTHING
        if runs and wait == runs[-1].send == NOTHING:
            last = runs.pop()
            runs.append(_Run(last.batch, last.wait, (*last.stages, stage), batch, send))
        else:
            runs.append(_Run(batch, wait, (stage,), batch, send))
    return tuple(runs)


class Transfer(NamedTuple):
    """Seconds of the rank that sends most, and of the one that receives most."""

    send: float
    receive: float

    @property
    def seconds(self) -> float:
        return max(self)


class Stages(NamedTuple):
    """Seconds of one micro-batch's layer. A dispatch leaves after `second`, a combine after `experts`.

    first     norm, projections up to the attention core
    second    core, output projection, norm, router, choice of slots
    shared    shared experts
    experts   routed experts of a mean rank
    finish    sum and residual
    heaviest  routed experts of the rank with most rows
    """

    first: float
    second: float
    shared: float
    experts: float
    finish: float
    dispatch: Transfer
    combine: Transfer
    heaviest: float

    @property
    def compute(self) -> tuple[float, ...]:
        """Of a mean rank, by number of the stage."""
        return self.first, self.second, self.shared, self.experts, self.finish


class Layer(NamedTuple):
    """One layer: seconds; of them, computation waits for a dispatch, for a combine; links are in use."""

    seconds: float
    exposed_dispatch: float
    exposed_combine: float
    busy: float


def plain(stages: Stages) -> Layer:
    """One micro-batch, one stage after the other, transfers in full."""
    out, back = stages.dispatch.seconds, stages.combine.seconds
    compute = sum(stages.compute) - stages.experts + stages.heaviest
    return Layer(compute + out + back, out, back, out + back)


_DECODE, _PREFILL = _runs(DECODE), _runs(PREFILL)


# Both functions below keep three clocks. In every layer another rank is the heaviest: it begins its experts
# as early as a mean rank and is late for what comes next. `now` is the clock of the latest rank, for which
# all wait where rows are sent; `mean` and `heavy` say how far before it a mean rank and the layer's heaviest
# one are.


def two_way(stages: Stages) -> Layer:
    """Two micro-batches in decode order; the mean of layers once the pattern repeats.

    Nobody waits for others to send, and links carry both directions at once: one lane of what the heaviest
    rank sends, one of what it receives. A transfer ends when both have it behind them.
    """
    runs = _timed(_DECODE, stages)
    extra, out, back = stages.heaviest - stages.experts, stages.dispatch, stages.combine
    now = mean = heavy = sent = received = busy = 0.0
    waited, arrived = [0.0] * 5, [0.0, 0.0]
    mark = (0.0, 0.0, 0.0, 0.0)
    for layer in range(2 * WARM):
        if layer == WARM:
            mark = (now, waited[EXPERTS], waited[FINISH], busy)
        for batch, wait, seconds, sender, send in runs:
            if wait >= 0:
                slack = now - arrived[batch]
                if slack < 0:
                    waited[wait] -= slack
                    now, slack = arrived[batch], 0.0
                mean, heavy = slack if slack < mean else mean, slack if slack < heavy else heavy
            now += seconds
            if send == EXPERTS:
                heavy = (heavy if sender else mean) - extra
                if heavy < 0:
                    now, mean, heavy = now - heavy, mean - heavy, 0.0
            if send >= 0:
                outward, inward = out if send == SECOND else back
                begin = sent if sent > received else received
                sent = (sent if sent > now else now) + outward
                received = (received if received > now else now) + inward
                arrived[sender] = end = sent if sent > received else received
                busy += end - (begin if begin > now else now)
    return _mean(mark, (now, waited[EXPERTS], waited[FINISH], busy))


def collective(stages: Stages, start: float, slowed: float) -> Layer:
    """Two micro-batches in prefill order, transfers in which all ranks take part; the mean of layers.

    A barrier opens each, so they follow one another everywhere, each as long as its heaviest rank needs:
    `start` seconds of any transfer, then its bytes, `slowed` times as long while any rank computes.
    """
    runs = _timed(_PREFILL, stages)
    extra = stages.heaviest - stages.experts
    lane = _Lane(start, slowed, stages)
    now = mean = heavy = 0.0
    waited = [0.0] * 5
    mark = (0.0, 0.0, 0.0, 0.0)
    for layer in range(2 * WARM):
        if layer == WARM:
            mark = (now, waited[EXPERTS], waited[FINISH], lane.busy)
        for batch, wait, seconds, sender, send in runs:
            if wait >= 0:
                arrived = lane.wait(batch)
                slack = now - arrived
                if slack < 0:
                    waited[wait] -= slack
                    now, slack = arrived, 0.0
                mean, heavy = slack if slack < mean else mean, slack if slack < heavy else heavy
            begin = now
            now += seconds
            if send == EXPERTS:
                heavy = (heavy if sender else mean) - extra
                if heavy < 0:
                    now, mean, heavy = now - heavy, mean - heavy, 0.0
            lane.beside(now - begin)
            if send >= 0:
                lane.issue(sender, send)
    return _mean(mark, (now, waited[EXPERTS], waited[FINISH], lane.busy))


def _timed(runs: tuple[_Run, ...], stages: Stages) -> list[tuple[int, int, float, int, int]]:
    """Runs with the seconds of a mean rank in the place of their stages."""
    compute = stages.compute
    return [(r.batch, r.wait, sum([compute[s] for s in r.stages]), r.sender, r.send) for r in runs]


def _mean(before: tuple[float, ...], after: tuple[float, ...]) -> Layer:
    """Of the layers between two sums."""
    return Layer(*[(b - a) / WARM for a, b in zip(before, after, strict=True)])


class _Lane:
    """Collective transfers in order of issue; `busy`: seconds in which there was one."""

    __slots__ = ("_arrived", "_bytes", "_now", "_pending", "_slowed", "_start", "busy")

    def __init__(self, start: float, slowed: float, stages: Stages) -> None:
        self._start, self._slowed = start, slowed
        self._bytes = {
            SECOND: max(0.0, stages.dispatch.seconds - start),
            EXPERTS: max(0.0, stages.combine.seconds - start),
        }
        self._pending: list[list[float]] = []  # [micro-batch, start left, bytes' seconds left]
        self._arrived = [0.0, 0.0]
        self._now = self.busy = 0.0

    def issue(self, batch: int, stage: int) -> None:
        """A micro-batch's rows leave after this stage."""
        self._pending.append([batch, self._start, self._bytes[stage]])

    def wait(self, batch: int) -> float:
        """When the micro-batch's transfer has ended or will end, without any computation from now on."""
        pending = self._pending  # at most one of each micro-batch
        while pending and (pending[0][0] == batch or pending[-1][0] == batch):
            job = pending[0]
            self._end(job[1] + job[2])
        return self._arrived[batch]

    def beside(self, seconds: float) -> None:
        """Go on during some seconds of computation."""
        left = seconds
        while self._pending:
            job = self._pending[0]
            whole = job[1] + job[2] * self._slowed
            if whole > left:
                begun = left if left < job[1] else job[1]
                job[1] -= begun
                job[2] -= (left - begun) / self._slowed
                self.busy += left
                break
            self._end(whole)
            left -= whole
        self._now += left

    def _end(self, seconds: float) -> None:
        """The first transfer ends after some seconds."""
        self._now += seconds
        self.busy += seconds
        self._arrived[int(self._pending.pop(0)[0])] = self._now
