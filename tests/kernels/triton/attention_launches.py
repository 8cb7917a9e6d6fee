"""Run as a process of its own: do the launchers ask for the compilations that `aot_cases` lists?

Triton's launch is replaced by one that notes what it was asked for; tensors are small and in host memory,
which stands for sm_90. Prints a line per launch that no case covers.
"""

import inspect
from types import ModuleType
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from moe_runtime.kernels.aot.case import SM_90
from moe_runtime.kernels.gqa_decode import triton as gqa_decode
from moe_runtime.kernels.gqa_prefill import triton as gqa_prefill
from moe_runtime.kernels.kv_gather import triton as kv_gather
from moe_runtime.kernels.kv_write import triton as kv_write
from moe_runtime.kernels.mla_decode import triton as mla_decode
from moe_runtime.kernels.mla_prefill import triton as mla_prefill
from moe_runtime.kernels.paged import triton as paged
from moe_runtime.models.context import PrefillSegment

MODULES: tuple[ModuleType, ...] = (
    gqa_decode,
    gqa_prefill,
    kv_gather,
    kv_write,
    mla_decode,
    mla_prefill,
    paged,
)
CASES = [case for module in MODULES for case in module.aot_cases(SM_90)]
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
launches = 0


def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
    """In place of JITFunction.run."""
    del grid, warmup
    global launches
    launches += 1
    options = {name: named.pop(name) for name in OPTIONS if name in named}
    asked = inspect.signature(kernel.fn).bind(*args, **named).arguments
    if not any(covers(case, kernel, asked, options) for case in CASES):
        constants = {k: v for k, v in asked.items() if not isinstance(v, torch.Tensor)}
        print(f"no case for {kernel.fn.__module__}.{kernel.fn.__name__} {constants} {options}")


def covers(case: Any, kernel: Any, asked: dict[str, Any], options: dict[str, Any]) -> bool:
    numbers = {k: v for k, v in asked.items() if isinstance(v, int) and not isinstance(v, bool)}
    return (
        case.kernel is kernel
        and asked.keys() == case.signature.keys() | case.constants.keys()
        and all(asked[name] == value for name, value in case.constants.items())
        and all(numbers[name] % 16 == 0 for name in case.aligned & numbers.keys())
        and options.get("num_warps", 4) == case.num_warps
        and options.get("num_stages", case.num_stages) == case.num_stages
        and options.get("enable_fp_fusion", case.fp_fusion) == case.fp_fusion
    )


def cache(block_tokens: int, width: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(4, block_tokens, width, dtype=dtype)


def plans(block_tokens: int) -> tuple[Any, Any]:
    segment = PrefillSegment(start=0, stop=2, context=9, blocks=torch.zeros(1, dtype=torch.int64))
    decode = paged.plan_decode(torch.zeros(2, 4), torch.ones(2), max_context=5000, block_tokens=block_tokens)
    return decode, paged.plan_prefill([segment], block_tokens=block_tokens)


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


def main() -> None:
    JITFunction.run = note
    slots = torch.zeros(2, dtype=torch.int64)
    for block_tokens in (16, 64):
        decode, prefill = plans(block_tokens)
        for entries in (cache(block_tokens, 576), cache(block_tokens, 656, torch.uint8)):
            kv_write.kv_write(entries, slots, bf16(2, 576))
            for heads in (128, 64):  # DeepSeek-V3, Kimi-K2
                q, kv_b, out = bf16(2, heads, 192), bf16(heads * 256, 512), bf16(2, heads * 128)
                mla_decode.mla_decode(q, entries, decode, kv_b, 0.1, out_DX=out)
                mla_prefill.mla_prefill(q, entries, prefill, kv_b, 0.1, out_TX=out)
        for heads, kv_heads in ((64, 4), (96, 8)):  # Qwen3-235B, GLM-4.5
            entries, q, out = cache(block_tokens, 256 * kv_heads), bf16(2, heads, 128), bf16(2, heads * 128)
            gqa_decode.gqa_decode(q, entries, decode, 0.1, out_DX=out)
            gqa_prefill.gqa_prefill(q, entries, prefill, 0.1, out_TX=out)
        buffer = bf16(2, block_tokens, 576)
        kv_gather.kv_gather(cache(block_tokens, 576), slots, out_NSE=buffer)
        kv_gather.kv_scatter(cache(block_tokens, 576), slots, buffer)
    print(f"{launches} launches")


if __name__ == "__main__":
    main()
