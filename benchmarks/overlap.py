"""Two micro-batches over a link of given speed: what the plain step pays, and what overlap leaves of it.

One rank with all experts, real computation, and a link that delivers late (SlowLink of the tests):
its time per step X goes from 0 to twice the computation C. Plain, a step costs about C + X. With
overlap it should cost max(C2, X) and the ends that nothing can hide (the first dispatch and the last
combine of a half), C2 being the computation in two micro-batches.

Prints JSON lines, and with --plot a picture. `over_ideal` is the step's time / (max(C2, X) + ends), to be
at most 1.15 for every X (`--check`).
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from moe_runtime.checkpoint.make import make_checkpoint  # noqa: E402
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
    def seconds(self, micro_batches: int, per_row: float) -> tuple[float, float]:
        """Wall seconds of one step and its link seconds."""
        rank = Rank(self.decoder, blocks=self.blocks)
        half = len(self.prompts) // micro_batches
        parts = [
            {s: p for s, p in self.prompts.items() if s // half == part} for part in range(micro_batches)
        ]
        contexts = [rank.context({}, part) for part in parts]
        batches = [(self.decoder.embed(c), c) for c in contexts]
        self.link.seconds_per_row, self.link.transport = per_row, 0.0
        began = time.perf_counter()
        overlap.run(batches, list(self.decoder.layers), offset=overlap.PREFILL_OFFSET)
        return time.perf_counter() - began, self.link.transport


def measure(steps: Steps, repetitions: int) -> list[dict[str, float]]:
    """One row per factor of link time to computation; medians of alternating runs."""
    for micro_batches in (1, 2):
        steps.seconds(micro_batches, 0.0)
    compute = {m: median(steps.seconds(m, 0.0)[0] for _ in range(repetitions)) for m in (1, 2)}
    transfers = 2 * len(steps.decoder.spec.moe_layers)
    rows = []
    for factor in FACTORS:
        per_row = factor * compute[2] / (transfers * steps.rows)
        plain, both, ideal = [], [], []
        for _ in range(repetitions):
            plain.append(steps.seconds(1, per_row)[0])
            now = steps.seconds(2, 0.0)[0]  # the machine's speed drifts: compare within the repetition
            wall, link = steps.seconds(2, per_row)
            both.append(wall)
            # The ends: half of one transfer before the first and after the last computation of a half.
            ends = link / transfers if link > now else link / transfers / 2
            ideal.append(max(now, link) + ends)
        rows.append(
            {
                "factor": factor,
                "compute_plain_ms": 1e3 * compute[1],
                "compute_split_ms": 1e3 * compute[2],
                "plain_ms": 1e3 * median(plain),
                "overlap_ms": 1e3 * median(both),
                "ideal_ms": 1e3 * median(ideal),
                "over_ideal": median(b / i for b, i in zip(both, ideal, strict=True)),
                "plain_over_overlap": median(p / b for p, b in zip(plain, both, strict=True)),
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
        ("ideal_ms", "max + ends"),
    ):
        style = "--" if name == "ideal_ms" else "o-"
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
    parser.add_argument("--checkpoint", type=Path, help="default: a tiny one, made on the spot")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--plot", type=Path, metavar="F.png")
    parser.add_argument("--check", action="store_true", help="exit with 1 above the target")
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = a.checkpoint or Path(folder) / "tiny"
        if a.checkpoint is None:
            make_checkpoint(checkpoint, family="deepseek_v3", size="tiny")
        rows = measure(Steps(checkpoint, a.sequences, a.length), a.repetitions)
    for row in rows:
        print(json.dumps({**{k: round(v, 3) for k, v in row.items()}, "cores": os.cpu_count()}), flush=True)
    if a.plot is not None:
        plot(rows, a.plot)
    if a.check and max(row["over_ideal"] for row in rows) > TARGET:
        sys.exit(1)


if __name__ == "__main__":
    main()
