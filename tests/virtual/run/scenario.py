"""A small hand-made run of prefill and decode, told twice: as a cluster tells it, and as ranks record it."""

from dataclasses import dataclass, field

import numpy as np

from moe_runtime.engine.agree import OverlapReason, StepDecision, StepKind
from moe_runtime.report.facts import DeploymentFacts, RunFacts
from moe_runtime.report.records import PHASES, RankSteps, RequestRecord, StepLog
from moe_runtime.report.schema import Machine, ModelSummary, Options
from moe_runtime.report.schema_time import Simulation
from moe_runtime.virtual.cluster.records import RequestEnd, StepRun
from moe_runtime.virtual.cost.shapes import BOUNDS, PARTS, StepCost

RANKS = {"prefill-0": 2, "decode-0": 4, "decode-1": 4}
LAYERS = (1, 2)
BLOCK = 4
KV_BLOCKS = 400


def make_cost(seconds: float) -> StepCost:
    parts = {p: seconds * (i + 1) / 55 for i, p in enumerate(PARTS)}
    bounds = {b: seconds * (i + 1) / 15 for i, b in enumerate(BOUNDS)}
    return StepCost(
        seconds=seconds,
        parts=parts,
        bounds=bounds,
        communication=seconds * 0.4,
        exposed=seconds * 0.1,
        ideal=seconds * 0.5,
    )


@dataclass
class Scenario:
    runs: list[StepRun] = field(default_factory=list)
    ends: list[RequestEnd] = field(default_factory=list)
    logs: dict[tuple[str, int], StepLog] = field(default_factory=dict)
    records: list[RequestRecord] = field(default_factory=list)
    layers: int = len(LAYERS)
    block: int = BLOCK

    def tell(self, instance: str, first_step: int, steps: int, start: float, each: float, **rows) -> float:
        """A run of `steps` steps of `each` seconds; `rows` as in StepRun, lists [R]. Returns its end."""
        ranks = RANKS[instance]
        columns = {
            f"{name}_R": np.array(rows.get(name, [0] * ranks), np.int64)
            for name in ("decode", "prefill", "cached", "recomputed", "preemptions", "kv_used")
        }
        decode = instance.startswith("decode")
        decision = StepDecision(
            kind=StepKind.FORWARD,
            dispatch_mode="low_latency" if decode else "normal",
            micro_batches=2 if decode else 1,
            overlap_reason=OverlapReason.ASKED if decode else OverlapReason.OFF,
        )
        seconds = each * steps
        self.runs.append(
            StepRun(
                instance=instance,
                first_step=first_step,
                steps=steps,
                start=start,
                seconds=seconds,
                decision=decision,
                cost=make_cost(seconds),
                **columns,
            )
        )
        self.record(self.runs[-1])
        return start + seconds

    def record(self, run: StepRun) -> None:
        """What the ranks log of a run of steps, all of them equal."""
        columns = {
            name: getattr(run, name)
            for name in ("decode_R", "prefill_R", "cached_R", "recomputed_R", "preemptions_R", "kv_used_R")
        }
        for rank in range(len(run.decode_R)):
            each = run.seconds / run.steps
            self._log(run.instance, rank, run.first_step, run.steps, run.start, each, columns, run)

    def _log(self, instance, rank, first_step, steps, start, each, columns, run) -> None:
        decision = run.decision
        log = self.logs.setdefault(
            (instance, rank),
            StepLog(
                instance=instance,
                deployment=instance.split("-")[0],
                rank=rank,
                num_moe_layers=self.layers,
            ),
        )
        of = {name: int(column[rank]) for name, column in columns.items()}
        for step in range(steps):
            first = step == 0
            # Blocks reach `kv_used` with the last step, and every row takes a BLOCK-th of one.
            grown = of["decode_R"] * (steps - 1 - step) // self.block
            log.append(
                step=first_step + step,
                start=start + each * step,
                wall=each,
                phases=[each / len(PHASES)] * len(PHASES),
                decode_tokens=of["decode_R"],
                prefill_tokens=of["prefill_R"],
                cached_tokens=of["cached_R"] * first,
                recomputed_tokens=of["recomputed_R"],
                received_rows=[0] * self.layers,
                kv_used_blocks=of["kv_used_R"] - grown,
                preemptions=of["preemptions_R"] * first,
                micro_batches=decision.micro_batches,
                overlap_reason=int(decision.overlap_reason),
                dispatch_mode=1 if decision.dispatch_mode == "low_latency" else 0,
                transport_busy=run.cost.communication / steps,
                transport_waited=run.cost.exposed / steps,
            )

    def end(self, index, arrival, times, *, prompt, cached=0, instance="decode-0", error=None) -> None:
        n = len(times)
        common = dict(
            index=index,
            prompt_tokens=prompt,
            cached_tokens=cached,
            output_tokens=n,
            finish_reason="error" if error else "length",
            error=error,
            prefill_instance="prefill-0" if n else None,
            decode_instance=instance if n > 1 else None,
        )
        self.records.append(
            RequestRecord(scheduled_arrival=arrival, sent=arrival, token_times=tuple(times), **common)
        )
        self.ends.append(
            RequestEnd(
                arrival=arrival,
                first_token=times[0] if n else None,
                second_token=times[1] if n > 1 else None,
                last_token=times[-1] if n else None,
                **common,
            )
        )

    def steps(self) -> list[RankSteps]:
        return [log.take() for log in self.logs.values()]


def make_scenario(requests: int = 40, seconds: float = 12.0, seed: int = 0) -> Scenario:
    """Requests at random moments; each is prefilled alone, then decodes on one of two instances."""
    rng = np.random.default_rng(seed)
    s = Scenario()
    free, step = 0.0, 0
    ready: dict[str, list[tuple[float, int, int, int]]] = {"decode-0": [], "decode-1": []}
    arrivals = np.sort(rng.uniform(0, seconds, requests))
    arrivals[0] = 0.0
    first_tokens: dict[int, float] = {}
    prompts = rng.integers(8, 60, requests)
    cached = np.where(rng.random(requests) < 0.3, 4, 0)
    for i, arrival in enumerate(arrivals.tolist()):
        if i == 7:
            s.end(i, arrival, [], prompt=int(prompts[i]), error="shed")
            continue
        rank, new = i % 2, int(prompts[i] - cached[i])
        rows = dict(prefill=[0, 0], cached=[0, 0], kv_used=[5, 9])
        rows["prefill"][rank], rows["cached"][rank] = new, int(cached[i])
        free = s.tell("prefill-0", step, 1, max(free, arrival), 0.01 + 0.002 * new, **rows)
        step += 1
        first_tokens[i] = free
        tokens = 1 if i == 9 else int(rng.integers(2, 30))
        if tokens == 1:
            s.end(i, arrival, [free], prompt=int(prompts[i]), cached=int(cached[i]))
        else:
            ready[f"decode-{i % 2}"].append((free, i, int(rng.integers(0, 4)), tokens))
    for instance, waiting in ready.items():
        _decode(s, instance, waiting, arrivals, prompts, cached)
    s.runs.sort(key=lambda r: r.start + r.seconds)
    s.records.sort(key=lambda r: r.index)
    return s


def _decode(s: Scenario, instance, waiting, arrivals, prompts, cached) -> None:
    """Everybody who is ready joins before a run; it lasts until one is done, or for 8 steps."""
    now, step = 0.0, 0
    active: dict[int, list[float]] = {}
    rank_of: dict[int, int] = {}
    left: dict[int, int] = {}
    while waiting or active:
        if not active:
            now = max(now, waiting[0][0])
        while waiting and waiting[0][0] <= now:
            ready_at, i, rank, tokens = waiting.pop(0)
            active[i], rank_of[i], left[i] = [ready_at], rank, tokens - 1
        count = min(8, *left.values())
        decode = [sum(rank_of[i] == r for i in active) for r in range(4)]
        each = 0.03 + 0.002 * len(active)
        kv = [20 + 5 * n for n in decode]
        preempted = [int(step == 0), 0, 0, 0]
        end = s.tell(instance, step, count, now, each, decode=decode, kv_used=kv, preemptions=preempted)
        for i in list(active):
            active[i] += [now + each * (k + 1) for k in range(count)]
            left[i] -= count
            if not left[i]:
                times = active.pop(i)
                del left[i]
                s.end(
                    i,
                    float(arrivals[i]),
                    times,
                    prompt=int(prompts[i]),
                    cached=int(cached[i]),
                    instance=instance,
                )
        now, step = end, step + count


def make_facts(*, simulated: bool) -> RunFacts:
    def deployment(name: str, *instances: str) -> DeploymentFacts:
        return DeploymentFacts(
            name=name,
            instances=instances,
            expert_parallel=RANKS[instances[0]],
            redundant_experts=2,
            dispatch_backend="deepep",
            kv_blocks=KV_BLOCKS,
            kernels={},
        )

    return RunFacts(
        created="2026-01-02T03:04:05+00:00",
        version="0.1.0",
        commit=None,
        machine=Machine(hardware="h800", device="cuda", cpu_model=None, cores=None, memory_bytes=None),
        plan={},
        plan_digest="89abcdef01234567",
        model=ModelSummary(
            path="catalog:deepseek-v3",
            family="deepseek_v3",
            dtype="bfloat16",
            hidden=7168,
            num_layers=4,
            num_moe_layers=2,
            num_experts=32,
            top_k=4,
            vocab_size=1000,
        ),
        options=Options(trace="trace.jsonl", speed=1.0, limit=None, scale_lengths=1.0),
        ranks_per_node=2,
        moe_layers=LAYERS,
        deployments=(deployment("prefill", "prefill-0"), deployment("decode", "decode-0", "decode-1")),
        slo=(150.0, 45.0),
        simulation=Simulation(balance="uniform", weights="bfloat16", events=None, virtual_seconds=1.0)
        if simulated
        else None,
    )
