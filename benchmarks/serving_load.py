#!/usr/bin/env python3
"""A server of two ranks under load, asked over HTTP: shedding, stalls by long prompts, the prefix cache.

    python benchmarks/serving_load.py CHECKPOINT --trace T.jsonl --out load.jsonl [--seconds 20] [--check]

The server is `moe-runtime serve`, the client `frontend.http_replay` in this process: on a host with few
cores they compete. A line per measurement, then one per figure with what it is compared with. Every load
says how many cores anything else on the host was using: with more than a few hundredths its times are
not the server's.

figure   what                                                                               to reach
goodput  requests/s that meet both objectives, open loop at 4x the capacity over that at 1x  >= 0.9
stall    p99 / p50 of the gaps between tokens of 8 streams while long prompts arrive        <= 2.5
prefix   prompt tokens/s with the prefix cache over that without, of requests that share a  >= 1.3
         prefix in the trace (all of them and what they follow from), one output token each

Capacity is the most that finishes per second when over a quarter of all requests is refused.
Objectives: a time per token of 2x what 8 streams alone take (1.5x where stalls are measured), and the
TTFT that is given. Arrivals follow the trace's times, stretched to the rate; times of the trace that
stand for seconds at once are spread evenly. All loads are of the same stretch of the trace, of which the
lower ones take every second, fourth or eighth request, and every other round goes through them backwards,
so that neither the mix of lengths nor a drift of the machine favours one of them.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.loaded_server import (  # noqa: E402
    PATIENT_MS,
    SEQUENCES,
    Bench,
    CpuUse,
    closed_loop,
    gaps_ms,
    good,
    percentiles,
    replay,
    sharing,
)
from moe_runtime.frontend.http_client import Server  # noqa: E402
from moe_runtime.frontend.prompts import trace_prompts, usable_ids  # noqa: E402
from moe_runtime.frontend.replay import Arrival  # noqa: E402
from moe_runtime.frontend.scrape import Scraper  # noqa: E402
from moe_runtime.frontend.trace import read_trace  # noqa: E402
from moe_runtime.models.families.registry import read_spec  # noqa: E402
from moe_runtime.report.machine import read_commit, read_machine  # noqa: E402
from moe_runtime.report.outcomes import outcome  # noqa: E402
from moe_runtime.spec.requests import SamplingParams  # noqa: E402

SHED, SATURATED_PASSES = 0.25, 2
LOADS = (0.5, 1.0, 2.0, 4.0)
STREAMS = 8
LONG_PROMPT, LONG_PROMPTS = 1024, 6
STALL_SHARE = 0.75  # the chunk budget of the stall phase aims at this part of the time per token


def streams(bench: Bench, length: int) -> list[Arrival]:
    """Streams of short prompts that decode for long."""
    params = SamplingParams(max_tokens=length, ignore_eos=True)
    return [Arrival(index=i, at=0.0, prompt=[40 + i] * 8, sampling=params) for i in range(STREAMS)]


def measure_step(bench: Bench) -> float:
    """Milliseconds between tokens of 8 streams with nothing else to do."""
    with bench.server(tpot_ms=PATIENT_MS) as server:
        replay(server, streams(bench, 8), bench.checkpoint.name)
        records = replay(server, streams(bench, 64), bench.checkpoint.name)
    alone = percentiles(gaps_ms(records))
    bench.write("decode_alone", streams=STREAMS, itl_ms=alone)
    return alone["p50"]


def measure_stall(bench: Bench, tpot_ms: float) -> float:
    """p99 / p50 of the streams' gaps while prompts of about `LONG_PROMPT` tokens arrive one by one."""
    length = min(400, max(64, round(bench.seconds * 1e3 / tpot_ms)))
    every = length * tpot_ms / 1e3 / (LONG_PROMPTS + 1)
    longest = sorted(range(len(bench.prompts)), key=lambda i: abs(len(bench.prompts[i]) - LONG_PROMPT))
    longest = longest[:LONG_PROMPTS]
    with bench.server(tpot_ms=STALL_SHARE * tpot_ms) as server:
        warm = [bench.arrival(i, 0.0, 1) for i in range(4)]
        replay(server, [*warm, *streams(bench, 32)], bench.checkpoint.name)
        late = [bench.arrival(i, every * (n + 0.5), 1) for n, i in enumerate(longest)]
        records = replay(server, [*streams(bench, length), *late], bench.checkpoint.name)
    own = [r for r in records[:STREAMS] if outcome(r).finished]
    itl = percentiles(gaps_ms(own))
    prompts = [len(bench.prompts[i]) for i in longest]
    answered = [r for r in records[STREAMS:] if outcome(r).finished]
    bench.write(
        "stall",
        itl_ms=itl,
        streams=len(own),
        long_prompts=prompts,
        ttft_ms=percentiles([outcome(r).ttft * 1e3 for r in answered]),
    )
    return itl["p99"] / itl["p50"]


def measure_loads(bench: Bench, tpot_ms: float) -> float:
    """Goodput at 4x the capacity over that at 1x, all rounds together."""
    met: Counter[float] = Counter()
    with bench.server(tpot_ms=tpot_ms, ttft_ms=bench.ttft_ms) as server:
        capacity = measure_capacity(bench, server)
        for number in range(bench.rounds):
            for load in LOADS[:: -1 if number % 2 else 1]:
                met[load] += measure_load(bench, server, load, load * capacity, tpot_ms, number)
    return met[4.0] / met[1.0]


def measure_capacity(bench: Bench, server: Server) -> float:
    """The most requests per second that finish when so many come that a good part of them is refused."""
    clients = 2 * 2 * SEQUENCES
    records, taken = closed_loop(
        bench, server, range(len(bench.requests)), clients=clients, seconds=bench.seconds, output=None
    )
    rate = best = sum(outcome(r).finished for r in records) / taken
    saturated = 0
    rate *= 2
    for number in range(10):
        arrivals = bench.arrivals(rate, bench.seconds)
        fresh = [replace(a, prompt=[20 + number, *a.prompt[1:]]) for a in arrivals]
        records = replay(server, fresh, bench.checkpoint.name)
        done = [r for r in records if outcome(r).finished]
        refused = len(records) - len(done)
        capacity = len(done) / (max(r.token_times[-1] for r in done) - records[0].scheduled_arrival)
        best = max(best, capacity)
        bench.write(
            "capacity",
            offered_per_second=round(rate, 3),
            requests_per_second=round(capacity, 3),
            refused=refused,
        )
        if refused > SHED * len(records):
            saturated += 1
        else:
            rate *= 2
        if saturated == SATURATED_PASSES:
            break
    return best


def measure_load(
    bench: Bench, server: Server, load: float, rate: float, tpot_ms: float, number: int
) -> float:
    """Good requests per second at a rate of arrivals."""
    arrivals = bench.arrivals(rate, bench.seconds, every=round(LOADS[-1] / load))
    # Another first token: no phase before has left these prompts in the cache.
    first = 40 + len(LOADS) * number + LOADS.index(load)
    fresh = [replace(a, prompt=[first, *a.prompt[1:]]) for a in arrivals]
    scraper = Scraper(server)
    asyncio.run(scraper.look())
    before = CpuUse.now()
    records = replay(server, fresh, bench.checkpoint.name)
    cores = CpuUse.now().since(before)
    span = max(a.at for a in arrivals)
    time.sleep(1.5)  # a status is on its way
    asyncio.run(scraper.look())
    steps = scraper.steps(num_moe_layers=1)
    done = [r for r in records if outcome(r).finished]
    refused = sum("HTTP 429" in (r.error or "") for r in records)
    rank = steps[0] if steps else None
    bench.write(
        "load",
        load=load,
        offered_per_second=round(len(arrivals) / span, 3),
        requests=len(records),
        finished=len(done),
        refused=refused,
        failed=len(records) - len(done) - refused,
        late=sum(outcome(r).ttft * 1e3 > bench.ttft_ms for r in done),
        slow=sum((outcome(r).tpot or 0.0) * 1e3 > tpot_ms for r in done),
        cores=cores,
        goodput_per_second=round(good(records, bench.ttft_ms, tpot_ms) / span, 3),
        prompt_tokens_per_second=round(sum(r.prompt_tokens for r in done) / span, 1),
        ttft_ms=percentiles([outcome(r).ttft * 1e3 for r in done]),
        tpot_ms=percentiles([t * 1e3 for r in done if (t := outcome(r).tpot) is not None]),
        steps=len(rank) if rank else None,
        step_ms=round(1e3 * float(rank.wall.mean()), 2) if rank and len(rank) else None,
        decode_rows=round(float(rank.decode_tokens.mean()), 2) if rank and len(rank) else None,
        prefill_rows=round(float(rank.prefill_tokens.mean()), 2) if rank and len(rank) else None,
    )
    return good(records, bench.ttft_ms, tpot_ms) / span


def measure_prefix(bench: Bench) -> float:
    """Prompt tokens per second with the prefix cache over that without."""
    indices = sharing(bench.requests)
    rates = {}
    for cache in (False, True):
        with bench.server(tpot_ms=PATIENT_MS, prefix_cache=cache) as server:
            closed_loop(bench, server, [0, 1], clients=2, seconds=0.0, output=1)
            records, taken = closed_loop(
                bench, server, indices, clients=SEQUENCES, seconds=bench.seconds, output=1
            )
        done = [r for r in records if outcome(r).finished]
        prompt, cached = sum(r.prompt_tokens for r in done), sum(r.cached_tokens for r in done)
        rates[cache] = prompt / taken
        bench.write(
            "prefix",
            cache=cache,
            requests=len(done),
            prompt_tokens=prompt,
            cached_tokens=cached,
            prompt_tokens_per_second=round(rates[cache], 1),
        )
    return rates[True] / rates[False]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scale-lengths", type=float, default=1 / 32)
    parser.add_argument("--limit", type=int, default=1000, help="requests of the trace")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase")
    parser.add_argument("--rounds", type=int, default=2, help="of the loads, one after the other")
    parser.add_argument("--ttft-ms", type=float, default=4000.0, help="objective")
    parser.add_argument("--only", choices=("loads", "stall", "prefix"))
    parser.add_argument("--check", action="store_true", help="exit 1 if a figure is not reached")
    o = parser.parse_args(argv)
    requests = read_trace(o.trace, limit=o.limit, scale_lengths=o.scale_lengths)
    model = read_spec(o.checkpoint, "float32")
    ids = usable_ids(model.vocab_size, [*model.eos_token_ids])
    room = min(model.max_positions, 2048 * 16)
    requests = [r for r in requests if r.input_length + r.output_length <= room]
    prompts = trace_prompts(requests, ids=ids, encode=lambda text: [], max_tokens=room)
    failed = []
    with tempfile.TemporaryDirectory() as folder, o.out.open("w") as out:
        bench = Bench(
            checkpoint=o.checkpoint.resolve(),
            folder=Path(folder),
            out=out,
            seconds=o.seconds,
            rounds=o.rounds,
            ttft_ms=o.ttft_ms,
            requests=requests,
            prompts=prompts,
        )
        machine = read_machine(hardware="cpu-host", device="cpu")
        bench.write(
            "run", commit=read_commit(), cpu=machine.cpu_model, cores=machine.cores, seconds=o.seconds
        )
        tpot_ms = 2 * measure_step(bench) if o.only != "prefix" else 0.0
        figures = {
            "goodput": (lambda: measure_loads(bench, tpot_ms), 0.9, "least", "loads"),
            "stall": (lambda: measure_stall(bench, tpot_ms), 2.5, "most", "stall"),
            "prefix": (lambda: measure_prefix(bench), 1.3, "least", "prefix"),
        }
        for name, (measure, target, bound, phase) in figures.items():
            if o.only not in (None, phase):
                continue
            value = measure()
            reached = value >= target if bound == "least" else value <= target
            bench.write(
                "figure", name=name, value=round(value, 3), target=target, bound=bound, reached=reached
            )
            failed += [] if reached else [name]
    return 1 if failed and o.check else 0


if __name__ == "__main__":
    raise SystemExit(main())
