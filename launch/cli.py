"""The command line: parses arguments, runs one command, turns user errors into exit code 2."""

import argparse
import io
import math
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import moe_runtime
from moe_runtime.errors import MoeRuntimeError, UserError
from moe_runtime.launch.console import say

FAMILIES = ("deepseek_v3", "qwen3_moe")
SIZES = ("tiny", "small")
INTERRUPTED = 130


def run(argv: Sequence[str]) -> int:
    """Run a command; returns the exit code: 0, 1 for a failure, 2 for something the user can mend.

    130 after an interrupt, unless ranks run: they are stopped, and the code names the signal.
    """
    _open_standard_streams()
    arguments = parser().parse_args(argv)
    try:
        # A command's module is imported only when it runs: `check` must not wait for torch.
        command = import_module(f"moe_runtime.launch.commands.{arguments.command.replace('-', '_')}")
        code: int = command.run(arguments, list(argv))
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED
    except UserError as error:
        say(f"error: {error}")
        return 2
    except MoeRuntimeError as error:
        say(f"failed: {error}")
        return 1
    except BrokenPipeError:  # the reader of our output left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except OSError as error:  # a full disk, say
        say(f"failed: {error}")
        return 1
    return code


def _open_standard_streams() -> None:
    """A closed standard stream's number would be given to the next socket or file."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if isinstance(sys.stdout, io.TextIOWrapper):  # whose encoding may lack characters of a name
        sys.stdout.reconfigure(errors="replace")


def parser() -> argparse.ArgumentParser:
    """The whole command line; a test freezes it."""
    root = argparse.ArgumentParser(prog="moe-runtime", description=moe_runtime.__doc__)
    root.add_argument("--version", action="version", version=f"moe-runtime {moe_runtime.__version__}")
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _make_checkpoint(
        commands.add_parser("make-checkpoint", help="write a small checkpoint with random weights")
    )
    _check(commands.add_parser("check", help="validate a plan; print what would run and the memory per rank"))
    _generate(commands.add_parser("generate", help="generate from a file of prompts"))
    _serve(commands.add_parser("serve", help="serve a plan's model to OpenAI clients"))
    _bench(commands.add_parser("bench", help="replay a request trace and write a throughput-per-node report"))
    _simulate(
        commands.add_parser("simulate", help="replay a trace on the plan's virtual cluster; the same report")
    )
    _report(
        commands.add_parser(
            "report", help="print saved reports, side by side; write them as a page, Markdown or CSV"
        )
    )
    _search(commands.add_parser("plan", help="search the best plans for a model, a cluster and a workload"))
    _eplb(commands.add_parser("eplb", help="place experts for measured loads; say what it gains and moves"))
    return root


def _make_checkpoint(p: argparse.ArgumentParser) -> None:
    p.add_argument("--family", required=True, choices=FAMILIES)
    p.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder to create")
    p.add_argument("--size", choices=SIZES, default="small")
    p.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    p.add_argument("--seed", type=int, default=0)


def _plan(p: argparse.ArgumentParser) -> None:
    p.add_argument("plan", type=Path, metavar="PLAN", help="a YAML plan")
    p.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY.PATH=VALUE",
        help="override a key of the plan; may be repeated",
    )


def _timeline(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--timeline-out",
        type=Path,
        metavar="F.json",
        help="write a Chrome/Perfetto trace of all ranks' steps",
    )


def _expert_load(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--dump-expert-load",
        type=Path,
        metavar="F.npz",
        help="write how often each expert was chosen, all ranks together",
    )


def _check(p: argparse.ArgumentParser) -> None:
    _plan(p)
    p.add_argument("--json", action="store_true", help="print JSON instead of text")


def _generate(p: argparse.ArgumentParser) -> None:
    _plan(p)
    p.add_argument("--prompts", required=True, type=Path, metavar="IN.jsonl")
    p.add_argument("--out", required=True, type=Path, metavar="OUT.jsonl")
    p.add_argument(
        "--logits", type=Path, metavar="F.npz", help="also save the first token's logits of each prompt"
    )
    _timeline(p)
    _expert_load(p)


def _serve(p: argparse.ArgumentParser) -> None:
    _plan(p)
    _expert_load(p)


def _bench(p: argparse.ArgumentParser) -> None:
    _plan(p)
    _trace(p)
    p.add_argument("--http", metavar="URL", help="replay against a server that runs the plan already")
    _timeline(p)
    _expert_load(p)


def _simulate(p: argparse.ArgumentParser) -> None:
    _plan(p)
    _trace(p)
    p.add_argument(
        "--balance",
        metavar="LOADS",
        help="expert loads: recorded, uniform, power:EXPONENT or balancedness:X; default: recorded where"
        " there are records",
    )
    p.add_argument("--events", type=Path, metavar="E.yaml", help="failures, load shifts and more to act out")


def _trace(p: argparse.ArgumentParser) -> None:
    p.add_argument("--trace", required=True, type=Path, metavar="T.jsonl")
    p.add_argument("--out", required=True, type=Path, metavar="RUN.json")
    p.add_argument("--speed", type=_positive, default=1.0, metavar="X", help="replay this many times faster")
    p.add_argument("--limit", type=int, metavar="N", help="only the first N requests")
    p.add_argument("--scale-lengths", type=_positive, default=1.0, metavar="X", help="multiply all lengths")


def _report(p: argparse.ArgumentParser) -> None:
    p.add_argument("runs", nargs="+", type=Path, metavar="RUN.json")
    p.add_argument("--html", type=Path, metavar="F.html", help="write a page that needs nothing else")
    p.add_argument("--markdown", type=Path, metavar="F.md", help="write the tables as Markdown")
    p.add_argument("--csv", type=Path, metavar="F.csv", help="write every figure, a column for each run")
    p.add_argument(
        "--price-per-node-hour", type=_positive, metavar="X", help="also say what a million tokens cost"
    )


def _eplb(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--load", required=True, type=Path, metavar="F", help="loads: .csv, .json, .npz, .npy, .pt"
    )
    p.add_argument("--topology", required=True, metavar="NxG", help="nodes x ranks per node, as 4x8")
    p.add_argument("--slots", required=True, type=int, metavar="S", help="slots to fill, all ranks together")
    p.add_argument("--current", type=Path, metavar="P.json", help="the placement in use: move little from it")
    p.add_argument("--out", required=True, type=Path, metavar="P.json")
    p.add_argument("--groups", type=int, default=1, help="expert groups of group-limited routing")
    p.add_argument("--quality", choices=("default", "best"), default="default")
    p.add_argument("--split", choices=("weighted", "equal"), default="weighted", help="shares of replicas")
    p.add_argument(
        "--expert-bytes", type=_positive, default=1.0, metavar="B", help="of one expert in a layer"
    )
    p.add_argument(
        "--horizon",
        type=_positive,
        metavar="SECONDS",
        help="what one unit of load on a layer's heaviest rank costs until the next decision",
    )
    p.add_argument("--plot", type=Path, metavar="F.png", help="a picture of rank loads before and after")


def _search(p: argparse.ArgumentParser) -> None:
    p.add_argument("--model", required=True, metavar="M", help="a catalog's name or a checkpoint's folder")
    p.add_argument("--hardware", required=True, metavar="H", help="a device, as h100-sxm")
    p.add_argument("--nodes", required=True, type=int, metavar="N")
    p.add_argument(
        "--workload",
        required=True,
        metavar="W",
        help="input=1200,output=1500[,prefix=0.5][,acceptance=0.8], or a trace",
    )
    p.add_argument("--slo", required=True, metavar="S", help="ttft=2s,tpot=50ms[,utilisation=0.8]")
    p.add_argument("--price-per-node-hour", type=_positive, metavar="X")
    p.add_argument(
        "--what-if",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="also with one thing changed; may be repeated",
    )
    p.add_argument("--out", type=Path, metavar="DIR", help="write the best plans here")


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value
