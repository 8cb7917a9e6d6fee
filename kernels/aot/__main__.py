"""`python -m moe_runtime.kernels.aot`: compile every kernel for every chip and refuse code that is not good.

Owns the command line. Needs no GPU. Exit status 1 if any case has a problem.
"""

import argparse
import os
import sys
import tempfile

from moe_runtime.kernels import roofline


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m moe_runtime.kernels.aot", description=__doc__)
    parser.add_argument("--op", action="append", help="only this operation (may be repeated)")
    parser.add_argument("--target", action="append", help="only this chip: sm_90, sm_100, gfx942")
    parser.add_argument("--subset", action="store_true", help="only the representative cases")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile")
    parser.add_argument(
        "--roofline", action="store_true", help="print the least times instead; compile nothing"
    )
    options = parser.parse_args(arguments)
    if options.roofline:
        print("\n".join(roofline.lines()))
        return 0
    # Before triton is imported, here and in the processes that compile.
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.update(TRITON_ALWAYS_COMPILE="1", TRITON_DEFAULT_FP_FUSION="1")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        return _compile(parser, options)


def _compile(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from moe_runtime.kernels.aot import table
    from moe_runtime.kernels.aot.case import TARGETS

    names = options.op or table.operations()
    if unknown := set(names) - set(table.operations()):
        parser.error(f"no Triton kernel for {', '.join(sorted(unknown))}; there are {table.operations()}")
    targets = [t for t in TARGETS if not options.target or t.name in options.target]
    if not targets:
        parser.error(f"--target: one of {', '.join(t.name for t in TARGETS)}")
    print(" | ".join(table.HEADER), flush=True)
    bad = total = 0
    for row in table.compile_all(names, targets, subset=options.subset, jobs=options.jobs):
        print(" | ".join(table.cells(row)), flush=True)
        total += 1
        bad += bool(row.problems)
    print(f"{total} cases, {bad} with problems")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
