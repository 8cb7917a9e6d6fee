"""`moe-runtime eplb`: a placement for measured expert loads, with what it gains and what moves."""

import argparse
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_runtime.eplb.errors import BalanceError
from moe_runtime.eplb.load_files import read_load
from moe_runtime.eplb.report import PlotUnavailable, layer_table, plot_format, plot_rank_loads, summary
from moe_runtime.eplb.solve import solve
from moe_runtime.errors import InputError, UnavailableError
from moe_runtime.files import require_outputs, write_atomically
from moe_runtime.launch.console import say, show
from moe_runtime.placement.errors import PlacementError, TopologyError
from moe_runtime.placement.files import read_placement, to_json
from moe_runtime.placement.placement import Placement, linear
from moe_runtime.placement.topology import Topology


def run(arguments: argparse.Namespace, argv: list[str]) -> int:
    # A placement may replace the one it goes on from.
    require_outputs({"--out": arguments.out, "--plot": arguments.plot}, {"--load": arguments.load})
    try:
        return _run(arguments)
    except PlotUnavailable as error:
        raise UnavailableError("matplotlib", "--plot", "report") from error
    except (BalanceError, PlacementError, TopologyError) as error:
        raise InputError(str(error)) from error


def _run(arguments: argparse.Namespace) -> int:
    topology = Topology.parse(arguments.topology)
    plot = None if arguments.plot is None else plot_format(arguments.plot)
    load_LE = read_load(arguments.load)
    current = None
    if arguments.current is not None:
        current = read_placement(
            arguments.current, num_experts=load_LE.shape[1], num_ranks=topology.num_ranks
        )
    solution = solve(
        load_LE,
        topology,
        arguments.slots,
        groups=arguments.groups,
        current=current,
        horizon=arguments.horizon,
        expert_bytes=arguments.expert_bytes,
        quality=arguments.quality,
        split=arguments.split,
    )
    before = current if current is not None else _linear(load_LE, topology, arguments.slots)
    before_L = None if before is None else before.rank_load(load_LE).max(axis=1)
    if plot is not None:
        write_atomically(arguments.plot, plot_rank_loads(plot, load_LE, before, solution.placement))
    write_atomically(arguments.out, to_json(solution.placement).encode())
    show(layer_table(solution, before_L))
    show("")
    show(summary(solution, before_L))
    if current is None and before is not None:
        show("before: experts in order over the ranks")
    _say_files(arguments.out, arguments.plot)
    return 0


def _linear(load_LE: NDArray[np.float64], topology: Topology, slots: int) -> Placement | None:
    """What there is without a balancer; None where experts in order would meet themselves on a rank."""
    L, E = load_LE.shape
    try:
        return linear(num_layers=L, num_experts=E, num_ranks=topology.num_ranks, redundant_experts=slots - E)
    except PlacementError:
        return None


def _say_files(out: Path, plot: Path | None) -> None:
    say(f"wrote {out}")
    if plot is not None:
        say(f"wrote {plot}")
