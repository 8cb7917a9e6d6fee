"""Every plan the repository shows is a plan that works: configs and the YAML blocks of the documentation."""

import re
from pathlib import Path

import pytest

from moe_runtime.launch.preflight import preflight
from moe_runtime.plan.validate import plan_warnings
from tests.plan.plans import GIB, checked

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```ya?ml\n(.*?)^```", re.MULTILINE | re.DOTALL)


def shown_plans() -> dict[str, str]:
    """Text of every plan by the place it stands in; folders of `configs` hold data of other kinds."""
    plans = {str(p.relative_to(ROOT)): p.read_text() for p in sorted((ROOT / "configs").glob("*.yaml"))}
    for page in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))):
        for i, match in enumerate(BLOCK.finditer(page.read_text())):
            plans[f"{page.relative_to(ROOT)}, block {i + 1}"] = match[1]
    return plans


PLANS = shown_plans()


def test_the_configs_are_among_them():
    names = ("demo", "unified", "deepseek-v3-h800-ep144", "kimi-k2-h200", "qwen3-235b-h100", "glm-4.5-h200")
    assert {f"configs/{name}.yaml" for name in names} <= set(PLANS)


@pytest.mark.parametrize("text", PLANS.values(), ids=PLANS)
def test_it_works(tmp_path: Path, text: str):
    _, plan, budgets = checked(tmp_path, text, host_memory_bytes=16 * GIB)
    assert len(budgets) == len(plan.deployments)


def test_the_demo_is_what_the_readme_promises(tmp_path: Path):
    _, plan, _ = checked(tmp_path, PLANS["configs/demo.yaml"])
    prefill, decode = plan.deployments
    assert (prefill.name, prefill.expert_parallel) == ("prefill", 2)
    assert (decode.name, decode.expert_parallel, decode.redundant_experts) == ("decode", 4, 8)
    assert plan.num_ranks == 6
    assert plan.model.path == str(tmp_path.parent / "checkpoints" / "small-deepseek-v3")


def test_the_widest_has_a_placement_and_warns():
    flight = preflight(ROOT / "configs/deepseek-v3-h800-ep320.yaml", (), check_tensors=True, to_run=False)
    decode = flight.placements["decode"]
    assert (decode.num_ranks, decode.slots_per_rank) == (320, 1)
    (warning,) = plan_warnings(flight.effective, flight.model)
    assert "ranks = 320 must be at most 256" in warning
