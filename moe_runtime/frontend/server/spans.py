"""Spans: one OpenTelemetry span per request, if the package is there.

Owns names of attributes. Where spans go is decided by the package's own configuration; without it,
or without the package, nothing is recorded.
"""

from collections.abc import Callable, Mapping
from typing import Any

Record = Callable[[Mapping[bytes, bytes], Mapping[str, Any], int, int], None]


def _nothing(headers: Mapping[bytes, bytes], note: Mapping[str, Any], start_ns: int, end_ns: int) -> None:
    """There is no package to tell."""


def recorder() -> Record:
    """A function of a request's headers (its caller's trace is continued), its log note, and its times."""
    try:
        from opentelemetry import propagate, trace
    except ImportError:
        return _nothing
    tracer = trace.get_tracer("moe_runtime")

    def record(headers: Mapping[bytes, bytes], note: Mapping[str, Any], start_ns: int, end_ns: int) -> None:
        carrier = {k.decode("latin-1"): v.decode("latin-1") for k, v in headers.items()}
        span = tracer.start_span(
            f"{note['method']} {note['path']}",
            context=propagate.extract(carrier),
            kind=trace.SpanKind.SERVER,
            start_time=start_ns,
            attributes={f"moe_runtime.{k}": v for k, v in note.items() if v is not None},
        )
        if (note["status"] or 500) >= 500:
            span.set_status(trace.StatusCode.ERROR, str(note.get("error", "")))
        span.end(end_ns)

    return record
