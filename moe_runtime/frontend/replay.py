"""Open-loop replay: every request is sent at its time, however the earlier ones are doing."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moe_runtime.frontend.fleet import Fleet
from moe_runtime.frontend.live import Live
from moe_runtime.report.records import RequestRecord
from moe_runtime.spec.requests import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request of a replay; `at` seconds after its start."""

    index: int
    at: float
    prompt: list[int]
    sampling: SamplingParams


async def replay(
    fleet: Fleet, arrivals: Sequence[Arrival], on_done: Callable[[], None] = lambda: None
) -> list[RequestRecord]:
    """Send all requests at their times and wait for their ends; one record each, in order."""
    start = time.monotonic()

    async def one(arrival: Arrival) -> RequestRecord:
        await asyncio.sleep(max(0.0, start + arrival.at - time.monotonic()))
        live = fleet.submit(arrival.prompt, arrival.sampling)
        await live.done.wait()
        on_done()
        return record_of(live, index=arrival.index, scheduled=start + arrival.at)

    return await asyncio.gather(*(one(a) for a in arrivals))


def record_of(live: Live, *, index: int, scheduled: float) -> RequestRecord:
    """What the client saw of a request that ended."""
    return RequestRecord(
        index=index,
        scheduled_arrival=scheduled,
        sent=live.sent,
        token_times=tuple(live.token_times),
        prompt_tokens=len(live.request.prompt),
        cached_tokens=live.cached_tokens,
        output_tokens=len(live.token_ids),
        finish_reason=live.finish_reason or FinishReason.ERROR,
        error=live.error,
        prefill_instance=live.prefill_instance,
        decode_instance=live.decode_instance,
    )
