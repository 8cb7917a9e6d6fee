"""Expert loads to draw routing from: recorded ones, and synthetic skews. Pure; L layers, E experts.

Owns where loads come from and which placement a deployment would have under them.
"""

from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moe_runtime.eplb.load_files import read_load
from moe_runtime.eplb.solve import solve
from moe_runtime.placement.placement import Placement, linear
from moe_runtime.placement.topology import Topology
from moe_runtime.spec.model import ModelSpec

FOLDER = Path(__file__).resolve().parent.parent / "loads"


def is_recorded(model: ModelSpec) -> bool:
    """The model's own loads were published: DeepSeek-V3 and what has its layers and experts."""
    return (model.family, model.num_moe_layers, model.moe.num_experts) == ("deepseek_v3", 58, 256)


def recorded(name: Literal["deepseek-v3-prefill", "deepseek-v3-decode"]) -> NDArray[np.float64]:
    """float64 [58 or 29, 256]: loads that were published, as fractions of a layer's."""
    load_LE = read_load(FOLDER / f"{name}.json")
    fraction_LE: NDArray[np.float64] = load_LE / load_LE.sum(axis=1, keepdims=True)
    return fraction_LE


def deepseek_v3(role: Literal["prefill", "decode"]) -> NDArray[np.float64]:
    """float64 [58, 256]: all MoE layers of DeepSeek-V3.

    Decode was published for the first 29 layers only, and the later ones are much more skewed: they are
    taken from prefill (in the layers that both have, the two correlate by .82).
    """
    prefill_LE = recorded("deepseek-v3-prefill")
    if role == "prefill":
        return prefill_LE
    decode_LE = recorded("deepseek-v3-decode")
    return np.concatenate([decode_LE, prefill_LE[len(decode_LE) :]])


def power_law(layers: int, experts: int, exponent: float, seed: int = 0) -> NDArray[np.float64]:
    """[L, E]: the i-th hottest expert has load ~ i^-exponent; which one differs by layer. 0: uniform."""
    ranked = np.arange(1, experts + 1, dtype=np.float64) ** -exponent
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(ranked / ranked.sum()) for _ in range(layers)])


def with_balancedness(
    layers: int, experts: int, ranks: int, target: float, seed: int = 0
) -> NDArray[np.float64]:
    """[L, E]: a power law whose contiguous placement on `ranks` ranks has this mean balancedness.

    The exponent is found by bisection; targets below what exponent 4 gives are answered by that.
    """
    placement = linear(num_layers=layers, num_experts=experts, num_ranks=ranks)
    low, high = 0.0, 4.0
    for _ in range(40):
        middle = (low + high) / 2
        load_LR = placement.rank_load(power_law(layers, experts, middle, seed))
        balancedness = float((load_LR.mean(axis=1) / load_LR.max(axis=1)).mean())
        low, high = (middle, high) if balancedness > target else (low, middle)
    return power_law(layers, experts, (low + high) / 2, seed)


def place(
    load_LE: NDArray[np.float64],
    *,
    ranks: int,
    ranks_per_node: int,
    redundant_experts: int,
    balanced: bool,
    groups: int = 1,
) -> Placement:
    """The placement of a deployment: the balancer's on these loads, or experts in order, rank by rank."""
    layers, experts = load_LE.shape
    if not balanced:
        return linear(
            num_layers=layers, num_experts=experts, num_ranks=ranks, redundant_experts=redundant_experts
        )
    nodes = max(1, ranks // ranks_per_node)
    topology = Topology(nodes=nodes, ranks_per_node=ranks // nodes)
    return solve(load_LE, topology, experts + redundant_experts, groups=groups).placement
