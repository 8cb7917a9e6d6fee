"""`moe-runtime check`: validates a plan, prints what would run and the memory of every rank."""

import argparse
import json

from moe_runtime.launch.console import show
from moe_runtime.launch.preflight import preflight
from moe_runtime.plan.show import check_json, render_check


def run(arguments: argparse.Namespace, argv: list[str]) -> int:
    flight = preflight(arguments.plan, arguments.overrides, check_tensors=True, to_run=False)
    checked = (flight.effective, flight.loaded, flight.model, flight.budgets, flight.obstacles)
    if arguments.json:
        show(json.dumps(check_json(*checked), indent=2))
    else:
        show(render_check(*checked))
    return 0
