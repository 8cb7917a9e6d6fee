"""What DeepEP means for a deployment of a plan: the limits of its modes, rows per rank, buffers.

A deployment's dispatch modes are DeepEP's modes. By role: prefill runs normal mode, decode low-latency mode
(EP degrees above 160 exist there only), a unified deployment has both and chooses per step.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import gcd
from types import MappingProxyType

from moe_runtime.plan.effective import EffectiveDispatch, ModeChoice
from moe_runtime.plan.schema import DeploymentName
from moe_runtime.spec.deepep_bytes import low_latency_buffer_bytes, normal_buffer_bytes
from moe_runtime.spec.limits import DOCUMENTED_LOW_LATENCY_TOKENS, DispatchSizes, Violation, violations

BACKEND = "deepep"
PACKAGE = "deep_ep"
MODE_OF_ROLE: Mapping[DeploymentName, ModeChoice] = MappingProxyType(
    {"prefill": "normal", "decode": "low_latency", "unified": "per_step"}
)
_ROWS_UNIT = 4


def auto_max_tokens(
    mode: ModeChoice, *, ranks: int, max_sequences: int, max_batch_tokens: int
) -> tuple[int, str]:
    """(rows of a rank per round, why).

    Low-latency buffers are as large as these rows, used or not: what all sequences of a rank decode, below
    the 256 of DeepEP's documentation and with ranks x rows a multiple of 4; more rows go out in rounds.
    """
    if mode == "normal":
        return max_batch_tokens, "max_batch_tokens"
    name, wanted = "max_sequences", max_sequences
    if mode == "per_step":
        name, wanted = "max_batch_tokens", max_batch_tokens
    unit = _ROWS_UNIT // gcd(ranks, _ROWS_UNIT)
    most = DOCUMENTED_LOW_LATENCY_TOKENS // unit * unit
    return min(-(-wanted // unit) * unit, most), f"{name}, at most {most} in low-latency mode"


def dtype_problem(model_dtype: str, dispatch_dtype: str) -> str:
    """Why rows of these dtypes cannot travel; empty if they can."""
    for dtype, carried in ((model_dtype, ("bfloat16",)), (dispatch_dtype, ("bfloat16", "float8_e4m3"))):
        if dtype not in carried:
            return f"rows are {dtype}, DeepEP carries bfloat16 or float8_e4m3 and returns bfloat16"
    return ""


def mode_violations(dispatch: EffectiveDispatch, sizes: DispatchSizes) -> Iterator[tuple[str, Violation]]:
    """(mode, limit broken) of every mode that a deployment may run, `hard` and `tested` ones."""
    value_bytes = 1 if dispatch.dtype == "float8_e4m3" else 2
    values_only = replace(sizes, row_bytes=sizes.hidden * value_bytes)
    for mode in dispatch.modes:
        for violation in violations(f"deepep_{mode}", values_only):
            yield f"deepep_{mode}", violation


def registered_bytes(dispatch: EffectiveDispatch, *, hidden: int, slots: int, ranks: int) -> dict[str, int]:
    """Bytes of DeepEP's registered buffers per mode, from physical slots. KeyError for ranks without a
    configuration in normal mode, which its limits refuse."""
    sizes: dict[str, int] = {}
    for mode in dispatch.modes:
        if mode == "normal":
            sizes[mode] = sum(normal_buffer_bytes(hidden=hidden, ranks=ranks))
        else:
            sizes[mode] = low_latency_buffer_bytes(max_tokens=dispatch.max_tokens, hidden=hidden, slots=slots)
    return sizes
