"""`moe-runtime bench`: replays a request trace open loop, prints and saves the report."""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from moe_runtime.checkpoint.tokenizer import Tokenizer
from moe_runtime.errors import InputError
from moe_runtime.files import require_outputs
from moe_runtime.frontend.experts import Experts
from moe_runtime.frontend.fleet import Fleet
from moe_runtime.frontend.http_client import Server
from moe_runtime.frontend.http_replay import Instances, replay_http, served_model
from moe_runtime.frontend.prompts import trace_prompts, usable_ids
from moe_runtime.frontend.replay import Arrival, replay
from moe_runtime.frontend.scrape import EVERY_SECONDS, NOTE, Scraper
from moe_runtime.frontend.trace import read_trace
from moe_runtime.launch import session
from moe_runtime.launch.console import say, show
from moe_runtime.launch.expert_load import dump_expert_load
from moe_runtime.launch.facts import run_facts
from moe_runtime.launch.kernels import kernels_in_use
from moe_runtime.launch.preflight import Preflight, preflight
from moe_runtime.launch.progress import Progress
from moe_runtime.launch.room import require_prefill_room, sequence_room
from moe_runtime.report.build import build_report
from moe_runtime.report.facts import RunFacts
from moe_runtime.report.files import save_report
from moe_runtime.report.machine import read_machine
from moe_runtime.report.records import RankSteps, RequestRecord
from moe_runtime.report.schema import Options
from moe_runtime.report.show import render, use_color
from moe_runtime.spec.requests import SamplingParams

API_KEY = "MOE_RUNTIME_API_KEY"


def run(arguments: argparse.Namespace, argv: list[str]) -> int:
    command = _Bench(arguments)
    if arguments.http is not None:
        return _run_http(command, arguments)
    return session.run(
        arguments.plan,
        arguments.overrides,
        argv,
        check=command.check,
        work=command.work,
        inputs={"--trace": arguments.trace},
        outputs={"--out": arguments.out, "--dump-expert-load": arguments.dump_expert_load},
        timeline=arguments.timeline_out,
    )


class _Bench:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.out: Path = arguments.out
        self.expert_load: Path | None = arguments.dump_expert_load
        self.options = Options(
            trace=str(arguments.trace),
            speed=arguments.speed,
            limit=arguments.limit,
            scale_lengths=arguments.scale_lengths,
        )

    def check(self, flight: Preflight) -> None:
        """Everything wrong with the inputs, before a rank starts."""
        self._arrivals(flight)

    def _arrivals(self, flight: Preflight) -> list[Arrival]:
        o = self.options
        requests = read_trace(Path(o.trace), limit=o.limit, speed=o.speed, scale_lengths=o.scale_lengths)
        model = flight.model
        special = [*model.eos_token_ids, *([] if model.bos_token_id is None else [model.bos_token_id])]
        prompts = trace_prompts(
            requests,
            ids=usable_ids(model.vocab_size, special),
            encode=lambda text: Tokenizer(Path(flight.effective.model.path)).encode(text),
            max_tokens=sequence_room(flight),
        )
        require_prefill_room(flight, [(r.where, len(p)) for r, p in zip(requests, prompts, strict=True)])
        # The trace says how much is generated, so the end-of-sequence token ends nothing.
        return [
            Arrival(
                index=r.index,
                at=r.arrival,
                prompt=prompt,
                sampling=SamplingParams(max_tokens=r.output_length, ignore_eos=True),
            )
            for r, prompt in zip(requests, prompts, strict=True)
        ]

    async def work(self, flight: Preflight, fleet: Fleet) -> int:
        arrivals = self._arrivals(flight)
        warmup_end = time.monotonic()
        with Progress("requests", len(arrivals)) as progress:
            records = await replay(fleet, arrivals, on_done=progress.advance)
        fleet.raise_if_failed()
        if self.expert_load is not None:
            await dump_expert_load(Experts(fleet), self.expert_load)
        self._save(self._facts(flight, warmup_end), records, await fleet.collect())
        return 0

    async def replay_http(self, flight: Preflight, server: Server) -> None:
        """The replay against a server that runs the plan already; its /metrics stand in for step records."""
        arrivals = self._arrivals(flight)
        key = os.environ.get(API_KEY)
        model = await served_model(server, key)
        scraper = Scraper(server)
        await scraper.require_ranks(
            [(i.deployment, i.name, rank) for i in flight.effective.instances for rank in range(len(i.ranks))]
        )
        follow = asyncio.create_task(scraper.follow())
        warmup_end = time.monotonic()
        with Progress("requests", len(arrivals)) as progress:
            records = await replay_http(
                server,
                arrivals,
                model=model,
                instances=_instances(flight),
                key=key,
                on_done=progress.advance,
            )
        await asyncio.sleep(2 * EVERY_SECONDS)  # until the ranks have said what they did last
        follow.cancel()
        await asyncio.gather(follow, return_exceptions=True)
        await scraper.look()
        steps = scraper.steps(flight.model.num_moe_layers)
        self._save(self._facts(flight, warmup_end, notes=(NOTE,)), records, steps)

    def _save(self, facts: RunFacts, records: Sequence[RequestRecord], steps: Sequence[RankSteps]) -> None:
        report = build_report(facts, records, steps)
        save_report(self.out, report)
        show(render(report, color=use_color(sys.stdout)))
        say(f"wrote {self.out}")

    def _facts(self, flight: Preflight, warmup_end: float, notes: tuple[str, ...] = ()) -> RunFacts:
        plan = flight.effective
        device = plan.cluster.device
        return run_facts(
            flight,
            self.options,
            read_machine(hardware=plan.cluster.hardware, device=device),
            kernels={d.name: kernels_in_use(d, flight.model, device) for d in plan.deployments},
            warmup_end=warmup_end,
            notes=notes,
        )


def _run_http(command: _Bench, arguments: argparse.Namespace) -> int:
    if arguments.dump_expert_load is not None:
        raise InputError(
            "--dump-expert-load: ask the server, POST /admin/expert-load/dump; or leave out --http"
        )
    if arguments.timeline_out is not None:
        raise InputError("--timeline-out: a server keeps no trace of its steps; leave it out, or --http")
    server = Server.of(arguments.http)
    inputs = {"PLAN": arguments.plan, "--trace": arguments.trace}
    require_outputs({"--out": arguments.out}, inputs)
    flight = preflight(arguments.plan, arguments.overrides, check_tensors=False, to_run=False)
    asyncio.run(command.replay_http(flight, server))
    return 0


def _instances(flight: Preflight) -> Instances:
    """The instance of each role where there is but one: a server does not say who served a request."""
    roles: dict[str, list[str]] = {}
    for instance in flight.effective.instances:
        roles.setdefault(instance.deployment, []).append(instance.name)
    only = {role: names[0] for role, names in roles.items() if len(names) == 1}
    unified = only.get("unified")
    return Instances(prefill=only.get("prefill", unified), decode=only.get("decode", unified))
