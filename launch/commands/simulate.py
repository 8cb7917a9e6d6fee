"""`moe-runtime simulate`: a trace on a plan's virtual cluster; the report of `bench`, marked simulated."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from moe_runtime.checkpoint.tokenizer import Tokenizer
from moe_runtime.errors import InputError
from moe_runtime.files import require_outputs
from moe_runtime.frontend.prompts import Encode, trace_lengths
from moe_runtime.frontend.trace import TraceRequest, read_trace
from moe_runtime.launch.console import say, show
from moe_runtime.launch.facts import run_facts
from moe_runtime.launch.preflight import Preflight, preflight
from moe_runtime.launch.progress import Progress
from moe_runtime.launch.room import require_prefill_room, sequence_room
from moe_runtime.report.build import report_on
from moe_runtime.report.files import save_report
from moe_runtime.report.schema import Machine, Options, Report
from moe_runtime.report.schema_time import Simulation
from moe_runtime.report.show import render, use_color
from moe_runtime.spec.catalog import catalog_name
from moe_runtime.virtual.cluster.requests import VirtualRequest
from moe_runtime.virtual.run.loads import LoadChoice
from moe_runtime.virtual.run.notes import script_notes
from moe_runtime.virtual.run.prepare import Workload, assumptions, prepare
from moe_runtime.virtual.run.script import Scripted, read_events
from moe_runtime.virtual.run.simulation import Run, run_simulation


def run(arguments: argparse.Namespace, argv: list[str]) -> int:
    report = _simulate(arguments)
    save_report(arguments.out, report)
    show(render(report, color=use_color(sys.stdout)))
    say(f"wrote {arguments.out}")
    return 0


def _simulate(arguments: argparse.Namespace) -> Report:
    inputs = {"PLAN": arguments.plan, "--trace": arguments.trace}
    inputs |= {} if arguments.events is None else {"--events": arguments.events}
    require_outputs({"--out": arguments.out}, inputs)
    asked = None if arguments.balance is None else LoadChoice.parse(arguments.balance)
    flight = preflight(arguments.plan, arguments.overrides, check_tensors=False, to_run=False)
    options = Options(
        trace=str(arguments.trace),
        speed=arguments.speed,
        limit=arguments.limit,
        scale_lengths=arguments.scale_lengths,
    )
    choice = asked or LoadChoice.default(flight.model)
    requests, scripted = _requests(flight, options), _events(flight, arguments.events)
    weights = flight.model.weight_dtype(flight.effective.model.dtype)
    prepared = prepare(flight.effective, flight.model, flight.placements, _workload(requests), choice)
    begun = time.monotonic()
    with Progress("requests", len(requests)) as progress:
        done = run_simulation(
            flight.effective, flight.model, prepared, requests, scripted=scripted, on_request=progress.advance
        )
    say(f"simulated {done.end:.1f} s in {time.monotonic() - begun:.1f} s")
    simulation = Simulation(
        balance=str(choice),
        weights=weights,
        events=None if arguments.events is None else str(arguments.events),
        virtual_seconds=done.end,
    )
    notes = assumptions(choice, flight.model, weights)
    notes += script_notes(flight.effective, prepared, scripted)
    return _report(flight, options, done, simulation, notes)


def _report(
    flight: Preflight, options: Options, done: Run, simulation: Simulation, notes: tuple[str, ...]
) -> Report:
    cluster = flight.effective.cluster
    machine = Machine(
        hardware=cluster.hardware, device=cluster.device, cpu_model=None, cores=None, memory_bytes=None
    )
    facts = run_facts(flight, options, machine, kernels={}, notes=notes, simulation=simulation)
    return report_on(facts, done.evidence)


def _requests(flight: Preflight, options: Options) -> list[VirtualRequest]:
    """The trace in order of arrival. InputError with file, line and field for what does not fit."""
    found = read_trace(
        Path(options.trace),
        limit=options.limit,
        speed=options.speed,
        scale_lengths=options.scale_lengths,
    )
    lengths = trace_lengths(found, encode=_encoder(flight, found), max_tokens=sequence_room(flight))
    require_prefill_room(flight, zip((r.where for r in found), lengths, strict=True))
    return [
        VirtualRequest(
            index=r.index,
            at=r.arrival,
            input_length=length,
            output_length=r.output_length,
            hash_ids=r.hash_ids,
            block_tokens=r.block_tokens,
        )
        for r, length in zip(found, lengths, strict=True)
    ]


def _encoder(flight: Preflight, requests: Sequence[TraceRequest]) -> Encode:
    """For the texts of a trace, if it has any."""
    path = flight.effective.model.path
    text = next((r for r in requests if r.prompt), None)
    if text is not None and catalog_name(path) is not None:
        raise InputError(f"{text.where}: prompt: {path} has no tokenizer; give input_length instead")
    return lambda prompt: Tokenizer(Path(path)).encode(prompt)


def _events(flight: Preflight, path: Path | None) -> list[Scripted]:
    ranks = {one.name: len(one.ranks) for one in flight.effective.instances}
    return [] if path is None else read_events(path, ranks)


def _workload(requests: Sequence[VirtualRequest]) -> Workload:
    return Workload(
        prompt=sum(r.input_length for r in requests) / len(requests),
        output=sum(r.output_length for r in requests) / len(requests),
    )
