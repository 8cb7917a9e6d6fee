"""The command line is a contract: a change of it shows here."""

import argparse
import importlib
import sys
from pathlib import Path

import pytest

from moe_runtime.errors import InputError
from moe_runtime.launch import environment
from moe_runtime.launch.cli import parser, run

ROOT = Path(__file__).resolve().parents[2]
FROZEN = {
    "make-checkpoint": "--family --out [--size] [--dtype] [--seed]",
    "check": "PLAN [--set] [--json]",
    "generate": "PLAN [--set] --prompts --out [--logits] [--timeline-out] [--dump-expert-load]",
    "serve": "PLAN [--set] [--dump-expert-load]",
    "bench": "PLAN [--set] --trace --out [--speed] [--limit] [--scale-lengths] [--http] [--timeline-out]"
    " [--dump-expert-load]",
    "simulate": "PLAN [--set] --trace --out [--speed] [--limit] [--scale-lengths] [--balance] [--events]",
    "report": "RUN.json+ [--html] [--markdown] [--csv] [--price-per-node-hour]",
    "plan": "--model --hardware --nodes --workload --slo [--price-per-node-hour] [--what-if] [--out]",
    "eplb": "--load --topology --slots [--current] --out [--groups] [--quality] [--split] [--expert-bytes]"
    " [--horizon] [--plot]",
}


def surface() -> dict[str, str]:
    (commands,) = (a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    described = {}
    for name, sub in commands.choices.items():
        words = []
        for action in sub._actions:
            if isinstance(action, argparse._HelpAction):
                continue
            word = action.option_strings[-1] if action.option_strings else f"{action.metavar}"
            word += "+" if action.nargs == "+" else ""
            words.append(f"[{word}]" if action.option_strings and not action.required else word)
        described[name] = " ".join(words)
    return described


def test_the_command_line_is_frozen():
    assert surface() == FROZEN


@pytest.mark.parametrize("arguments", [[], ["serve"], ["check"], ["bench", "p.yaml", "--speed", "0"]])
def test_unusable_arguments_exit_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        parser().parse_args(arguments)
    assert caught.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_what_is_no_number_is_said_in_words(capsys):
    with pytest.raises(SystemExit):
        parser().parse_args(["bench", "p.yaml", "--trace", "t", "--out", "o", "--speed", "fast"])
    assert "argument --speed: fast is not a positive number" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["check p.yaml", "serve p.yaml", "generate p.yaml --prompts p --out o"])
def test_an_interrupt_before_ranks_run_is_one_word(command, capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"moe_runtime.launch.commands.{command.split()[0]}.run", interrupted)
    assert run(command.split()) == 130
    assert capsys.readouterr().err == "interrupted\n"


TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "RANK": "3",
    "WORLD_SIZE": "6",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def test_launchers_are_recognised():
    assert environment.detect({}) is None
    assert environment.detect({"RANK": "0", "WORLD_SIZE": "2"}) is None
    torchrun = environment.detect(TORCHRUN)
    assert torchrun is not None
    assert (torchrun.launcher, torchrun.rank, torchrun.world_size) == ("torchrun", 3, 6)
    assert (torchrun.store_port, torchrun.agent_store, torchrun.attempt) == (29500, True, 2)
    mpirun = environment.detect({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"})
    assert mpirun is not None
    assert (mpirun.launcher, mpirun.rank, mpirun.world_size) == ("mpirun", 1, 4)


def test_several_hosts_and_other_launchers_are_refused_by_name():
    with pytest.raises(InputError, match="several hosts"):
        environment.detect({**TORCHRUN, "LOCAL_WORLD_SIZE": "3"})
    with pytest.raises(InputError, match="SLURM_NTASKS is 4"):
        environment.detect({"SLURM_NTASKS": "4"})
    assert environment.detect({"SLURM_NTASKS": "1"}) is None


def test_make_bench_calls_the_benchmark_as_it_wants_to_be_called():
    recipe = (ROOT / "Makefile").read_text().split("\nbench:")[1].splitlines()[1]
    arguments = recipe.split("benchmarks/speed.py")[1].replace("$(CHECKPOINT)", "checkpoints/x").split()
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        speed = importlib.import_module("speed")
    finally:
        sys.path.pop(0)
    assert speed.parse_arguments(arguments).checkpoint == Path("checkpoints/x")


@pytest.mark.parametrize("change", [{"RANK": "x"}, {"MASTER_PORT": "0"}, {"WORLD_SIZE": ""}])
def test_a_launcher_with_broken_variables_is_named(change):
    with pytest.raises(InputError, match=next(iter(change))):
        environment.detect({**TORCHRUN, **change})
