#!/usr/bin/env python3
"""How fast the virtual cluster is: process CPU seconds and peak memory of whole simulations.

    python benchmarks/simulate.py [conversation|synthetic ...] [--trace T.jsonl] [--part 0.05] [--out F.jsonl]

conversation  a trace (`--trace`, needed) on configs/deepseek-v3-h800-ep144.yaml: prefill EP32 on 4 nodes,
              decode EP144 on 18. Such a cluster is nearly idle: few, long runs of equal steps
synthetic     10 virtual minutes of requests of 1.2k prompt and 1.5k output tokens on average at 70 % of what
              144 decode ranks do with 256 sequences each; two prefill instances. Nearly every step changes

`--part` takes that share of the requests, the first to come. One core; the target is 120 s and 2 GB for each.
Output: JSON lines, one a simulation, with its virtual figures, so that a faster one that simulates something
else is noticed. `loop_seconds` are CPU seconds of a fixed loop before and after: where other processes share
the core, they are longer, and so are the others.
"""

import argparse
import json
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from moe_runtime.frontend.trace import read_trace
from moe_runtime.plan.effective import EffectiveDeployment, EffectivePlan
from moe_runtime.plan.load import load_plan
from moe_runtime.plan.resolve import resolve
from moe_runtime.report.machine import read_commit, read_machine
from moe_runtime.spec.catalog import DEEPSEEK_V3
from moe_runtime.virtual.cluster.records import RequestEnd, StepRun
from moe_runtime.virtual.cluster.requests import VirtualRequest
from moe_runtime.virtual.cluster.simulate import Cluster
from moe_runtime.virtual.cluster.times import ModelTimes
from moe_runtime.virtual.cost.balance import Drift, draw_balance
from moe_runtime.virtual.cost.constants import constants
from moe_runtime.virtual.cost.from_plan import plan_setting
from moe_runtime.virtual.cost.loads import deepseek_v3, place
from moe_runtime.virtual.cost.model import CostModel
from moe_runtime.virtual.cost.shapes import decode_step

ROOT = Path(__file__).resolve().parent.parent
PLAN = ROOT / "configs/deepseek-v3-h800-ep144.yaml"
MANY_SEQUENCES = (
    "cluster.nodes=26",
    "deployments.prefill.instances=2",
    "deployments.decode.scheduler.max_sequences=256",
    "deployments.decode.scheduler.max_batch_tokens=256",
    "deployments.decode.scheduler.chunk_tokens=256",
    "deployments.decode.dispatch.max_tokens=256",
    "deployments.decode.kv_cache.blocks=9216",
)
PROMPT, OUTPUT, MINUTES, SHARE = 1200, 1500, 10, 0.7
SECONDS, GIGABYTES = 120.0, 2.0


@dataclass
class Summary:
    """A listener that keeps sums only."""

    runs: int = 0
    num_steps: int = 0
    output_tokens: int = 0
    failed: int = 0
    end: float = 0.0
    busy: dict[str, float] = field(default_factory=dict)
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def steps(self, run: StepRun) -> None:
        self.runs += 1
        self.num_steps += run.steps
        self.busy[run.instance] = self.busy.get(run.instance, 0.0) + run.seconds
        self.end = max(self.end, run.start + run.seconds)

    def request(self, end: RequestEnd) -> None:
        self.output_tokens += end.output_tokens
        self.failed += end.error is not None
        if end.first_token is not None and end.last_token is not None:
            self.first.append(end.first_token - end.arrival)
            if end.output_tokens > 1:
                self.gaps.append((end.last_token - end.first_token) / (end.output_tokens - 1))


def cost_model(plan: EffectivePlan, deployment: EffectiveDeployment) -> CostModel:
    """Published expert loads through the balancer's placement."""
    setting = plan_setting(plan.cluster, deployment, weights=DEEPSEEK_V3.weight_dtype(plan.model.dtype))
    load_LE = deepseek_v3("prefill" if deployment.name == "prefill" else "decode")
    placement = place(
        load_LE,
        ranks=deployment.expert_parallel,
        ranks_per_node=setting.ranks_per_node,
        redundant_experts=deployment.redundant_experts,
        balanced=True,
        groups=DEEPSEEK_V3.moe.router.num_groups,
    )
    fitted = constants().fitted
    balance = draw_balance(
        load_LE,
        placement,
        top_k=DEEPSEEK_V3.moe.router.top_k,
        drift=Drift(common=fitted.drift_common, sequence=fitted.drift_sequence),
        tokens_per_sequence=4096.0 if deployment.name == "prefill" else 1.0,
    )
    return CostModel(DEEPSEEK_V3, setting, balance)


def conversation(trace: Path, part: float) -> list[VirtualRequest]:
    """The first `part` of a trace, by requests."""
    requests = read_trace(trace)
    return [
        VirtualRequest(
            index=index,
            at=r.arrival,
            input_length=r.input_length,
            output_length=r.output_length,
            hash_ids=r.hash_ids,
            block_tokens=r.block_tokens,
        )
        for index, r in enumerate(requests[: max(1, round(part * len(requests)))])
    ]


def synthetic(model: CostModel, part: float, seed: int = 0) -> Iterator[VirtualRequest]:
    """Poisson arrivals; lengths are spread evenly over half to one and a half of their means."""
    rng = np.random.default_rng(seed)
    step = model.step(decode_step(144, sequences=256, context=PROMPT + OUTPUT / 2, micro_batches=2)).seconds
    rate = SHARE * 144 * 256 / step / OUTPUT
    at = 0.0
    for index in range(round(part * rate * 60 * MINUTES)):
        at += float(rng.exponential(1 / rate))
        prompt, output = (int(n * rng.uniform(0.5, 1.5)) for n in (PROMPT, OUTPUT))
        yield VirtualRequest(index=index, at=at, input_length=prompt, output_length=output)


def measure(name: str, trace: Path | None, part: float) -> dict[str, Any]:
    """Run one simulation; reading the trace and building the cost model count, too."""
    loops = [loop_seconds()]
    begin = time.process_time()
    plan = resolve(load_plan(PLAN, MANY_SEQUENCES if name == "synthetic" else ()).plan, DEEPSEEK_V3)
    models = {d.name: cost_model(plan, d) for d in plan.deployments}
    requests: Iterator[VirtualRequest] | list[VirtualRequest]
    if name == "synthetic":
        requests = synthetic(models["decode"], part)
    else:
        assert trace is not None
        requests = conversation(trace, part)
    links, token_bytes = models["prefill"].links, plan.deployment("prefill").kv.token_bytes
    summary = Summary()
    cluster = Cluster(
        plan,
        DEEPSEEK_V3,
        times={d: ModelTimes(model) for d, model in models.items()},
        kv_seconds=lambda tokens: links.bulk(token_bytes * tokens),
        listener=summary,
    )
    prepared = time.process_time()
    cluster.run(requests)
    seconds = time.process_time() - begin
    loops.append(loop_seconds())
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    return {
        "simulation": name,
        "part": part,
        "cpu_seconds": round(seconds, 2),
        "cpu_seconds_prepare": round(prepared - begin, 2),
        "loop_seconds": [round(s, 3) for s in loops],
        "peak_gigabytes": round(memory, 3),
        "asked": {"cpu_seconds": SECONDS, "peak_gigabytes": GIGABYTES} if part == 1 else None,
        "met": (seconds < SECONDS and memory < GIGABYTES) if part == 1 else None,
        "requests": len(summary.first) + summary.failed,
        "failed": summary.failed,
        "steps": summary.num_steps,
        "step_records": summary.runs,
        "turns": {n: i.turns for n, i in cluster.instances.items()},
        "virtual_seconds": round(summary.end, 1),
        "busy": {n: round(b / summary.end, 3) for n, b in summary.busy.items()},
        "output_tokens_per_second": round(summary.output_tokens / summary.end, 1),
        "ttft_ms": _percentiles(summary.first),
        "tpot_ms": _percentiles(summary.gaps),
    }


def loop_seconds() -> float:
    """CPU seconds of three million multiplications."""
    begin, total = time.process_time(), 0
    for i in range(3_000_000):
        total += i * i
    return time.process_time() - begin


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    return {f"p{p}": round(1e3 * float(np.percentile(seconds, p)), 2) for p in (50, 99)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("simulations", nargs="*", default=["conversation", "synthetic"])
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--part", type=float, default=1.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    if "conversation" in args.simulations and args.trace is None:
        parser.error("conversation needs --trace")
    lines = []
    where = {
        "machine": msgspec.to_builtins(read_machine(hardware="cpu-host", device="cpu")),
        "commit": read_commit(),
    }
    for name in args.simulations:
        line = measure(name, args.trace, args.part) | where
        print(json.dumps(line))
        lines.append(json.dumps(line))
    if args.out is not None:
        args.out.write_text("".join(f"{line}\n" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
