"""Ops: the kernels a decoder uses, selected once at construction for its device."""

from dataclasses import dataclass

from moe_runtime.kernels.registry import Kernel, Kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """One field per operation; signatures are those of the kernels' references."""

    pack: Kernel
    linear: Kernel
    gated_mlp: Kernel
    experts: Kernel
    rms_norm: Kernel
    rope: Kernel
    route: Kernel
    kv_write: Kernel
    plan_decode: Kernel
    plan_prefill: Kernel
    mla_decode: Kernel
    mla_prefill: Kernel
    gqa_decode: Kernel
    gqa_prefill: Kernel

    @classmethod
    def of(cls, kernels: Kernels, device: str) -> "Ops":
        """Select every operation for a device type, or for a `column` of the table."""
        return cls(**{name: kernels.select(name, device) for name in cls.__dataclass_fields__})


def column(device: str, *, deterministic: bool) -> str:
    """The column of the kernels' table that a decoder on a device type takes its operations from."""
    return f"{device}_invariant" if deterministic else device
