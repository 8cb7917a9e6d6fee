"""From request records to window, latencies and goodput: pure functions of the records.

Every latency counts from the scheduled arrival, so a client that cannot keep up makes them
worse, not better. Latencies belong to the requests that arrived in the window, wherever they
ended; tokens are counted where they arrived.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_runtime.report.facts import Gaps, RunFacts, percentiles
from moe_runtime.report.records import RequestRecord
from moe_runtime.report.schema import (
    Goodput,
    Latency,
    Percentiles,
    RequestRates,
    RequestRow,
    Requests,
    WholeRun,
    Window,
)

# A client this late has stopped being an open-loop client.
_LATE_MS = 100.0
# Rates over less than this say more about where the edges fell than about the system.
_SHORTEST_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Span:
    """A closed interval on the records' clock."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def contains(self, times: NDArray[np.float64]) -> NDArray[np.bool_]:
        return (times >= self.start) & (times <= self.end)

    def has(self, time: float) -> bool:
        return self.start <= time <= self.end


def finished(record: RequestRecord) -> bool:
    return record.finish_reason in ("stop", "length") and record.error is None and len(record.token_times) > 0


def first_arrival(requests: Sequence[RequestRecord]) -> float:
    return float(min(r.scheduled_arrival for r in requests))


def last_token(requests: Sequence[RequestRecord]) -> float | None:
    ends = [float(r.token_times[-1]) for r in requests if len(r.token_times)]
    return max(ends, default=None)


def choose_window(
    facts: RunFacts, requests: Sequence[RequestRecord], step_ends: NDArray[np.float64], gaps: Gaps
) -> tuple[Span, Window]:
    """From the end of warm-up to the last arrival; if that is under a second or holds no work, the whole run.

    Raises ValueError if there are no requests, or if not even the whole run took any time.
    """
    if not requests:
        raise ValueError("a report needs at least one request")
    origin = first_arrival(requests)
    start = origin if facts.warmup_end is None else max(origin, facts.warmup_end)
    arrivals = Span(start, float(max(r.scheduled_arrival for r in requests)))
    tokens = any(arrivals.has(t) for r in requests for t in r.token_times)
    if arrivals.seconds >= _SHORTEST_SECONDS and (tokens or bool(arrivals.contains(step_ends).any())):
        return arrivals, _describe(facts, arrivals, origin, whole_run=False, gaps=gaps)

    ends = [arrivals.end, last_token(requests), step_ends.max() if len(step_ends) else None]
    whole = Span(origin, float(max(t for t in ends if t is not None)))
    if whole.seconds <= 0:
        raise ValueError("nothing happened after the first arrival: there is nothing to report")
    return whole, _describe(facts, whole, origin, whole_run=True, gaps=gaps)


def _describe(facts: RunFacts, span: Span, origin: float, *, whole_run: bool, gaps: Gaps) -> Window:
    short = span.seconds < facts.asked_seconds
    if whole_run:
        note = (
            f"From the end of warm-up to the last arrival there was under {_SHORTEST_SECONDS:g} s or no work,"
            " so rates are computed over the whole run, from the first arrival to the last token, drain"
            f" included: {span.seconds:.1f} s."
        )
    else:
        note = f"Rates are computed from the end of warm-up to the last arrival: {span.seconds:.1f} s."
    if short:
        note += (
            f" This is shorter than the {facts.asked_seconds:g} s asked for: take the rates as an indication."
        )
        gaps.warn(f"Short window: {span.seconds:.1f} s of the {facts.asked_seconds:g} s asked for.")
    return Window(
        basis="whole_run" if whole_run else "arrivals",
        start=span.start - origin,
        end=span.end - origin,
        seconds=span.seconds,
        asked_seconds=facts.asked_seconds,
        short=short,
        note=note,
    )


def count_requests(
    requests: Sequence[RequestRecord], arrived: Sequence[RequestRecord], preemptions: int, gaps: Gaps
) -> Requests:
    good = sum(finished(r) for r in requests)
    failed = len(requests) - good
    if failed:
        bad = next(r for r in requests if not finished(r))
        why = bad.error or "no token arrived"
        gaps.warn(f"{failed} of {len(requests)} requests failed; the first is request {bad.index}: {why}")
    return Requests(
        count=len(requests), finished=good, failed=failed, preemptions=preemptions, in_window=len(arrived)
    )


def ttft(record: RequestRecord) -> float:
    """Seconds from the scheduled arrival to the first token."""
    return float(record.token_times[0] - record.scheduled_arrival)


def tpot(record: RequestRecord) -> float | None:
    """(last - first) / (n - 1) seconds; None for a single token."""
    n = len(record.token_times)
    return float(record.token_times[-1] - record.token_times[0]) / (n - 1) if n > 1 else None


def latencies(arrived: Sequence[RequestRecord], gaps: Gaps) -> Latency:
    done = [r for r in arrived if finished(r)]
    none = "no request that arrived in the window finished"
    single = "no request that arrived in the window has more than one token"
    gap_times = [np.diff(np.asarray(r.token_times, dtype=np.float64)) for r in done]
    lag = [r.sent - r.scheduled_arrival for r in arrived if r.sent is not None]
    table = Latency(
        ttft_ms=_ms([ttft(r) for r in done], "latency.ttft_ms", none, gaps),
        tpot_ms=_ms([t for r in done if (t := tpot(r)) is not None], "latency.tpot_ms", single, gaps),
        itl_ms=_ms(np.concatenate(gap_times) if gap_times else [], "latency.itl_ms", single, gaps),
        end_to_end_ms=_ms(
            [r.token_times[-1] - r.scheduled_arrival for r in done], "latency.end_to_end_ms", none, gaps
        ),
        send_lag_ms=_ms(lag, "latency.send_lag_ms", "no request that arrived in the window was sent", gaps),
    )
    if table.send_lag_ms is not None and table.send_lag_ms.p99 > _LATE_MS:
        gaps.warn(
            f"The client fell behind the trace: requests left {table.send_lag_ms.p99:.0f} ms late (p99)."
            " Latencies count from the scheduled arrival and include it."
        )
    return table


def _ms(
    seconds: Sequence[float] | NDArray[np.float64], path: str, reason: str, gaps: Gaps
) -> Percentiles | None:
    return gaps.given(percentiles(np.asarray(seconds, dtype=np.float64) * 1e3), path, reason)


def request_rates(arrived: Sequence[RequestRecord], gaps: Gaps) -> RequestRates:
    """Tokens per second of single requests, whole and without the time to the first token."""
    done = [r for r in arrived if finished(r)]
    whole = [(len(r.token_times), r.token_times[-1] - r.scheduled_arrival) for r in done]
    later = [(len(r.token_times) - 1, r.token_times[-1] - r.token_times[0]) for r in done]
    return RequestRates(
        end_to_end_tokens_per_second=gaps.given(
            percentiles([n / s for n, s in whole if s > 0]),
            "request_rates.end_to_end_tokens_per_second",
            "no request that arrived in the window finished",
        ),
        decode_only_tokens_per_second=gaps.given(
            percentiles([n / s for n, s in later if s > 0]),
            "request_rates.decode_only_tokens_per_second",
            "no request of the window has tokens at two moments",
        ),
    )


def goodput(arrived: Sequence[RequestRecord], slo: tuple[float, float], span: Span, gaps: Gaps) -> Goodput:
    """Requests that arrived in the window, finished and met both objectives.

    A request of a single token has no TPOT to miss.
    """
    ttft_ms, tpot_ms = slo
    met = sum(finished(r) and ttft(r) * 1e3 <= ttft_ms and (tpot(r) or 0.0) * 1e3 <= tpot_ms for r in arrived)
    if not arrived:
        gaps.null("goodput.fraction", "no request arrived in the window")
    return Goodput(
        ttft_slo_ms=ttft_ms,
        tpot_slo_ms=tpot_ms,
        requests=met,
        requests_per_second=met / span.seconds,
        fraction=met / len(arrived) if arrived else None,
    )


def whole_run(requests: Sequence[RequestRecord], gaps: Gaps) -> WholeRun:
    """From the first scheduled arrival to the last token, requests that finished only."""
    done = [r for r in requests if finished(r)]
    output = sum(len(r.token_times) for r in done)
    prompt = sum(r.prompt_tokens for r in done)
    end = last_token(done)
    seconds = None if end is None else end - first_arrival(requests)
    if not seconds:
        for name in ("seconds", "output_tokens_per_second", "prompt_tokens_per_second"):
            gaps.null(f"whole_run.{name}", "no request finished")
        seconds = None
    return WholeRun(
        seconds=seconds,
        prompt_tokens=prompt,
        cached_tokens=sum(r.cached_tokens for r in done),
        output_tokens=output,
        output_tokens_per_second=output / seconds if seconds else None,
        prompt_tokens_per_second=prompt / seconds if seconds else None,
    )


def request_log(requests: Sequence[RequestRecord]) -> tuple[RequestRow, ...]:
    """Every request in the order given, for whoever wants to compute something else."""
    origin = first_arrival(requests)
    return tuple(
        RequestRow(
            index=r.index,
            arrival=float(r.scheduled_arrival - origin),
            sent=None if r.sent is None else float(r.sent - origin),
            first_token=float(r.token_times[0] - origin) if len(r.token_times) else None,
            last_token=float(r.token_times[-1] - origin) if len(r.token_times) else None,
            prompt_tokens=r.prompt_tokens,
            cached_tokens=r.cached_tokens,
            output_tokens=r.output_tokens,
            finish_reason=r.finish_reason,
            error=r.error,
        )
        for r in requests
    )
