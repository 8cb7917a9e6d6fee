"""A synthetic run to build reports of: prefill at EP 2 and decode at EP 4, six ranks of one node."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from moe_runtime.report.facts import DeploymentFacts, RunFacts
from moe_runtime.report.records import PHASES, RankSteps, RequestRecord, StepLog
from moe_runtime.report.schema import Machine, ModelSummary, Options


def make_facts(**changes) -> RunFacts:
    def deployment(name, ranks, redundant):
        return DeploymentFacts(
            name=name,
            instances=(f"{name}/0",),
            expert_parallel=ranks,
            redundant_experts=redundant,
            dispatch_backend="torch",
            kv_blocks=100,
            kernels={"route": "route.cpu", "linear": "linear.cpu", "experts": "experts.reference"},
        )

    base = RunFacts(
        created="2026-01-02T03:04:05+00:00",
        version="0.1.0",
        commit="0123456789abcdef0123456789abcdef01234567",
        machine=Machine(
            hardware="cpu-host", device="cpu", cpu_model="A processor", cores=2, memory_bytes=16 * 2**30
        ),
        plan={"model": {"path": "checkpoints/small"}},
        plan_digest="89abcdef01234567",
        model=ModelSummary(
            path="checkpoints/small",
            family="deepseek_v3",
            dtype="float32",
            hidden=512,
            num_layers=4,
            num_moe_layers=3,
            num_experts=32,
            top_k=4,
            vocab_size=8192,
        ),
        options=Options(trace="trace.jsonl", speed=1.0, limit=None, scale_lengths=1.0),
        ranks_per_node=6,
        moe_layers=(1, 2, 3),
        deployments=(deployment("prefill", 2, 0), deployment("decode", 4, 8)),
        slo=(2000.0, 100.0),
    )
    return replace(base, **changes)


def make_request(index, arrival, times, *, prompt=10, cached=0, **changes) -> RequestRecord:
    base = RequestRecord(
        index=index,
        scheduled_arrival=arrival,
        sent=arrival + 0.001,
        token_times=tuple(times),
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_tokens=len(times),
        finish_reason="length",
        prefill_instance="prefill/0",
        decode_instance="decode/0",
    )
    return replace(base, **changes)


def make_steps(instance, rank, rows, *, layers=3) -> RankSteps:
    """`rows`: dicts of columns; what they leave out is 0, or the same for all steps."""
    log = StepLog(instance=instance, deployment=instance.split("/")[0], rank=rank, num_moe_layers=layers)
    for number, row in enumerate(rows):
        wall = row.get("wall", 0.1)
        base = dict(
            step=number,
            start=float(number),
            wall=wall,
            phases=[wall / len(PHASES)] * len(PHASES),
            decode_tokens=0,
            prefill_tokens=0,
            cached_tokens=0,
            recomputed_tokens=0,
            received_rows=[0] * layers,
            kv_used_blocks=0,
            preemptions=0,
            rows_dispatched=0,
            bytes_dispatched=0,
            bytes_combined=0,
            transport_busy=0.04,
            transport_waited=0.01,
        )
        log.append(**{**base, **row})
    return log.take()


@dataclass
class Make:
    facts = staticmethod(make_facts)
    request = staticmethod(make_request)
    steps = staticmethod(make_steps)

    def run(self, *, requests=20, seconds=100.0):
        """(facts, requests, steps) whose counts agree: prompts of 10, 2 of them cached; 5 tokens out."""
        arrivals = np.linspace(0.0, seconds, requests)
        records = [
            self.request(i, t, [t + 0.5 + 0.05 * k for k in range(5)], prompt=10, cached=2)
            for i, t in enumerate(arrivals)
        ]
        rng = np.random.default_rng(0)
        steps = []
        for instance, ranks in (("prefill/0", 2), ("decode/0", 4)):
            for rank in range(ranks):
                rows = []
                for number, t in enumerate(arrivals):
                    row = dict(step=number, start=t + 0.2, kv_used_blocks=10 * (rank + 1))
                    row["received_rows"] = rng.integers(1, 9, 3).tolist()
                    if instance == "prefill/0" and number % 2 == rank:
                        row |= dict(prefill_tokens=8, cached_tokens=2, bytes_dispatched=8 * 512)
                    if instance == "decode/0":
                        row |= dict(decode_tokens=1, bytes_dispatched=2048, bytes_combined=4096)
                    rows.append(row)
                steps.append(self.steps(instance, rank, rows))
        return self.facts(), records, steps


@pytest.fixture(scope="session")
def make() -> Make:
    return Make()
