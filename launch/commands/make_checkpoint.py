"""`moe-runtime make-checkpoint`: a small checkpoint with random weights, as the hub stores them."""

import argparse

from moe_runtime.checkpoint.make import make_checkpoint
from moe_runtime.launch.console import say


def run(arguments: argparse.Namespace, argv: list[str]) -> int:
    make_checkpoint(
        arguments.out,
        family=arguments.family,
        size=arguments.size,
        dtype=arguments.dtype,
        seed=arguments.seed,
    )
    total = sum(f.stat().st_size for f in arguments.out.iterdir())
    kind = f"{arguments.family} ({arguments.size}, {arguments.dtype}, {total / 1e6:.1f} MB)"
    say(f"wrote {kind} to {arguments.out}")
    return 0
