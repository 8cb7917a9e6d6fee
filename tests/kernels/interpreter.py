"""Triton's interpreter for tests: loads kernels so that they run on a CPU, with its bf16 and fp8 made right.

Owns the one way by which tests get at a `triton.py`: `interpreted("route")`. Whether triton interprets is
settled when it is imported, so a triton that another package imported before is imported anew. The
interpreter (triton 3.6 to 3.9) computes with the bit patterns of bf16 and rounds bf16 and fp8 wrongly; here
torch converts. Not modelled: tf32, and reductions of bf16 or fp8 (kernels reduce in fp32).
"""

import os
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import torch


def interpreted(operation: str) -> ModuleType:
    """The module `moe_runtime.kernels.<operation>.triton`, its kernels interpreted.

    Tests import it at module level, so that nothing has imported it for compilation before.
    """
    module = import_module(f"moe_runtime.kernels.{operation}.triton")
    kinds = {type(value).__name__ for value in vars(module).values()}
    assert "InterpretedFunction" in kinds, f"{operation} was imported for compilation, or has no kernel"
    assert "JITFunction" not in kinds, f"{operation} was imported for compilation"
    return module


def _import_interpreting() -> None:
    """Import triton so that `triton.jit` interprets, in this process only."""
    for name in [n for n in sys.modules if n == "triton" or n.startswith("triton.")]:
        if not name.startswith("triton._C"):
            del sys.modules[name]
    os.environ["TRITON_INTERPRET"] = "1"
    import_module("triton")
    del os.environ["TRITON_INTERPRET"]
    knobs: Any = import_module("triton.knobs")
    knobs.propagate_env = False
    knobs.runtime.interpret = True
    knobs.propagate_env = True


def _repair() -> None:
    """Replace the interpreter's conversions and arithmetic of narrow floats."""
    tl, interpreter = import_module("triton.language"), import_module("triton.runtime.interpreter")
    handle, builder, numpy_of = (
        interpreter.TensorHandle,
        interpreter.InterpreterBuilder,
        interpreter._get_np_dtype,
    )
    narrow: dict[Any, torch.dtype] = {
        tl.bfloat16: torch.bfloat16,
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.float8e5: torch.float8_e5m2,
        tl.float8e4b8: torch.float8_e4m3fnuz,
        tl.float8e5b16: torch.float8_e5m2fnuz,
    }
    plain = {name: getattr(builder, name) for name in ("binary_op", "unary_op", "create_dot")}

    def wide(x: Any) -> Any:
        """A handle's values as numbers numpy knows."""
        kind = narrow.get(x.dtype.scalar)
        return x.data if kind is None else torch.from_numpy(x.data.copy()).view(kind).float().numpy()

    def packed(data: Any, dtype: Any) -> Any:
        """A handle of `dtype`: rounded to nearest even; fp8 saturates, as the chips' conversions do."""
        kind = narrow.get(dtype)
        if kind is None:
            return handle(data.astype(numpy_of(dtype)), dtype)
        x = torch.from_numpy(np.array(data, dtype=np.float32, order="C"))
        if kind.itemsize == 1:
            x = x.clamp(-torch.finfo(kind).max, torch.finfo(kind).max)
        return handle(x.to(kind).view(torch.uint8 if kind.itemsize == 1 else torch.uint16).numpy(), dtype)

    def cast(_: Any, x: Any, to: Any) -> Any:
        return packed(wide(x), to.scalar)

    def float_to_float(_: Any, x: Any, to: Any, rounding: Any) -> Any:
        assert rounding in (None, interpreter._ir.ROUNDING_MODE.RTNE), "only round to nearest even"
        return packed(wide(x), to.scalar)

    def binary(self: Any, a: Any, b: Any, op: Any) -> Any:
        simple = a.dtype.scalar not in narrow
        data = plain["binary_op"](self, a, b, op).data if simple else op(wide(a), wide(b))
        # A comparison is of one bit: splatting it as one of its operands' type makes masks of integers.
        return handle(data, tl.int1) if data.dtype == np.bool_ else packed(data, a.dtype.scalar)

    def unary(self: Any, x: Any, op: Any) -> Any:
        return (
            packed(op(wide(x)), x.dtype.scalar)
            if x.dtype.scalar in narrow
            else plain["unary_op"](self, x, op)
        )

    def dot(self: Any, a: Any, b: Any, d: Any, *how: Any) -> Any:
        if a.dtype.scalar not in narrow and b.dtype.scalar not in narrow:
            return plain["create_dot"](self, a, b, d, *how)
        return handle(np.matmul(wide(a), wide(b), dtype=d.data.dtype) + d.data, d.dtype.scalar)

    def bf16_constant(_: Any, value: float) -> Any:
        return packed(np.array([value]), tl.bfloat16)

    builder.cast_impl, builder.create_fp_to_fp = cast, float_to_float
    builder.binary_op, builder.unary_op, builder.create_dot = binary, unary, dot
    builder.get_bf16 = bf16_constant


_import_interpreting()
_repair()
