"""Two micro-batches over a link of given speed: what the plain step pays, and what overlap leaves of it.

One rank with all experts, real computation, and a link that delivers late (SlowLink of the tests):
its time per step X goes from 0 to twice the computation C. Plain, a step costs about C + X. With two
micro-batches, whose computation is C2, nothing can end before

    max(C2 + last combine, computed before the first dispatch + X + computed after the last combine)

which is max(C2, X) and the ends that nothing can hide. `over_bound` is the step's time over it, at most 1.15
for every X (`--check`).

Prints JSON lines, and with --plot a picture.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from moe_runtime.checkpoint.make import make_checkpoint  # noqa: E402
from moe_runtime.checkpoint.shapes import SIZES  # noqa: E402
from moe_runtime.engine import overlap  # noqa: E402
from moe_runtime.expert_parallel.local import LocalBuffer  # noqa: E402
from tests.expert_parallel.slow_link import SlowLink  # noqa: E402
from tests.models.decoder_harness import Rank, load_decoder  # noqa: E402

TARGET = 1.15
FACTORS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)


class Steps:
    """Prefill steps of fixed size, whole or in two halves of whole sequences."""

    def __init__(self, checkpoint: Path, sequences: int, length: int) -> None:
        self.link = SlowLink(LocalBuffer(slots_per_rank=32), 0.0)
        self.decoder = load_decoder(checkpoint, buffers={"normal": self.link})  # type: ignore[dict-item]
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(8, 500, (sequences, length), generator=generator).tolist()
        self.prompts = dict(enumerate(tokens))
        self.rows = sequences * length
        self.blocks = sequences * -(-length // 16) + 8

    @torch.inference_mode()
    def run(self, micro_batches: int, per_row: float) -> "Step":
        """One step at this speed of the link, in seconds per row."""
        rank = Rank(self.decoder, blocks=self.blocks)
        half = len(self.prompts) // micro_batches
        parts = [
            {s: p for s, p in self.prompts.items() if s // half == part} for part in range(micro_batches)
        ]
        contexts = [rank.context({}, part) for part in parts]
        batches = [(self.decoder.embed(c), c) for c in contexts]
        self.link.reset(per_row)
        began = time.monotonic()
        overlap.run(batches, list(self.decoder.layers))
        ended = time.monotonic()
        ends = self.link.first_start - began + ended - self.link.last_arrival
        return Step(ended - began, self.link.transport, ends)


class Step(NamedTuple):
    """Seconds of a step, of its transfers, and of what is computed before the first and after the last."""

    wall: float
    link: float
    ends: float


def measure(steps: Steps, repetitions: int) -> list[dict[str, float]]:
    """One row per factor of link time to computation; medians of alternating runs."""
    for micro_batches in (1, 2):
        steps.run(micro_batches, 0.0)
    compute = {m: median(steps.run(m, 0.0).wall for _ in range(repetitions)) for m in (1, 2)}
    transfers = 2 * len(steps.decoder.spec.moe_layers)
    rows = []
    for factor in FACTORS:
        per_row = factor * compute[2] / (transfers * steps.rows)
        plain, both, bound = [], [], []
        for _ in range(repetitions):
            plain.append(steps.run(1, per_row).wall)
            now = steps.run(2, 0.0).wall  # the machine's speed drifts: compare within the repetition
            step = steps.run(2, per_row)
            both.append(step.wall)
            last = step.link / transfers / 2  # of one micro-batch
            bound.append(max(now + last, step.link + step.ends))
        rows.append(
            {
                "factor": factor,
                "compute_plain_ms": 1e3 * compute[1],
                "compute_split_ms": 1e3 * compute[2],
                "plain_ms": 1e3 * median(plain),
                "overlap_ms": 1e3 * median(both),
                "bound_ms": 1e3 * median(bound),
                "over_bound": median(w / b for w, b in zip(both, bound, strict=True)),
                "plain_over_overlap": median(p / w for p, w in zip(plain, both, strict=True)),
            }
        )
    return rows


def plot(rows: list[dict[str, float]], path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    x = [r["factor"] for r in rows]
    for name, label in (
        ("plain_ms", "plain"),
        ("overlap_ms", "two micro-batches"),
        ("bound_ms", "bound"),
    ):
        style = "--" if name == "bound_ms" else "o-"
        axes.plot(x, [r[name] for r in rows], style, label=label)
    axes.set_xlabel("link time / computation")
    axes.set_ylabel("step, ms")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, help="default: one of --size, made on the spot")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--plot", type=Path, metavar="F.png")
    parser.add_argument("--check", action="store_true", help="exit with 1 above the target")
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = a.checkpoint or Path(folder) / a.size
        if a.checkpoint is None:
            make_checkpoint(checkpoint, family="deepseek_v3", size=a.size)
        rows = measure(Steps(checkpoint, a.sequences, a.length), a.repetitions)
    for row in rows:
        print(json.dumps({**{k: round(v, 3) for k, v in row.items()}, "cores": os.cpu_count()}), flush=True)
    if a.plot is not None:
        plot(rows, a.plot)
    if a.check and max(row["over_bound"] for row in rows) > TARGET:
        sys.exit(1)


if __name__ == "__main__":
    main()
