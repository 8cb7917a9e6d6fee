"""Published figures to hold a report against: data that whoever makes a page hands over."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A published throughput of a role.

    model        name in the catalogue of models
    value        tokens/s of `gpus` GPUs of the role: new prompt tokens of prefill, output tokens of decode
    conditions   degree, batch, context, micro-batches, balance
    read         how the figure was had, and what of its conditions the source does not say
    """

    id: str
    model: str
    role: str
    value: float
    gpus: int
    machine: str
    conditions: str
    read: str
    source: str
