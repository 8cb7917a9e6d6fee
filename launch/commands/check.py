"""`moe-runtime check`: validates a plan, prints what would run and the memory of every rank."""

import argparse
import json

from moe_runtime.launch.console import show
from moe_runtime.launch.preflight import preflight
from moe_runtime.plan.show import check_json, render_check


def run(arguments: argparse.Namespace, argv: list[str]) -> int:
    flight = preflight(arguments.plan, arguments.overrides, check_tensors=True)
    if arguments.json:
        show(json.dumps(check_json(flight.effective, flight.loaded, flight.model, flight.budgets), indent=2))
    else:
        show(render_check(flight.effective, flight.loaded, flight.model, flight.budgets))
    return 0
