"""The placement a deployment starts with: linear, from a file, or solved for recorded loads."""

import json
import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_runtime.eplb.errors import BalanceError
from moe_runtime.eplb.load_files import read_load
from moe_runtime.eplb.solve import solve
from moe_runtime.errors import PlanError
from moe_runtime.placement.errors import PlacementError
from moe_runtime.placement.files import read_placement
from moe_runtime.placement.placement import Placement, linear
from moe_runtime.placement.topology import Topology
from moe_runtime.plan.effective import EffectiveDeployment
from moe_runtime.spec.model import ModelSpec

TABLES = (".npz", ".npy", ".csv")
LAYERS_KEY = "layers"


def initial_placement(model: ModelSpec, deployment: EffectiveDeployment) -> Placement:
    """`model` as the deployment serves it. Raises PlanError naming `balancing.initial`."""
    source, moe = deployment.balancing.initial, model.moe
    if source == "linear":
        return linear(
            num_layers=model.num_moe_layers,
            num_experts=moe.slot_experts,
            num_ranks=deployment.expert_parallel,
            redundant_experts=deployment.redundant_experts,
        )
    path = Path(source)
    try:
        if path.suffix.lower() in TABLES or _holds_loads(path):
            return _solved(path, model, deployment)
        placement = read_placement(
            path, num_experts=moe.slot_experts, num_ranks=deployment.expert_parallel, layers=model.moe_layers
        )
    except (PlacementError, BalanceError) as error:
        raise _problem(deployment, str(error)) from error
    shape = (model.num_moe_layers, deployment.num_slots)
    if placement.slot_to_expert_LS.shape != shape:
        found = placement.slot_to_expert_LS.shape
        raise _problem(deployment, f"{path}: has {found} layers and slots, the deployment {shape}")
    return placement


def _holds_loads(path: Path) -> bool:
    try:
        read_load(path)
    except BalanceError:
        return False
    return True


def _solved(path: Path, model: ModelSpec, deployment: EffectiveDeployment) -> Placement:
    """Solved from nothing for the loads of a file; shared experts in slots get every token."""
    load_LE, moe = read_load(path), model.moe
    layers = _layers(path)
    if layers is not None and layers.tolist() != list(model.moe_layers):
        raise _problem(deployment, f"{path}: loads of layers {layers.tolist()}, not {list(model.moe_layers)}")
    shared = moe.slot_experts - moe.num_experts
    if shared and load_LE.shape[1] == moe.num_experts:
        tokens_L1 = load_LE.sum(axis=1, keepdims=True) / moe.router.top_k
        load_LE = np.concatenate([load_LE, np.repeat(tokens_L1, shared, axis=1)], axis=1)
    shape = (model.num_moe_layers, moe.slot_experts)
    if load_LE.shape != shape:
        raise _problem(deployment, f"{path}: {load_LE.shape} layers and experts, the model has {shape}")
    topology = Topology(nodes=1, ranks_per_node=deployment.expert_parallel)
    return solve(load_LE, topology, moe.slot_experts + deployment.redundant_experts).placement


def _layers(path: Path) -> NDArray[np.int64] | None:
    """The numbers of the layers, where the file has them."""
    if path.suffix.lower() == ".json":
        data = json.loads(path.read_bytes())
        found = data.get(LAYERS_KEY) if isinstance(data, dict) else None
        return None if found is None else np.asarray(found)
    if path.suffix.lower() != ".npz" or not zipfile.is_zipfile(path):
        return None
    with np.load(path, allow_pickle=False) as data:
        return np.asarray(data[LAYERS_KEY], np.int64) if LAYERS_KEY in data.files else None


def _problem(deployment: EffectiveDeployment, text: str) -> PlanError:
    return PlanError(
        f"deployments.{deployment.name}.balancing.initial", text, value=deployment.balancing.initial
    )
