"""From outcomes of requests to window, latencies and goodput: pure functions.

Every latency counts from the scheduled arrival, so a client that cannot keep up makes them
worse, not better. Latencies belong to the requests that arrived in the window, wherever they
ended; tokens are counted where they arrived.
"""

from collections.abc import Sequence

import numpy as np

from moe_runtime.errors import MoeRuntimeError
from moe_runtime.report.facts import Gaps, RunFacts, Span, percentiles
from moe_runtime.report.outcomes import RequestOutcome
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
from moe_runtime.report.tally import Evidence

# A client this late has stopped being an open-loop client.
_LATE_MS = 100.0
# Rates over less than this say more about where the edges fell than about the system.
_SHORTEST_SECONDS = 1.0


def first_arrival(requests: Sequence[RequestOutcome]) -> float:
    return min(r.scheduled_arrival for r in requests)


def last_token(requests: Sequence[RequestOutcome]) -> float | None:
    return max((r.last_token for r in requests if r.last_token is not None), default=None)


def whole_span(evidence: Evidence) -> Span:
    """From the first scheduled arrival to the last arrival, token or step, whichever is last."""
    requests = evidence.outcomes
    ends = [max(r.scheduled_arrival for r in requests), last_token(requests), evidence.last_step_end]
    return Span(first_arrival(requests), max(t for t in ends if t is not None))


def choose_window(facts: RunFacts, evidence: Evidence, gaps: Gaps) -> tuple[Span, Window]:
    """From the end of warm-up to the last arrival; if that is under a second or holds no work, the whole run.

    Raises ValueError if there are no requests, MoeRuntimeError if not even the whole run took any time.
    """
    requests = evidence.outcomes
    if not requests:
        raise ValueError("a report needs at least one request")
    origin = first_arrival(requests)
    start = origin if facts.warmup_end is None else max(origin, facts.warmup_end)
    arrivals = Span(start, max(r.scheduled_arrival for r in requests))
    if arrivals.seconds >= _SHORTEST_SECONDS and evidence.busy(arrivals):
        return arrivals, _describe(facts, arrivals, origin, whole_run=False, gaps=gaps)

    whole = whole_span(evidence)
    if whole.seconds <= 0:
        why = f"; the first request: {requests[0].error}" if requests[0].error else ""
        raise MoeRuntimeError(f"no request was served, so there is nothing to report{why}")
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
    requests: Sequence[RequestOutcome], arrived: Sequence[RequestOutcome], preemptions: int, gaps: Gaps
) -> Requests:
    good = sum(r.finished for r in requests)
    failed = len(requests) - good
    if failed:
        bad = next(r for r in requests if not r.finished)
        why = bad.error or "no token arrived"
        gaps.warn(f"{failed} of {len(requests)} requests failed; the first is request {bad.index}: {why}")
    return Requests(
        count=len(requests), finished=good, failed=failed, preemptions=preemptions, in_window=len(arrived)
    )


def latencies(arrived: Sequence[RequestOutcome], itl_ms: Percentiles | None, gaps: Gaps) -> Latency:
    """`itl_ms`: gaps between consecutive tokens of those that finished."""
    done = [r for r in arrived if r.finished]
    none = "no request that arrived in the window finished"
    single = "no request that arrived in the window has more than one token"
    lag = [r.sent - r.scheduled_arrival for r in arrived if r.sent is not None]
    table = Latency(
        ttft_ms=_ms([r.ttft for r in done], "latency.ttft_ms", none, gaps),
        tpot_ms=_ms([t for r in done if (t := r.tpot) is not None], "latency.tpot_ms", single, gaps),
        itl_ms=gaps.given(itl_ms, "latency.itl_ms", single),
        end_to_end_ms=_ms([r.whole for r in done], "latency.end_to_end_ms", none, gaps),
        send_lag_ms=_ms(lag, "latency.send_lag_ms", "no request that arrived in the window was sent", gaps),
    )
    if table.send_lag_ms is not None and table.send_lag_ms.p99 > _LATE_MS:
        gaps.warn(
            f"The client fell behind the trace: requests left {table.send_lag_ms.p99:.0f} ms late (p99)."
            " Latencies count from the scheduled arrival and include it."
        )
    return table


def _ms(seconds: Sequence[float], path: str, reason: str, gaps: Gaps) -> Percentiles | None:
    return gaps.given(percentiles(np.asarray(seconds, dtype=np.float64) * 1e3), path, reason)


def request_rates(arrived: Sequence[RequestOutcome], gaps: Gaps) -> RequestRates:
    """Tokens per second of single requests, whole and without the time to the first token."""
    done = [r for r in arrived if r.finished]
    whole = [(r.num_tokens, r.whole) for r in done]
    later = [(r.num_tokens - 1, r.decoding) for r in done]
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


def goodput(arrived: Sequence[RequestOutcome], slo: tuple[float, float], span: Span, gaps: Gaps) -> Goodput:
    """Requests that arrived in the window, finished and met both objectives.

    A request of a single token has no TPOT to miss.
    """
    ttft_ms, tpot_ms = slo
    met = sum(r.finished and r.ttft * 1e3 <= ttft_ms and (r.tpot or 0.0) * 1e3 <= tpot_ms for r in arrived)
    if not arrived:
        gaps.null("goodput.fraction", "no request arrived in the window")
    return Goodput(
        ttft_slo_ms=ttft_ms,
        tpot_slo_ms=tpot_ms,
        requests=met,
        requests_per_second=met / span.seconds,
        fraction=met / len(arrived) if arrived else None,
    )


def whole_run(requests: Sequence[RequestOutcome], gaps: Gaps) -> WholeRun:
    """From the first scheduled arrival to the last token, requests that finished only."""
    done = [r for r in requests if r.finished]
    output = sum(r.num_tokens for r in done)
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


def request_log(requests: Sequence[RequestOutcome]) -> tuple[RequestRow, ...]:
    """Every request in the order given, for whoever wants to compute something else."""
    origin = first_arrival(requests)

    def since(time: float | None) -> float | None:
        return None if time is None else time - origin

    return tuple(
        RequestRow(
            index=r.index,
            arrival=r.scheduled_arrival - origin,
            sent=since(r.sent),
            first_token=since(r.first_token),
            last_token=since(r.last_token),
            prompt_tokens=r.prompt_tokens,
            cached_tokens=r.cached_tokens,
            output_tokens=r.output_tokens,
            finish_reason=r.finish_reason,
            error=r.error,
        )
        for r in requests
    )
