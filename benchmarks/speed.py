#!/usr/bin/env python3
"""moe-runtime against transformers' own `generate`, and EP 2 against EP 1, on one checkpoint in one run.

    python benchmarks/speed.py checkpoints/small-deepseek-v3 --out speed.jsonl [--check]

Each phase alternates baseline (A) and moe-runtime (B) and compares medians. The prompts of a phase are
the same token ids on both sides: 128 random ids, greedy, end-of-sequence ignored. moe-runtime runs as
its command line, `python -m moe_runtime bench`, so what is measured is what a user gets: frontend,
sockets, scheduling and all. Both sides run a short warm-up first, outside the measured time.

phase     requests            out   figure                       compared with
batch     32 at once          64    output tokens/s              transformers, one batch of 32
single    4, one at a time    64    output tokens/s              transformers, batches of 1
prefill   32 at once          1     prompt tokens/s              transformers, one batch of 32
ep2_torch 32 at once          64    output tokens/s at EP 2      moe-runtime at EP 1; backend torch over gloo
ep2       32 at once          64    output tokens/s at EP 2      moe-runtime at EP 1; the default backend

Time runs from the arrival of the first request to the last token of the last one. Output: a JSON line
per measurement, then one per phase with the medians, their ratio and the ratio to reach.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from moe_runtime.frontend.prompts import trace_prompts, usable_ids
from moe_runtime.frontend.trace import read_trace
from moe_runtime.models.families.registry import read_spec
from moe_runtime.report.files import load_report
from moe_runtime.report.machine import read_commit, read_machine
from moe_runtime.report.schema import Report, RequestRow

HERE = Path(__file__).resolve().parent
WARMUP_REQUESTS = 2
WARMUP_OUTPUT = 4
# The measured requests arrive this long after the warm-up; if that took longer, the replay is slowed down.
WARMUP_MS = 10_000
REPLAY_SPEEDS = (1.0, 0.3, 0.1)
RUN_SECONDS = 600


class WarmupOverran(RuntimeError):
    """The measured requests arrived before the warm-up was over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """`batch`: sequences at once. `figure`: what is counted. `target`: the ratio B / A to reach."""

    name: str
    target: float
    requests: int = 32
    batch: int = 32
    input_length: int = 128
    output_length: int = 64
    figure: str = "output_tokens_per_second"
    expert_parallel: int = 1
    backend: str = "auto"
    baseline: str = "transformers"


PHASES = (
    Phase(name="batch", target=3.0),
    Phase(name="single", target=2.0, requests=4, batch=1),
    Phase(name="prefill", target=1.0, output_length=1, figure="prompt_tokens_per_second"),
    Phase(name="ep2_torch", target=0.4, expert_parallel=2, backend="torch", baseline="moe-runtime EP 1"),
    Phase(name="ep2", target=0.75, expert_parallel=2, baseline="moe-runtime EP 1"),
)


def trace_lines(phase: Phase) -> list[dict[str, int]]:
    """The warm-up at time 0, then all measured requests at the same moment."""
    lines = [
        {
            "timestamp": 0,
            "input_length": phase.input_length,
            "output_length": min(WARMUP_OUTPUT, phase.output_length),
        }
        for _ in range(WARMUP_REQUESTS)
    ]
    measured = {
        "timestamp": WARMUP_MS,
        "input_length": phase.input_length,
        "output_length": phase.output_length,
    }
    return lines + [dict(measured) for _ in range(phase.requests)]


def plan_yaml(checkpoint: Path, dtype: str, expert_parallel: int, phase: Phase) -> str:
    """A plan of one deployment; JSON is YAML, so paths need no care."""
    plan = {
        "model": {"path": str(checkpoint.resolve()), "dtype": dtype},
        "cluster": {"ranks_per_node": expert_parallel},
        "deployments": {
            "unified": {
                "expert_parallel": expert_parallel,
                # All prompts of a phase wait from the start, so chunks are as large as pays.
                "scheduler": {"max_sequences": phase.batch, "max_batch_tokens": 2048, "chunk_tokens": 1024},
                "dispatch": {"backend": phase.backend if expert_parallel > 1 else "auto"},
            },
        },
    }
    return json.dumps(plan, indent=1)


def figure_of(log: Sequence[RequestRow], phase: Phase) -> dict[str, float]:
    """Tokens and seconds of the measured requests.

    Raises RuntimeError if a request failed or came short, WarmupOverran if the warm-up was not over.
    """
    warmup = [r for r in log if r.index < WARMUP_REQUESTS]
    measured = [r for r in log if r.index >= WARMUP_REQUESTS]
    if (len(warmup), len(measured)) != (WARMUP_REQUESTS, phase.requests):
        raise RuntimeError(f"{len(warmup)} + {len(measured)} requests in the log")
    for r in log:
        if r.error is not None or r.last_token is None or r.first_token is None:
            raise RuntimeError(f"request {r.index}: {r.error or 'no token'}")
    for r in measured:
        if (r.prompt_tokens, r.output_tokens) != (phase.input_length, phase.output_length):
            raise RuntimeError(f"request {r.index}: {r.prompt_tokens} tokens in, {r.output_tokens} out")
        if r.cached_tokens:
            raise RuntimeError(f"request {r.index}: {r.cached_tokens} prompt tokens came from a cache")
    start = min(r.arrival for r in measured)
    if max(r.last_token or 0.0 for r in warmup) > start:
        raise WarmupOverran(f"the warm-up took longer than {start:g} s")
    ttft = statistics.median((r.first_token or 0.0) - r.arrival for r in measured)
    seconds = max(r.last_token or 0.0 for r in measured) - start
    return {**rates(phase, seconds), "ttft_ms": ttft * 1e3}


def rates(phase: Phase, seconds: float) -> dict[str, float]:
    """Tokens per second of a phase's requests done in `seconds`."""
    return {
        "seconds": seconds,
        "output_tokens_per_second": phase.requests * phase.output_length / seconds,
        "prompt_tokens_per_second": phase.requests * phase.input_length / seconds,
    }


def summary(phase: Phase, measured: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the two sides and their ratio."""
    sides = {s: [m[phase.figure] for m in measured if m["side"] == s] for s in ("A", "B")}
    a, b = statistics.median(sides["A"]), statistics.median(sides["B"])
    return {
        "benchmark": "speed",
        "phase": phase.name,
        "figure": phase.figure,
        "baseline": phase.baseline,
        "A": a,
        "B": b,
        "lowest_A": min(sides["A"]),
        "highest_A": max(sides["A"]),
        "lowest_B": min(sides["B"]),
        "highest_B": max(sides["B"]),
        "ratio": b / a,
        "target": phase.target,
        "met": b / a >= phase.target,
    }


class Baseline:
    """The transformers worker, started when first needed and ended by `close`."""

    def __init__(self, checkpoint: Path, dtype: str) -> None:
        self._command = [sys.executable, str(HERE / "transformers_generate.py"), str(checkpoint), dtype]
        self._process: subprocess.Popen[str] | None = None
        self.about: dict[str, Any] = {}

    def seconds(self, prompts: list[list[int]], *, batch: int, new_tokens: int) -> float:
        answer: float = self._ask({"prompts": prompts, "batch": batch, "new_tokens": new_tokens})["seconds"]
        return answer

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def _ask(self, work: dict[str, Any]) -> dict[str, Any]:
        if self._process is None:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            self.about = self._read(self._process)
        stdin: IO[str] = self._process.stdin  # type: ignore[assignment]
        stdin.write(json.dumps(work) + "\n")
        stdin.flush()
        return self._read(self._process)

    @staticmethod
    def _read(process: subprocess.Popen[str]) -> dict[str, Any]:
        stdout: IO[str] = process.stdout  # type: ignore[assignment]
        line = stdout.readline()
        if not line:
            raise RuntimeError(f"the baseline ended with {process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


class Bench:
    """The measurements of one run on one checkpoint."""

    def __init__(self, checkpoint: Path, dtype: str, folder: Path) -> None:
        self.checkpoint, self.dtype, self.folder = checkpoint, dtype, folder
        self.baseline = Baseline(checkpoint, dtype)

    def run(self, phase: Phase, repetitions: int) -> Iterator[dict[str, Any]]:
        """A, B, A, B, ..."""
        for repetition in range(repetitions):
            for side in ("A", "B"):
                if side == "B":
                    row = self.moe_runtime(phase, phase.expert_parallel)
                elif phase.baseline == "transformers":
                    row = self.transformers(phase)
                else:
                    row = self.moe_runtime(phase, 1)
                place = {"phase": phase.name, "side": side, "repetition": repetition}
                yield {"benchmark": "speed", **place, **row, "load_average": os.getloadavg()[0]}

    def transformers(self, phase: Phase) -> dict[str, Any]:
        spec = read_spec(self.checkpoint, None)
        special = [*spec.eos_token_ids, *([] if spec.bos_token_id is None else [spec.bos_token_id])]
        prompts = trace_prompts(
            read_trace(self._trace(phase)),
            ids=usable_ids(spec.vocab_size, special),
            encode=lambda text: [],
            max_tokens=spec.max_positions,
        )
        warmup, measured = prompts[:WARMUP_REQUESTS], prompts[WARMUP_REQUESTS:]
        self.baseline.seconds(warmup, batch=phase.batch, new_tokens=min(WARMUP_OUTPUT, phase.output_length))
        seconds = self.baseline.seconds(measured, batch=phase.batch, new_tokens=phase.output_length)
        return {"system": "transformers", **self.baseline.about, **rates(phase, seconds)}

    def moe_runtime(self, phase: Phase, expert_parallel: int) -> dict[str, Any]:
        plan = self.folder / f"ep{expert_parallel}-{phase.name}.yaml"
        plan.write_text(plan_yaml(self.checkpoint, self.dtype, expert_parallel, phase))
        for speed in REPLAY_SPEEDS:
            report = self._bench(plan, phase, speed)
            try:
                figure = figure_of(report.request_log, phase)
            except WarmupOverran:
                if speed == REPLAY_SPEEDS[-1]:
                    raise
            else:
                break
        return {
            "system": f"moe-runtime EP {expert_parallel}",
            "plan": report.plan_digest,
            **figure,
        }

    def _bench(self, plan: Path, phase: Phase, speed: float) -> Report:
        out = self.folder / "run.json"
        command = [sys.executable, "-m", "moe_runtime", "bench", str(plan), "--speed", str(speed)]
        command += ["--trace", str(self._trace(phase)), "--out", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_SECONDS, cwd=HERE.parent)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
        return load_report(out)

    def _trace(self, phase: Phase) -> Path:
        path = self.folder / f"{phase.name}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in trace_lines(phase)))
        return path


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """The command line of this script."""
    parser = argparse.ArgumentParser(
        description="Speed against transformers' generate, and of EP 2 against EP 1."
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument(
        "--phases", nargs="+", choices=[p.name for p in PHASES], default=[p.name for p in PHASES]
    )
    parser.add_argument("--out", type=Path, help="file of JSON lines to append to")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a ratio is not reached")
    return parser.parse_args(argv)


def main() -> int:
    arguments = parse_arguments(sys.argv[1:])
    machine = read_machine(hardware="", device="cpu")
    common = {
        "commit": read_commit(),
        "machine": f"{machine.cpu_model}, {machine.cores} cores",
        "checkpoint": arguments.checkpoint.name,
        "dtype": arguments.dtype,
    }
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(arguments.checkpoint, arguments.dtype, Path(folder))
        try:
            for phase in (p for p in PHASES if p.name in arguments.phases):
                measured = []
                for row in bench.run(phase, arguments.repetitions):
                    measured.append(row)
                    write({**row, **common}, arguments.out)
                result = summary(phase, measured)
                missed += not result["met"]
                write({**result, **common}, arguments.out)
        finally:
            bench.baseline.close()
    return int(arguments.check and missed > 0)


def write(row: dict[str, Any], out: Path | None) -> None:
    """One JSON line, to the screen and to the file."""
    line = json.dumps({k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in row.items()})
    print(line, flush=True)
    if out is not None:
        with out.open("a") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
