"""What compiled code must satisfy, as pure functions of the record of a compilation.

Not provable this way: races, barrier phases, run-time strides of tensor descriptors, any time.
"""

from moe_runtime.kernels.aot.case import AotCase, Target
from moe_runtime.kernels.aot.code import Compiled

TENSOR_MEMORY_COLUMNS = 512
# What a kernel's matrix instructions must be: target -> kind of case -> kind of instruction.
EXPECTED = {
    "sm_90": {"bf16": "wgmma bf16", "fp8": "wgmma e4m3"},
    "sm_100": {"bf16": "tcgen05 f16", "fp8": "tcgen05 f8f6f4"},
    "gfx942": {"bf16": "mfma bf16", "fp8": "mfma fp8"},
}


def failures(case: AotCase, target: Target, compiled: Compiled) -> list[str]:
    """Why the case is not good enough on the target; empty if it is."""
    return [
        *_resources(target, compiled),
        *_matrix(case, target, compiled),
        *_loads(case, compiled),
    ]


def occupancy(target: Target, compiled: Compiled) -> int:
    """Programs per multiprocessor that registers, shared memory and threads leave room for; 0 for AMD."""
    if target.backend != "cuda":
        return 0
    threads = compiled.warps * target.warp
    by_registers = 65_536 // (max(compiled.registers, 1) * threads)
    return min(by_registers, 233_472 // (compiled.shared_bytes + 1024), 2048 // threads)


def _resources(target: Target, compiled: Compiled) -> list[str]:
    found = []
    if compiled.stack_bytes:
        found.append(f"{compiled.stack_bytes} bytes of stack")
    if compiled.spills:
        found.append(f"{compiled.spills} spills")
    if compiled.shared_bytes > target.shared_bytes:
        found.append(f"{compiled.shared_bytes} bytes of shared memory, the chip has {target.shared_bytes}")
    if compiled.tensor_memory > TENSOR_MEMORY_COLUMNS:
        found.append(f"{compiled.tensor_memory} columns of tensor memory")
    return found


def _matrix(case: AotCase, target: Target, compiled: Compiled) -> list[str]:
    if case.matrix == "none":
        return [f"unexpected {kind}" for kind in compiled.matrix]
    if case.matrix == "small":
        return [] if compiled.matrix else ["no matrix instruction"]
    wanted = EXPECTED[target.name][case.matrix]
    found = [f"{kind} instead of {wanted}" for kind in compiled.matrix if kind != wanted]
    if wanted not in compiled.matrix:
        found.append(f"no {wanted}")
    if compiled.loops and not any(loop.matrix for loop in compiled.loops):
        found.append("no matrix instruction in a main loop")
    return found


def _loads(case: AotCase, compiled: Compiled) -> list[str]:
    """In main loops nothing loads 2 bytes; without a loop, what does must be rare (a row's weights, say)."""
    bodies = compiled.loops or (compiled.whole,)
    narrow = sum(body.loads.get(2, 0) for body in bodies)
    wide = sum(body.bulk + body.loads.get(16, 0) for body in bodies)
    found = []
    if narrow and (compiled.loops or (case.streams and narrow >= wide)):
        found.append(f"{narrow} loads of 2 bytes in main loops")
    if case.streams and not wide:
        found.append("no 16-byte loads in a main loop")
    return found
