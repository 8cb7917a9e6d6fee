"""Compiling one case for one chip without having the chip, and reading back what became of it.

Owns the calls into triton's compiler (3.6 to 3.9) and into the tools its wheel brings. Knows no kernel.
"""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moe_runtime.kernels.aot import code
from moe_runtime.kernels.aot.case import AotCase, Target
from moe_runtime.kernels.aot.code import Compiled
from moe_runtime.kernels.errors import KernelError


def compile_case(case: AotCase, target: Target) -> Compiled:
    """Compile anew for `target` and measure. Needs a process without TRITON_INTERPRET.

    Raises KernelError if triton interprets, if the case names arguments its kernel lacks, or if the
    compiler refuses the case.
    """
    names = getattr(case.kernel, "arg_names", [])
    if not isinstance(case.kernel, triton.runtime.JITFunction):
        raise KernelError(f"{case.operation} {case.label}: triton interprets here; unset TRITON_INTERPRET")
    given = {*case.signature, *case.constants}
    if given != set(names) or not case.aligned <= given:
        wrong = sorted((given ^ set(names)) | (case.aligned - given))
        raise KernelError(
            f"{case.operation} {case.label}: arguments {', '.join(wrong)} do not fit the kernel"
        )
    source = ASTSource(
        case.kernel,
        {name: case.signature.get(name, "constexpr") for name in names},
        constexprs=dict(case.constants),
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in sorted(case.aligned)},
    )
    options = {
        "num_warps": case.num_warps,
        "num_stages": case.num_stages,
        "enable_fp_fusion": case.fp_fusion,
    }
    try:
        kernel = triton.compile(source, GPUTarget(target.backend, target.arch, target.warp), options)
    except Exception as error:  # the compiler raises whatever its passes raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise KernelError(f"does not compile: {reason}") from error
    return _nvidia(kernel) if target.backend == "cuda" else _amd(kernel)


def _nvidia(kernel: Any) -> Compiled:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(kernel.asm["cubin"])
        used = re.search(r"REG:(\d+) STACK:(\d+)", _cuobjdump("--dump-resource-usage", cubin))
        sass = _cuobjdump("-sass", cubin)
    if used is None:
        raise KernelError("cuobjdump reported no resource usage")
    loops, whole = code.nvidia_loops(sass)
    return Compiled(
        registers=int(used.group(1)),
        stack_bytes=int(used.group(2)),
        spills=code.local_memory_accesses(sass),
        shared_bytes=kernel.metadata.shared,
        tensor_memory=getattr(kernel.metadata, "tmem_size", 0) or 0,
        warps=kernel.metadata.num_warps,
        matrix=code.matrix_instructions(kernel.asm["ptx"]),
        loops=loops,
        whole=whole,
    )


def _amd(kernel: Any) -> Compiled:
    text = kernel.asm["amdgcn"]

    def number(field: str) -> int:
        found = re.search(rf"\.{field}:\s+(\d+)", text)
        if found is None:
            raise KernelError(f"the assembly names no {field}")
        return int(found.group(1))

    loops, whole = code.amd_loops(text)
    return Compiled(
        registers=number("vgpr_count"),
        stack_bytes=number("private_segment_fixed_size"),
        spills=number("vgpr_spill_count"),
        shared_bytes=kernel.metadata.shared,
        tensor_memory=0,
        warps=kernel.metadata.num_warps,
        matrix=code.matrix_instructions(text),
        loops=loops,
        whole=whole,
    )


def _cuobjdump(option: str, cubin: Path) -> str:
    tool = triton.knobs.nvidia.cuobjdump.path
    done = subprocess.run(
        [tool, option, str(cubin)], capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode:
        raise KernelError(f"cuobjdump {option}: {done.stderr.strip()}")
    return done.stdout
