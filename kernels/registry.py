"""Which function carries out an operation on which kind of device.

Owns the table and nothing else. A column is a device type, an entry a module whose function has
the operation's name; modules are imported when first selected, so a column may need packages
that other machines lack. An operation without an entry for a device runs its reference there, which
is plain torch and correct on any device. The column `cpu_invariant` is for batch-invariant decoders;
what has no entry there treats rows apart anyway. Columns named after a library are never picked by
themselves, since they ask more of their caller than the reference does: `Forced` picks them by name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
        "choose_slots": {
            "any": "choose_slots.reference",
            "cpu": "choose_slots.cpu",
            "cuda": "choose_slots.triton",
        },
        "experts": {
            "any": "experts.reference",
            "cpu": "experts.cpu",
            "cpu_invariant": "experts.cpu_invariant",
            "cuda": "experts.triton",
            "deepgemm": "experts.deepgemm",
        },
        "gated_mlp": {
            "any": "gated_mlp.reference",
            "cpu": "gated_mlp.cpu",
            "cpu_invariant": "gated_mlp.cpu_invariant",
            "cuda": "gated_mlp.triton",
        },
        "gqa_decode": {
            "any": "gqa_decode.reference",
            "cpu": "gqa_decode.cpu",
            "cpu_invariant": "gqa_decode.cpu_invariant",
            "cuda": "gqa_decode.triton",
        },
        "gqa_prefill": {
            "any": "gqa_prefill.reference",
            "cpu": "gqa_prefill.cpu",
            "cpu_invariant": "gqa_prefill.cpu_invariant",
            "cuda": "gqa_prefill.triton",
        },
        "group_ranks": {"any": "group_ranks.reference", "cuda": "group_ranks.triton"},
        "grouped_gemm": {
            "any": "grouped_gemm.reference",
            "cuda": "grouped_gemm.triton",
            "deepgemm": "grouped_gemm.deepgemm",
        },
        "kv_gather": {"any": "kv_gather.reference", "cuda": "kv_gather.triton"},
        "kv_scatter": {"any": "kv_gather.reference", "cuda": "kv_gather.triton"},
        "kv_write": {"any": "kv_write.reference", "cuda": "kv_write.triton"},
        "linear": {"any": "linear.reference", "cpu": "linear.cpu", "cpu_invariant": "linear.cpu_invariant"},
        "mla_assemble": {"any": "mla_assemble.reference", "cuda": "mla_assemble.triton"},
        "mla_decode": {
            "any": "mla_decode.reference",
            "cpu": "mla_decode.cpu",
            "cpu_invariant": "mla_decode.cpu_invariant",
            "cuda": "mla_decode.triton",
            "flash_mla": "mla_decode.flash_mla",
        },
        "mla_prefill": {
            "any": "mla_prefill.reference",
            "cpu": "mla_prefill.cpu",
            "cpu_invariant": "mla_prefill.cpu_invariant",
            "cuda": "mla_prefill.triton",
        },
        "pack": {"any": "pack.reference", "cpu": "pack.cpu"},
        "permute": {"any": "permute.reference", "cpu": "permute.cpu", "cuda": "permute.triton"},
        "plan_decode": {
            "any": "paged.reference",
            "cpu": "paged.cpu",
            "cpu_invariant": "paged.cpu_invariant",
            "cuda": "paged.triton",
            "flash_mla": "mla_decode.flash_mla",
        },
        "plan_prefill": {
            "any": "paged.reference",
            "cpu": "paged.cpu",
            "cpu_invariant": "paged.cpu_invariant",
            "cuda": "paged.triton",
        },
        "quantize_fp8_block": {"any": "quantize_fp8_block.reference", "cuda": "quantize_fp8_block.triton"},
        "rms_norm": {"any": "rms_norm.reference", "cpu": "rms_norm.cpu", "cuda": "rms_norm.triton"},
        "rope": {"any": "rope.reference", "cpu": "rope.cpu", "cuda": "rope.triton"},
        "route": {
            "any": "route.reference",
            "cpu": "route.cpu",
            "cpu_invariant": "route.cpu_invariant",
            "cuda": "route.triton",
        },
        "silu_mul": {"any": "silu_mul.reference", "cpu": "silu_mul.cpu", "cuda": "silu_mul.triton"},
        "silu_mul_quantize": {"any": "silu_mul_quantize.reference", "cuda": "silu_mul_quantize.triton"},
        "unpermute": {"any": "permute.reference", "cpu": "permute.cpu", "cuda": "permute.triton"},
    }
)


def select(operation: str, device: str) -> Kernel:
    """The function for `operation` on a device type (`cpu`, `cuda`; an index as in `cuda:1` is ignored).

    A decode or prefill kernel goes with the plan of the same device. KernelError for an unknown
    operation, or for a library that is not installed.
    """
    module: Any = import_module(f"moe_runtime.kernels.{module_of(operation, device)}")
    # A library's adapter is made when it is selected, as that is when the library is looked for.
    holder = module.load() if hasattr(module, "load") else module
    function: Kernel = getattr(holder, operation)
    return function


def module_of(operation: str, device: str) -> str:
    """What `select` takes the operation from: "route.triton"."""
    row = TABLE.get(operation)
    if row is None:
        raise KernelError(f"no operation {operation!r}; there are {', '.join(TABLE)}")
    return row.get(device.partition(":")[0], row["any"])


@dataclass(frozen=True, slots=True)
class Forced:
    """The table with some operations forced: operation -> column ("any", "cuda", "deepgemm").

    KernelError for operations or columns that do not exist.
    """

    columns: Mapping[str, str]

    def __post_init__(self) -> None:
        for operation, column in self.columns.items():
            module_of(operation, "any")
            if column not in TABLE[operation]:
                raise KernelError(f"{operation} has no {column!r}; it has {', '.join(TABLE[operation])}")

    def select(self, operation: str, device: str) -> Kernel:
        """As `select` of this module, unless the operation is forced."""
        return select(operation, self.columns.get(operation, device))

    def modules(self, device: str) -> Mapping[str, str]:
        """Operation -> module that runs it on a device type: what a report names."""
        return {op: module_of(op, self.columns.get(op, device)) for op in TABLE}
