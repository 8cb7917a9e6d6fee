"""Every bad plan and checkpoint at the command line: exit code 2, one message, no file, no process."""

import json
import os

import pytest

from moe_runtime.checkpoint import shapes
from moe_runtime.checkpoint.make import make_checkpoint
from moe_runtime.launch import cli, local
from tests.checkpoint.test_bad_checkpoints import CASES as BAD_CHECKPOINTS
from tests.checkpoint.test_bad_checkpoints import edit_tensors, set_value
from tests.end_to_end.commands import left_running, moe, write_plan
from tests.plan.test_bad_plans import ALL as BAD_PLANS
from tests.spec.model_specs import SMALL_DEEPSEEK

TRACE = '{"timestamp": 0, "input_length": 8, "output_length": 4}\n'
PROMPTS = '{"prompt_token_ids": [9, 10, 11], "max_tokens": 4}\n'


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch):
    """None of these may come as far as starting a rank."""

    def launch(argv, num_ranks):
        raise AssertionError("ranks were started")

    monkeypatch.setattr(local, "launch", launch)


def run(capsys, *arguments) -> str:
    """The one message of a command that must fail with code 2."""
    assert cli.run([str(a) for a in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("error: ") == 1
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize("bad", [b for b in BAD_PLANS if b.model == SMALL_DEEPSEEK], ids=lambda bad: bad.name)
def test_bad_plan(tmp_path, capsys, bad):
    (tmp_path / "checkpoint").mkdir()
    config = shapes.config("deepseek_v3", "small", "float32")
    (tmp_path / "checkpoint" / "config.json").write_text(json.dumps(config))
    (tmp_path / "trace.jsonl").write_text(TRACE)
    plan, out = tmp_path / "plan.yaml", tmp_path / "run.json"
    plan.write_text(bad.text.replace(bad.old, bad.new, 1))
    sets = [part for override in bad.sets for part in ("--set", override)]
    message = run(capsys, "bench", plan, *sets, "--trace", tmp_path / "trace.jsonl", "--out", out)
    assert bad.key in message
    assert not out.exists()


@pytest.fixture
def plan(tmp_path):
    make_checkpoint(tmp_path / "checkpoint", family="deepseek_v3", size="tiny")
    (tmp_path / "prompts.jsonl").write_text(PROMPTS)
    return write_plan(tmp_path / "plan.yaml", tmp_path / "checkpoint", {"unified": {"expert_parallel": 2}})


@pytest.mark.parametrize(
    ("damage", "parts"), BAD_CHECKPOINTS, ids=[d.__name__.removeprefix("damage_") for d, _ in BAD_CHECKPOINTS]
)
def test_bad_checkpoint(tmp_path, capsys, plan, damage, parts):
    damage(tmp_path / "checkpoint")
    out = tmp_path / "out.jsonl"
    message = run(capsys, "generate", plan, "--prompts", tmp_path / "prompts.jsonl", "--out", out)
    assert all(part in message for part in parts)
    assert list(tmp_path.glob("*out.jsonl*")) == []


@pytest.mark.multiproc
def test_a_bad_weight_that_one_rank_finds_is_one_message_too(tmp_path, plan):
    tensor = "model.layers.2.mlp.experts.20.up_proj.weight"  # expert 20 is rank 1's
    edit_tensors(tmp_path / "checkpoint", tensor, set_value(tensor, float("nan")))
    out = tmp_path / "out.jsonl"
    done = moe("generate", plan, "--prompts", tmp_path / "prompts.jsonl", "--out", out)
    assert done.code == 2
    assert done.err.count("error: ") == 1
    assert tensor in done.err
    assert "Traceback" not in done.err
    assert list(tmp_path.glob("*out.jsonl*")) == []
    assert left_running(tmp_path) == []


@pytest.mark.parametrize(
    ("prompts", "named"),
    [
        ("", "prompts.jsonl"),
        ('{"prompt": "a"}\n{"prompt": 3}\n', "prompts.jsonl:2: prompt"),
        ('{"prompt": "a", "max_tokens": 0}\n', "prompts.jsonl:1: max_tokens"),
        ('{"prompt": "a", "max_token": 4}\n', "max_token"),
        ("{", "prompts.jsonl:1"),
    ],
)
def test_bad_prompts(tmp_path, capsys, plan, prompts, named):
    (tmp_path / "prompts.jsonl").write_text(prompts)
    out = tmp_path / "out.jsonl"
    assert named in run(capsys, "generate", plan, "--prompts", tmp_path / "prompts.jsonl", "--out", out)
    assert not out.exists()


@pytest.mark.parametrize(
    ("trace", "named"),
    [
        ("", "trace.jsonl"),
        (TRACE + '{"timestamp": 0, "input_length": -1, "output_length": 4}\n', "trace.jsonl:2: input_length"),
        ('{"timestamp": 0, "input_length": 9000, "output_length": 4}\n', "input_length"),
        ("[1]\n", "trace.jsonl:1"),
    ],
)
def test_bad_traces(tmp_path, capsys, plan, trace, named):
    (tmp_path / "trace.jsonl").write_text(trace)
    out = tmp_path / "run.json"
    assert named in run(capsys, "bench", plan, "--trace", tmp_path / "trace.jsonl", "--out", out)
    assert not out.exists()


def test_outputs_that_cannot_be_written_are_found_before_the_work(tmp_path, capsys, plan):
    missing = tmp_path / "nowhere" / "out.jsonl"
    arguments = ("generate", plan, "--prompts", tmp_path / "prompts.jsonl", "--out")
    assert "nowhere" in run(capsys, *arguments, missing)
    assert "is a folder" in run(capsys, *arguments, tmp_path)


def test_a_model_that_is_not_there_is_named_as_the_plans(tmp_path, capsys, plan):
    message = run(capsys, "check", plan, "--set", "model.path=tiny")
    assert f"model.path: {tmp_path / 'tiny'} is not a folder (--set)" in message
    assert "counts from the plan's folder" in message


def test_reports_that_are_none(tmp_path, capsys):
    (tmp_path / "run.json").write_text('{"schema_version": 999}')
    assert "schema_version" in run(capsys, "report", tmp_path / "run.json")
    assert "cannot be read" in run(capsys, "report", tmp_path / "other.json")


def test_outputs_never_replace_inputs_or_each_other(tmp_path, capsys, plan):
    prompts = tmp_path / "prompts.jsonl"
    arguments = ("generate", plan, "--prompts", prompts, "--out")
    link = tmp_path / "link"
    link.symlink_to(prompts)
    for out, other in ((prompts, "--prompts"), (link, "--prompts"), (plan, "PLAN")):
        assert f"is the same file as {other}" in run(capsys, *arguments, out)
    same = tmp_path / "same"
    assert "is the same file as --out" in run(capsys, *arguments, same, "--logits", same)
    assert prompts.read_text() == PROMPTS


def test_names_that_are_too_long_are_found_before_the_work(tmp_path, capsys, plan):
    arguments = ("generate", plan, "--prompts", tmp_path / "prompts.jsonl", "--out")
    assert "name too long" in run(capsys, *arguments, tmp_path / ("x" * 300))


def test_inputs_that_can_be_read_only_once_are_refused(tmp_path, capsys, plan):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    out = tmp_path / "out.jsonl"
    assert "regular file" in run(capsys, "generate", plan, "--prompts", pipe, "--out", out)
    assert "regular file" in run(capsys, "check", pipe)


def test_no_scale_is_advised_that_would_not_do(tmp_path, capsys, plan):
    (tmp_path / "trace.jsonl").write_text(TRACE)
    arguments = ("bench", plan, "--trace", tmp_path / "trace.jsonl", "--out", tmp_path / "run.json")
    assert "would fit" not in run(capsys, *arguments, "--scale-lengths", "1e12")
    message = run(capsys, *arguments, "--scale-lengths", "1e9")
    assert 8 * float(message.split("--scale-lengths ")[1].split()[0]) < 4096


@pytest.mark.parametrize(
    ("trace", "options", "named"),
    [
        ('{"timestamp": 0, "input_length": 4611686018427387904, "output_length": 4}\n', (), "input_length"),
        (TRACE, ("--scale-lengths", "1e308"), "input_length"),
        (TRACE, ("--scale-lengths", "1e12"), "input_length"),
        ('{"timestamp": 1e300, "input_length": 8, "output_length": 4}\n', (), "timestamp"),
        ("[" * 5000 + "\n", (), "trace.jsonl:1"),
    ],
)
def test_absurd_traces_are_refused_at_once(tmp_path, capsys, plan, trace, options, named):
    (tmp_path / "trace.jsonl").write_text(trace)
    out = tmp_path / "run.json"
    assert named in run(capsys, "bench", plan, "--trace", tmp_path / "trace.jsonl", *options, "--out", out)
