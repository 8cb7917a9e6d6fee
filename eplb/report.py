"""A solution in words: a table of its layers, a summary, and a picture.

Formatting only; files are the caller's.
"""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_runtime.eplb.errors import BalanceError
from moe_runtime.eplb.solution import Solution
from moe_runtime.placement.placement import Placement

REASON_WORDS = {
    "mean": "mean load: a rank cannot carry less",
    "replicas": "slots: too few for more replicas of the hottest experts",
    "crowding": "slots: what must sit beside the hottest experts",
}
PLOT_FORMATS = ("png", "svg", "pdf")
HEAD = ("layer", "before", "after", "bound", "gap %", "limit", "moved", "MiB")


class PlotUnavailable(BalanceError):
    """matplotlib is missing; the message has the line that installs it."""


def layer_table(solution: Solution, before_L: NDArray[np.float64] | None) -> str:
    """A line per layer: peak / mean before and after, proven bound, gap, its reason, slots and bytes moved.

    before_L  peak of what is compared with, or None where there is nothing to compare with
    """
    mean = np.where(solution.mean_L > 0, solution.mean_L, 1)
    loaded = solution.mean_L > 0
    moves = solution.moves
    rows = []
    for layer in range(solution.placement.num_layers):
        ratio = [
            "-" if peak is None or not loaded[layer] else f"{peak[layer] / mean[layer]:.4f}"
            for peak in (before_L, solution.peak_L, solution.bound_L)
        ]
        moved = 0 if moves is None else int(moves.moves_L[layer])
        size = "-" if moves is None else f"{moved * moves.expert_bytes / 2**20:.1f}"
        gap = f"{100 * solution.gap_L[layer]:.2f}"
        rows.append(
            (str(layer), *ratio, gap, solution.reason_L[layer], "-" if moves is None else str(moved), size)
        )
    return _columns([HEAD, *rows])


def summary(solution: Solution, before_L: NDArray[np.float64] | None) -> str:
    """What one wants to know at the end."""
    p = solution.placement
    topology = f" on {p.topology}" if p.topology is not None else ""
    lines = [
        f"{p.num_layers} layers, {p.num_experts} experts,"
        f" {p.num_slots} slots of {p.num_ranks} ranks{topology}",
        f"balancedness (mean / peak rank load, mean over layers): {_balance(solution, before_L)}",
        f"with equal split of replicas: {solution.balancedness_equal_L.mean():.4f}",
        f"gap to the proven bound: mean {100 * solution.gap_L.mean():.2f} %, worst"
        f" {100 * solution.gap_L.max():.2f} %, under 1 % in {(solution.gap_L < 0.01).sum()}"
        f" of {p.num_layers} layers",
    ]
    for reason, words in REASON_WORDS.items():
        count = solution.reason_L.count(reason)
        if count:
            lines.append(f"bound by {words}: {count} layers")
    if solution.node_by_node_L.any():
        lines.append(f"whole expert groups on nodes: {int(solution.node_by_node_L.sum())} layers")
    if solution.moves is not None:
        by_link = ", ".join(
            f"{size / 2**20:.1f} MiB {name.replace('_', ' ')}"
            for name, size in solution.moves.bytes_by_link.items()
        )
        lines.append(
            f"moves: {len(solution.moves)} of {p.num_layers * p.num_slots} slots, {by_link};"
            f" {solution.move_seconds:.3g} s one after the other"
        )
        if not np.isnan(solution.saved_seconds):
            lines.append(f"saved over the horizon: {solution.saved_seconds:.3g} s")
    return "\n".join(lines)


def _balance(solution: Solution, before_L: NDArray[np.float64] | None) -> str:
    after = f"{solution.balancedness_L.mean():.4f} (worst layer {solution.balancedness_L.min():.4f})"
    if before_L is None:
        return after
    before = np.where(before_L > 0, solution.mean_L / np.where(before_L > 0, before_L, 1), 1.0)
    return f"{before.mean():.4f} before, {after} after"


def _columns(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def plot_format(path: Path) -> str:
    """The format that a picture's name asks for. BalanceError for one that is not known."""
    ending = path.suffix.lower().removeprefix(".")
    if ending not in PLOT_FORMATS:
        raise BalanceError(f"{path}: the ending of a picture must be one of .{', .'.join(PLOT_FORMATS)}")
    return ending


def plot_rank_loads(
    kind: str, load_LE: NDArray[np.float64], before: Placement | None, after: Placement
) -> bytes:
    """A picture: load of every rank over the layer's mean, layers down, ranks across, before and after.

    `kind` is one of `PLOT_FORMATS`. Raises PlotUnavailable without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotUnavailable("a plot needs matplotlib: pip install 'moe-runtime[report]'") from error
    shown = [(name, p) for name, p in (("before", before), ("after", after)) if p is not None]
    maps = [(name, _over_mean(p, load_LE)) for name, p in shown]
    top = max(float(m.max()) for _, m in maps)
    figure = Figure(figsize=(6.5 * len(maps) + 1.5, 5.5), layout="constrained")
    axes = figure.subplots(1, len(maps), squeeze=False)[0]
    image: Any = None
    for ax, (name, values) in zip(axes, maps, strict=True):
        image = ax.imshow(values, aspect="auto", vmin=0, vmax=top, cmap="viridis", interpolation="nearest")
        balance = float((1 / values.max(axis=1)).mean())
        ax.set_title(f"{name}: balancedness {balance:.3f}")
        ax.set_xlabel("rank")
        ax.set_ylabel("MoE layer")
    figure.colorbar(image, ax=list(axes), label="rank load / mean of the layer")
    out = BytesIO()
    figure.savefig(out, format=kind, dpi=120)
    return out.getvalue()


def _over_mean(placement: Placement, load_LE: NDArray[np.float64]) -> NDArray[np.float64]:
    load_LR = placement.rank_load(load_LE)
    mean = load_LR.mean(axis=1, keepdims=True)
    out: NDArray[np.float64] = np.where(mean > 0, load_LR / np.where(mean > 0, mean, 1), 1.0)
    return out
