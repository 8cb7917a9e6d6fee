"""Where: the step and layer a rank is in, for messages of transports that wait in vain."""

from dataclasses import dataclass
from typing import Protocol


class Where(Protocol):
    """Kept current by the engine; a transport reads it when a transfer begins."""

    @property
    def step(self) -> int: ...

    @property
    def layer(self) -> int: ...


@dataclass(slots=True)
class StepAndLayer:
    """A Where that is set by hand. `layer` is -1 outside the model."""

    step: int = -1
    layer: int = -1
