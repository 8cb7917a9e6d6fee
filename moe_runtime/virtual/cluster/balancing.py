"""What an instance asks of whoever decides where its experts are: a protocol.

It knows neither placements nor loads: it says which steps it ran, and moves what it is told to.
"""

from typing import Protocol

from moe_runtime.virtual.cluster.records import StepRun


class Balancer(Protocol):
    """Of one life of an instance: it counts rows in windows, and may call `move` of the instance."""

    def steps_left(self, rows: int) -> int:
        """Steps of so many rows, of all ranks together, with the last of which a window ends; at least 1."""
        ...

    def count(self, run: StepRun) -> bool:
        """These steps run; whether a window ends with them."""
        ...

    def window_ended(self) -> None:
        """The last step of a window has ended."""
        ...

    def force(self) -> None:
        """Decide now, and move whether it pays or not."""
        ...

    def stop(self) -> None:
        """The instance has failed."""
        ...
