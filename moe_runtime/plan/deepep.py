"""What DeepEP means for a deployment of a plan: which of its modes run, their limits and buffers.

Owns the mapping of deployments to modes. Prefill runs normal mode, decode low-latency mode (EP degrees
above 160 exist there only), a unified deployment has both and chooses per step.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

from moe_runtime.spec.bytes import low_latency_buffer_bytes, normal_buffer_bytes
from moe_runtime.spec.limits import DispatchSizes, Violation, violations

BACKEND = "deepep"
MODES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "prefill": ("deepep_normal",),
        "decode": ("deepep_low_latency",),
        "unified": ("deepep_normal", "deepep_low_latency"),
    }
)


def dtype_problem(model_dtype: str, dispatch_dtype: str) -> str:
    """Why rows of these dtypes cannot travel; empty if they can."""
    for dtype, carried in ((model_dtype, ("bfloat16",)), (dispatch_dtype, ("bfloat16", "float8_e4m3"))):
        if dtype not in carried:
            return f"rows are {dtype}, DeepEP carries bfloat16 or float8_e4m3 and returns bfloat16"
    return ""


def mode_violations(deployment: str, sizes: DispatchSizes, *, dtype: str) -> Iterator[tuple[str, Violation]]:
    """(mode, limit broken) of every mode that a deployment needs, `hard` and `tested` ones."""
    value_bytes = 1 if dtype == "float8_e4m3" else 2
    values_only = replace(sizes, row_bytes=sizes.hidden * value_bytes)
    for mode in MODES[deployment]:
        for violation in violations(mode, values_only):
            yield mode, violation


def registered_bytes(
    deployment: str, *, hidden: int, slots: int, ranks: int, max_tokens: int
) -> dict[str, int]:
    """Bytes of DeepEP's registered buffers per mode, from physical slots. KeyError for ranks without a
    configuration in normal mode, which its limits refuse."""
    sizes = {}
    for mode in MODES[deployment]:
        if mode == "deepep_normal":
            sizes[mode] = sum(normal_buffer_bytes(hidden=hidden, ranks=ranks))
        else:
            sizes[mode] = low_latency_buffer_bytes(max_tokens=max_tokens, hidden=hidden, slots=slots)
    return sizes
