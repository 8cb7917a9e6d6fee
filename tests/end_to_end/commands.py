"""Runs the command line as a user does: real processes, a deadline, and everything reaped."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

BIN = Path(sys.executable).parent
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


def run(*command: object, timeout: float = 120, env: dict[str, str] | None = None, cwd: Path = ROOT) -> Done:
    """Run a command in a session of its own; nothing of it is left when this returns."""
    process = subprocess.Popen(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        cwd=cwd,
        env={**os.environ, **(env or {})},
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"{command} took over {timeout} s\n{out}\n{err}") from None
    return Done(process.returncode, out, err)


def moe(*arguments: object, timeout: float = 120, env: dict[str, str] | None = None) -> Done:
    return run(sys.executable, "-m", "moe_runtime", *arguments, timeout=timeout, env=env)


def left_running(marker: object) -> list[str]:
    """Command lines of live processes that mention `marker` (a path only this test uses)."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
            except OSError:
                continue
            if str(marker) in line and state != "Z":
                found.append(line)
    return found


def write_plan(path: Path, checkpoint: Path, deployments: dict[str, Any], **sections: Any) -> Path:
    plan = {"model": {"path": str(checkpoint), "dtype": "float32"}, "deployments": deployments, **sections}
    path.write_text(yaml.safe_dump(plan, sort_keys=False))
    return path


def write_prompts(path: Path, prompts: list[list[int]], max_tokens: int) -> Path:
    lines = [{"prompt_token_ids": p, "max_tokens": max_tokens, "ignore_eos": True} for p in prompts]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@dataclass(frozen=True)
class Generated:
    tokens: list[list[int]]
    logits: np.ndarray


def read_generated(out: Path, logits: Path) -> Generated:
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["index"] for line in lines] == list(range(len(lines)))
    assert all(line["finish_reason"] == "length" for line in lines), lines
    with np.load(logits) as archive:
        assert archive["index"].tolist() == list(range(len(lines)))
        return Generated([line["token_ids"] for line in lines], archive["logits"])
