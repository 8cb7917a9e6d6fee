"""Where the wall time of an instance went: its steps by part and by bound, and the rest, idle. Pure."""

from collections.abc import Callable
from dataclasses import dataclass

from moe_runtime.report.records import F64
from moe_runtime.report.schema_time import TimeShare, TimeUse
from moe_runtime.virtual.cost.shapes import BOUNDS, PARTS

IDLE = "idle"


@dataclass(frozen=True, slots=True)
class TimeSums:
    """Seconds of steps; `parts` and `bounds` in the order of PARTS and BOUNDS."""

    seconds: float
    ideal: float
    parts: tuple[float, ...]
    bounds: tuple[float, ...]

    @classmethod
    def of(cls, column: Callable[[str], F64]) -> "TimeSums":
        """Of runs of steps as `collect.COLUMNS` has them."""
        return cls(
            seconds=float(column("seconds").sum()),
            ideal=float(column("ideal").sum()),
            parts=tuple(float(column(f"part {p}").sum()) for p in PARTS),
            bounds=tuple(float(column(f"bound {b}").sum()) for b in BOUNDS),
        )

    def __add__(self, other: "TimeSums") -> "TimeSums":
        return TimeSums(
            self.seconds + other.seconds,
            self.ideal + other.ideal,
            tuple(a + b for a, b in zip(self.parts, other.parts, strict=True)),
            tuple(a + b for a, b in zip(self.bounds, other.bounds, strict=True)),
        )


def attribute(instance: str, sums: TimeSums, wall: float) -> TimeUse:
    """`wall` seconds, of which steps took `sums.seconds`."""
    idle = max(0.0, wall - sums.seconds)

    def shares(names: tuple[str, ...], seconds: tuple[float, ...]) -> tuple[TimeShare, ...]:
        pairs = [*zip(names, seconds, strict=True), (IDLE, idle)]
        return tuple(TimeShare(name=n, seconds=s, share=s / wall) for n, s in pairs)

    return TimeUse(
        instance=instance,
        seconds=wall,
        parts=shares(PARTS, sums.parts),
        bounds=shares(BOUNDS, sums.bounds),
        roofline=sums.ideal / sums.seconds if sums.ideal > 0 and sums.seconds > 0 else None,
    )
