"""Every case of every kernel, compiled, and the table of what came out.

Owns the list of operations that have a Triton kernel (whoever has a `triton.py` is in it), the compilation of
their cases by a few processes, and how the results are printed.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

from moe_runtime.kernels.aot.case import TARGETS, AotCase, Target
from moe_runtime.kernels.aot.code import Compiled
from moe_runtime.kernels.aot.compile import compile_case
from moe_runtime.kernels.aot.gates import failures, occupancy
from moe_runtime.kernels.errors import KernelError


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case on one target: what it became (None if it did not compile) and why that is not good enough."""

    target: str
    operation: str
    label: str
    compiled: Compiled | None
    programs: int
    problems: tuple[str, ...]
    seconds: float


HEADER = (
    "target",
    "operation",
    "case",
    "registers",
    "stack",
    "spills",
    "shared",
    "tensor memory",
    "warps/programs",
    "main loops: instructions, matrix, loads",
    "matrix",
    "problems",
)


def operations() -> tuple[str, ...]:
    """Operations with a Triton kernel, in order of name; a folder inside one belongs to it."""
    folder = Path(__file__).parent.parent
    return tuple(sorted(path.parent.name for path in folder.glob("*/triton.py")))


def cases(operation: str, target: Target) -> Iterator[AotCase]:
    """What the launcher of an operation can choose on a target, for the shapes of `kernels.shapes`."""
    yield from import_module(f"moe_runtime.kernels.{operation}.triton").aot_cases(target)


def compile_all(
    names: Iterable[str], targets: Sequence[Target], *, subset: bool, jobs: int = 1
) -> Iterator[Row]:
    """Rows in the order operation, target, case; `subset`: only the representative cases.

    Work is passed to processes as positions in the lists of cases, since kernels cannot be pickled.
    """
    work = [
        (name, target.name, i)
        for name in names
        for target in targets
        for i, case in enumerate(cases(name, target))
        if case.representative or not subset
    ]
    if jobs == 1:
        yield from map(compile_one, work)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(compile_one, work)


def compile_one(where: tuple[str, str, int]) -> Row:
    """The row of case `i` of an operation on a target."""
    operation, target_name, i = where
    (target,) = (t for t in TARGETS if t.name == target_name)
    case = list(cases(operation, target))[i]
    start = time.perf_counter()
    try:
        compiled = compile_case(case, target)
    except KernelError as error:
        problems, compiled_or_none = [str(error)], None
    else:
        problems, compiled_or_none = failures(case, target, compiled), compiled
    return Row(
        target=target.name,
        operation=operation,
        label=case.label,
        compiled=compiled_or_none,
        programs=occupancy(target, compiled_or_none) if compiled_or_none else 0,
        problems=tuple(problems),
        seconds=time.perf_counter() - start,
    )


def cells(row: Row) -> tuple[str, ...]:
    """The row as text, in the order of HEADER."""
    name = (row.target, row.operation, row.label)
    problems = "; ".join(row.problems) or "ok"
    c = row.compiled
    if c is None:
        return (*name, *[""] * (len(HEADER) - 4), problems)
    loops = " ".join(
        f"({x.instructions} {x.matrix} "
        + ",".join([*(f"{n}x{w}B" for w, n in sorted(x.loads.items()))])
        + (f" {x.bulk}xTMA" if x.bulk else "")
        + ")"
        for x in c.loops or (c.whole,)
    )
    matrix = ", ".join(f"{n} {kind}" for kind, n in c.matrix.items())
    numbers = (c.registers, c.stack_bytes, c.spills, c.shared_bytes, c.tensor_memory)
    return (*name, *map(str, numbers), f"{c.warps}/{row.programs or '-'}", loops, matrix, problems)
