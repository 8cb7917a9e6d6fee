"""What became of a request: what a report needs of it, measured or simulated, without its single tokens."""

from dataclasses import dataclass

from moe_runtime.report.records import RequestRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutcome:
    """One request, as its client saw it; None: that did not happen. Fields as in RequestRecord, but for

    first_token, second_token, last_token  when they arrived
    num_tokens                             that arrived
    """

    index: int
    scheduled_arrival: float
    sent: float | None
    first_token: float | None
    second_token: float | None
    last_token: float | None
    num_tokens: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    finish_reason: str
    error: str | None
    prefill_instance: str | None
    decode_instance: str | None

    @property
    def finished(self) -> bool:
        return self.finish_reason in ("stop", "length") and self.error is None and self.num_tokens > 0

    @property
    def ttft(self) -> float:
        """Seconds from the scheduled arrival to the first token; for requests that have one."""
        assert self.first_token is not None
        return self.first_token - self.scheduled_arrival

    @property
    def tpot(self) -> float | None:
        """(last - first) / (n - 1) seconds; None for a single token."""
        return self.decoding / (self.num_tokens - 1) if self.num_tokens > 1 else None

    @property
    def decoding(self) -> float:
        """Seconds from the first token to the last."""
        assert self.first_token is not None
        assert self.last_token is not None
        return self.last_token - self.first_token

    @property
    def whole(self) -> float:
        """Seconds from the scheduled arrival to the last token."""
        assert self.last_token is not None
        return self.last_token - self.scheduled_arrival


def outcome(record: RequestRecord) -> RequestOutcome:
    """What became of a measured request."""
    times = record.token_times
    return RequestOutcome(
        index=record.index,
        scheduled_arrival=float(record.scheduled_arrival),
        sent=None if record.sent is None else float(record.sent),
        first_token=float(times[0]) if len(times) else None,
        second_token=float(times[1]) if len(times) > 1 else None,
        last_token=float(times[-1]) if len(times) else None,
        num_tokens=len(times),
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        output_tokens=record.output_tokens,
        finish_reason=record.finish_reason,
        error=record.error,
        prefill_instance=record.prefill_instance,
        decode_instance=record.decode_instance,
    )
