"""`plan` from the command line to files: all it writes passes `check`, and what it cannot do it says."""

import argparse
import json
from pathlib import Path

import pytest

from moe_runtime.checkpoint.make import make_checkpoint
from moe_runtime.launch import cli
from moe_runtime.launch.preflight import preflight
from moe_runtime.spec.catalog import CATALOG, DEEPSEEK_V3
from moe_runtime.virtual.cost.from_plan import plan_setting
from moe_runtime.virtual.search.what_if import CHANGES

SMALL = ["--model", "deepseek-v3", "--hardware", "h200-sxm", "--nodes", "2"]
ASKED = ["--workload", "input=1200,output=500", "--slo", "ttft=2s,tpot=50ms"]


def run(*arguments: str) -> int:
    return cli.run(["plan", *arguments])


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("plans")
    with pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr("moe_runtime.launch.commands.plan.show", said.append)
        question = ["--what-if", "tpot=1ms", "--price-per-node-hour", "20"]
        assert run(*SMALL, *ASKED, *question, "--out", str(folder)) == 0
    return folder, "\n".join(said)


def test_written_plans_pass_check_and_leave_memory_free(written: tuple[Path, str]):
    folder, _ = written
    plans = sorted(folder.glob("*.yaml"))
    assert [p.name for p in plans][0] == "best.yaml"
    assert len(plans) > 1
    for path in plans:
        flight = preflight(path, (), check_tensors=True, to_run=False)
        assert flight.model == DEEPSEEK_V3
        for budget in flight.budgets:
            assert budget.total <= 141e9 * 0.94
        for d in flight.effective.deployments:
            assert d.surplus_slots == 0
            assert plan_setting(flight.effective.cluster, d, weights="float8_e4m3").ranks == d.expert_parallel
            loads = Path(d.balancing.initial)
            assert loads.parent == folder
            assert len(json.loads(loads.read_text())["load"]) == 58


def test_the_report_answers_what_was_asked(written: tuple[Path, str]):
    folder, text = written
    for words in (
        "model     catalog:deepseek-v3: 671 G parameters, weights float8_e4m3",
        "cluster   2 nodes of 8 h200-sxm",
        "$ per million output tokens",
        "no larger batch:",
        "runners-up",
        "the best within both objectives by how decode is cut",
        "what if tpot=1ms",
        "no plan meets --slo ttft=2s, tpot=1ms",
        "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500",
        f"-m moe_runtime serve {folder}/best.yaml",
        "mpirun -n 16 --map-by ppr:8:node python -m moe_runtime serve",
        "not with this version on this machine: names a model of the catalog",
    ):
        assert words in text, words
    heading = (folder / "best.yaml").read_text().splitlines()[0]
    assert heading.startswith("# moe-runtime plan --model deepseek-v3 --hardware h200-sxm")


def test_a_checkpoint_and_a_trace_will_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A small model on a GPU: one rank is best. The second request finds a block of the first's."""
    make_checkpoint(tmp_path / "model", family="qwen3_moe", size="tiny", dtype="bfloat16")
    lines = [
        {"timestamp": 0, "input_length": 60, "output_length": 40, "hash_ids": [1]},
        {"timestamp": 9, "input_length": 60, "output_length": 20, "hash_ids": [1]},
    ]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = ["--model", str(tmp_path / "model"), "--hardware", "h100-sxm", "--nodes", "1"]
    out = tmp_path / "out"
    trace = ["--workload", str(tmp_path / "t.jsonl"), "--slo", "ttft=2s,tpot=50ms"]
    assert run(*asked, *trace, "--out", str(out)) == 0
    text = capsys.readouterr().out
    assert "60 tokens in, 30 out, 49% of the input cached; a decoding sequence has 77 on average" in text
    assert "wide EP meets the objectives nowhere" in text
    flight = preflight(out / "best.yaml", (), check_tensors=True, to_run=False)
    assert flight.effective.model.path == str(tmp_path / "model")
    assert "--dump-expert-load" in (out / "best.yaml").read_text()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--model", "deepsek", *SMALL[2:], *ASKED], "--model 'deepsek': neither a checkpoint's folder nor"),
        ([*SMALL[:3], "abacus", *SMALL[4:], *ASKED], "machine 'abacus'"),
        (["--model", "", *SMALL[2:], *ASKED], "--model '': neither a checkpoint's folder nor"),
        ([*SMALL, "--workload", "", *ASKED[2:]], "--workload: '' is not one of input"),
        ([*SMALL, "--workload", "nowhere.jsonl", *ASKED[2:]], "nowhere.jsonl"),
        ([*SMALL, *ASKED[:2], "--slo", "ttft=2s"], "tpot= is missing"),
        ([*SMALL, *ASKED, "--what-if", "colour=blue"], "--what-if 'colour=blue'"),
    ],
)
def test_mistakes_exit_with_2_and_are_named(
    arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]
):
    assert run(*arguments) == 2
    assert word in capsys.readouterr().err


def test_an_unusable_folder_is_named_before_the_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("moe_runtime.launch.commands.plan.search", pytest.fail)
    assert run(*SMALL, *ASKED, "--out", str(tmp_path / "file")) == 2
    assert "is a file, not a folder" in capsys.readouterr().err


def test_an_interrupt_ends_it_with_a_word(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("moe_runtime.launch.commands.plan.search", interrupted)
    assert run(*SMALL, *ASKED) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_the_documentation_names_every_option_and_question():
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
    (commands,) = (a for a in cli.parser()._actions if isinstance(a, argparse._SubParsersAction))
    options = [
        o for a in commands.choices["plan"]._actions for o in a.option_strings if o not in ("-h", "--help")
    ]
    missing = [
        word for word in (*options, *CHANGES, *CATALOG) if f"`{word.removesuffix('-fp8')}`" not in page
    ]
    assert missing == []
