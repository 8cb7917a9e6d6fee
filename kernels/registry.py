"""Which function carries out an operation on which kind of device.

Owns the table and nothing else. A column is a device type, an entry a module whose function has
the operation's name; modules are imported when first selected, so a column may need packages
that other machines lack (a Triton column for `cuda` joins here). An operation without an entry
for a device runs its reference there, which is plain torch and correct on any device. The column
`cpu_invariant` is for batch-invariant decoders; what has no entry there treats rows apart anyway.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, Protocol

from moe_runtime.kernels.errors import KernelError

Kernel = Callable[..., Any]


class Kernels(Protocol):
    """Where a decoder gets its operations from: this module, or a test's own choice."""

    def select(self, operation: str, device: str) -> Kernel: ...


# operation -> device type -> implementation, `any` being the reference
TABLE: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "choose_slots": {"any": "choose_slots.reference", "cpu": "choose_slots.cpu"},
        "experts": {
            "any": "experts.reference",
            "cpu": "experts.cpu",
            "cpu_invariant": "experts.cpu_invariant",
            "cuda": "experts.triton",
        },
        "gated_mlp": {
            "any": "gated_mlp.reference",
            "cpu": "gated_mlp.cpu",
            "cpu_invariant": "gated_mlp.cpu_invariant",
        },
        "gqa_decode": {
            "any": "gqa_decode.reference",
            "cpu": "gqa_decode.cpu",
            "cpu_invariant": "gqa_decode.cpu_invariant",
        },
        "gqa_prefill": {
            "any": "gqa_prefill.reference",
            "cpu": "gqa_prefill.cpu",
            "cpu_invariant": "gqa_prefill.cpu_invariant",
        },
        "grouped_gemm": {"any": "grouped_gemm.reference", "cuda": "grouped_gemm.triton"},
        "kv_write": {"any": "kv_write.reference"},
        "linear": {"any": "linear.reference", "cpu": "linear.cpu", "cpu_invariant": "linear.cpu_invariant"},
        "mla_decode": {
            "any": "mla_decode.reference",
            "cpu": "mla_decode.cpu",
            "cpu_invariant": "mla_decode.cpu_invariant",
        },
        "mla_prefill": {
            "any": "mla_prefill.reference",
            "cpu": "mla_prefill.cpu",
            "cpu_invariant": "mla_prefill.cpu_invariant",
        },
        "pack": {"any": "pack.reference", "cpu": "pack.cpu"},
        "permute": {"any": "permute.reference", "cpu": "permute.cpu"},
        "plan_decode": {"any": "paged.reference", "cpu": "paged.cpu", "cpu_invariant": "paged.cpu_invariant"},
        "plan_prefill": {
            "any": "paged.reference",
            "cpu": "paged.cpu",
            "cpu_invariant": "paged.cpu_invariant",
        },
        "rms_norm": {"any": "rms_norm.reference", "cpu": "rms_norm.cpu"},
        "rope": {"any": "rope.reference", "cpu": "rope.cpu"},
        "route": {"any": "route.reference", "cpu": "route.cpu", "cpu_invariant": "route.cpu_invariant"},
        "silu_mul": {"any": "silu_mul.reference", "cpu": "silu_mul.cpu"},
        "unpermute": {"any": "permute.reference", "cpu": "permute.cpu"},
    }
)


def select(operation: str, device: str) -> Kernel:
    """The function for `operation` on a device type (`cpu`, `cuda`; an index as in `cuda:1` is ignored).

    A decode or prefill kernel goes with the plan of the same device. KernelError for an unknown
    operation.
    """
    row = TABLE.get(operation)
    if row is None:
        raise KernelError(f"no operation {operation!r}; there are {', '.join(TABLE)}")
    module = row.get(device.partition(":")[0], row["any"])
    function: Kernel = getattr(import_module(f"moe_runtime.kernels.{module}"), operation)
    return function
