"""The placement a deployment starts with: files that fit, and files that do not."""

import json
from pathlib import Path

import numpy as np
import pytest

from moe_runtime.errors import PlanError
from moe_runtime.launch.initial import initial_placement
from moe_runtime.placement.files import to_json
from moe_runtime.placement.placement import Placement, linear
from moe_runtime.plan.effective import EffectiveDeployment
from tests.plan.plans import SPLIT, effective
from tests.spec.model_specs import SMALL_DEEPSEEK

MODEL = SMALL_DEEPSEEK
LAYERS, EXPERTS = MODEL.num_moe_layers, MODEL.moe.num_experts


def deployment(folder: Path, *overrides: str) -> EffectiveDeployment:
    return effective(folder, SPLIT, *overrides).deployment("decode")


def start(folder: Path, file: str, *overrides: str) -> Placement:
    """What decode starts with; its file is named relative to the plan's folder."""
    found = deployment(folder, f"deployments.decode.balancing.initial={file}", *overrides)
    return initial_placement(found.served(MODEL), found)


def skewed() -> np.ndarray:
    load = np.ones((LAYERS, EXPERTS))
    load[:, 3] = 40.0
    return load


def test_linear_is_the_default(tmp_path):
    found = deployment(tmp_path)
    expected = linear(num_layers=LAYERS, num_experts=EXPERTS, num_ranks=4, redundant_experts=8)
    assert initial_placement(MODEL, found).digest == expected.digest


def test_a_placement_file_is_taken_as_it_is(tmp_path):
    table = linear(num_layers=LAYERS, num_experts=EXPERTS, num_ranks=4, redundant_experts=8).slot_to_expert_LS
    given = Placement(slot_to_expert_LS=table[:, ::-1], num_experts=EXPERTS, num_ranks=4)
    (tmp_path / "p.json").write_text(to_json(given))
    assert start(tmp_path, "p.json").digest == given.digest


def test_recorded_loads_are_solved(tmp_path):
    np.savez(tmp_path / "f.npz", load=skewed(), layers=np.array(MODEL.moe_layers))
    placement = start(tmp_path, "f.npz")
    assert (placement.replica_counts[:, 3] == 4).all()
    load = placement.rank_load(skewed())
    assert (load.mean(axis=1) / load.max(axis=1)).min() > 0.95


def test_an_answered_dump_is_taken_like_a_file_of_loads(tmp_path):
    np.savez(tmp_path / "f.npz", load=skewed(), layers=np.array(MODEL.moe_layers))
    dump = {"deployment": "decode", "layers": list(MODEL.moe_layers), "load": skewed().tolist()}
    (tmp_path / "f.json").write_text(json.dumps(dump))
    assert start(tmp_path, "f.json").digest == start(tmp_path, "f.npz").digest
    (tmp_path / "f.json").write_text(json.dumps({**dump, "layers": [0] * LAYERS}))
    with pytest.raises(PlanError, match="loads of layers"):
        start(tmp_path, "f.json")


def test_shared_experts_in_slots_get_every_token(tmp_path):
    """The file has the routed experts' loads; shared experts, which it leaves out, take as many slots."""
    np.savez(tmp_path / "f.npz", load=skewed())
    placement = start(tmp_path, "f.npz", "deployments.decode.shared_experts=slots")
    assert placement.num_experts > EXPERTS
    assert (placement.replica_counts[:, EXPERTS:] > 1).all()


@pytest.mark.parametrize(
    ("name", "array", "layers", "words"),
    [
        ("f.npz", np.ones((LAYERS, EXPERTS + 1)), None, "the model has"),
        ("f.npz", np.ones((LAYERS, EXPERTS)), [0] * LAYERS, "loads of layers"),
        ("f.npz", np.full((LAYERS, EXPERTS), np.nan), None, "f.npz"),
        ("missing.npz", None, None, "cannot be read"),
        ("missing.json", None, None, "cannot be read"),
    ],
)
def test_files_that_do_not_fit(tmp_path, name, array, layers, words):
    if array is not None:
        numbers = np.array(MODEL.moe_layers if layers is None else layers)
        np.savez(tmp_path / name, load=array, layers=numbers)
    with pytest.raises(PlanError, match=words) as caught:
        start(tmp_path, name)
    assert caught.value.key == "deployments.decode.balancing.initial"


def test_a_placement_of_another_size_is_refused(tmp_path):
    other = linear(num_layers=LAYERS, num_experts=EXPERTS, num_ranks=4)
    (tmp_path / "p.json").write_text(to_json(other))
    with pytest.raises(PlanError, match="layers and slots"):
        start(tmp_path, "p.json")
