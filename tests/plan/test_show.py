"""The text and the JSON of `check`."""

import json
from pathlib import Path

from moe_runtime.plan.show import check_json, render_check
from tests.plan.plans import GIB, SPLIT, UNIFIED, checked
from tests.spec.model_specs import SMALL_DEEPSEEK


def render(folder: Path, text: str, *sets: str) -> str:
    loaded, plan, budgets = checked(folder, text, *sets, host_memory_bytes=64 * GIB)
    return render_check(plan, loaded, SMALL_DEEPSEEK, budgets)


def row(text: str, start: str) -> list[str]:
    """Words after `start` of the only line that starts with it."""
    (line,) = [line for line in text.splitlines() if line.strip().startswith(start)]
    return line.strip()[len(start) :].split()


def test_values_stand_beside_their_origins(tmp_path: Path):
    text = render(tmp_path, SPLIT, "server.port=9000", "cluster.ranks_per_node=auto")
    assert row(text, "port") == ["9000", "command", "line"]
    assert row(text, "host") == ["127.0.0.1", "default"]
    assert row(text, "nodes  ") == ["1", "file", "line", "2"]
    assert (
        " ".join(row(text, "ranks_per_node")) == "6 derived: all ranks / cluster.nodes (auto: command line)"
    )
    section = text.split("deployments.decode\n")[1].split("server\n")[0]
    assert row(section, "redundant_experts") == ["8", "file", "line", "8"]
    assert " ".join(row(section, "dispatch.max_tokens")) == "512 derived: max_batch_tokens (auto: default)"
    assert row(section, "balancing.enabled") == ["false", "default"]
    assert row(text, "tpot_ms") == ["100", "default"]


def test_every_value_is_shown_once_and_none_is_auto(tmp_path: Path):
    loaded, plan, budgets = checked(tmp_path, SPLIT)
    shown: dict[str, str] = {}
    heading = ""
    for line in render_check(plan, loaded, SMALL_DEEPSEEK, budgets).split("\n\n")[1].splitlines():
        if not line.startswith(" "):
            heading = line
        elif not line.startswith("   "):
            key, value, *_ = line.split()
            assert f"{heading}.{key}" not in shown
            shown[f"{heading}.{key}"] = value
    assert list(shown) == list(loaded.origins)
    assert "auto" not in shown.values()


def test_ranks_and_nodes(tmp_path: Path):
    text = render(tmp_path, SPLIT, "cluster.nodes=2", "cluster.ranks_per_node=3")
    assert "6 = nodes 2 x ranks_per_node 3" in text
    assert " ".join(row(text, "prefill-0")) == "ranks 0-1 EP degree 2 node 0"
    assert " ".join(row(text, "decode-0")) == "ranks 2-5 EP degree 4 nodes 0-1"
    assert "nodes of decode: 4 ranks / 3 = 1.33333" in text
    assert "grouping them into 2 nodes sets the report's denominators" in " ".join(text.split())
    assert "grouping" not in render(tmp_path, SPLIT)


def test_memory_table_adds_up(tmp_path: Path):
    loaded, plan, budgets = checked(tmp_path, SPLIT)
    text = render_check(plan, loaded, SMALL_DEEPSEEK, budgets)

    def figures(name: str) -> list[float]:
        return [float(word.replace(",", "")) for word in row(text, name)]

    names = [name for name, _ in budgets[0].terms]
    assert names[:4] == ["shared weights", "experts", "redundant experts", "dispatch buffers"]
    assert names[4:] == ["KV cache", "staging", "workspace"]
    table = text[text.index("bytes per rank") :]
    for column, budget in enumerate(budgets):
        shown = [float(row(table, name)[column].replace(",", "")) for name in (f"{n} " for n in names)]
        assert abs(sum(shown) - budget.total / 2**20) < 0.05
    assert figures("total") == [round(b.total / 2**20, 2) for b in budgets]
    assert figures("all ranks together") == [round((2 * budgets[0].total + 4 * budgets[1].total) / 2**20, 2)]


def test_surplus_slots_are_named_with_the_redundancy_that_uses_them(tmp_path: Path):
    text = " ".join(render(tmp_path, UNIFIED, "deployments.unified.expert_parallel=3").split())
    assert (
        "32 experts + 0 redundant in 33 slots, 11 per rank; surplus slots: 1, used with redundant_experts: 1"
        in text
    )
    even = render(tmp_path, UNIFIED, "deployments.unified.expert_parallel=4")
    assert "surplus slots" not in even


def test_untested_sizes_are_warned_of(tmp_path: Path):
    assert "warning: deployments.unified: backend shm, untested" in render(
        tmp_path, UNIFIED, "deployments.unified.expert_parallel=16"
    )


def test_it_fits_a_terminal_of_100_columns(tmp_path: Path):
    text = render(
        tmp_path,
        SPLIT,
        "cluster.nodes=2",
        "cluster.ranks_per_node=auto",
        "deployments.decode.redundant_experts=9",
    )
    long = [line for line in text.splitlines() if len(line) > 100 and str(tmp_path) not in line]
    assert long == []


def test_json_has_what_the_text_has(tmp_path: Path):
    loaded, plan, budgets = checked(tmp_path, SPLIT, "server.port=9000")
    data = json.loads(json.dumps(check_json(plan, loaded, SMALL_DEEPSEEK, budgets)))
    assert data["digest"] == plan.digest
    assert data["overrides"] == ["server.port=9000"]
    assert data["origins"]["server.port"] == "command line"
    assert data["origins"]["deployments.decode.dispatch.backend"] == (
        "derived: several ranks of one host (auto: default)"
    )
    assert set(data["origins"]) == set(loaded.origins)
    assert data["memory_per_rank"]["decode"]["total"] == budgets[1].total
    assert data["memory_per_rank"]["decode"]["kv_cache"] == budgets[1].kv_cache
    assert data["plan"]["deployments"]["decode"]["redundant_experts"] == 8
    assert any("staging" in note for note in data["notes"])
    assert data["warnings"] == []
