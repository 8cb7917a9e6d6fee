"""`moe-runtime report`: one saved report, or several side by side."""

import argparse
import sys

from moe_runtime.launch.console import show
from moe_runtime.report.compare import render_many
from moe_runtime.report.files import load_report
from moe_runtime.report.show import render, use_color


def run(arguments: argparse.Namespace, argv: list[str]) -> int:
    reports = [(str(path), load_report(path)) for path in arguments.runs]
    color = use_color(sys.stdout)
    show(render(reports[0][1], color=color) if len(reports) == 1 else render_many(reports, color=color))
    return 0
