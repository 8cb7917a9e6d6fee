"""Where: the step and layer a rank is in, for messages of transports that wait in vain.

The engine owns one and keeps it current; transports read it when a transfer begins.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Where:
    """`step` counts steps of the instance; `layer` is the decoder layer, -1 outside the model."""

    step: int = -1
    layer: int = -1
