"""What a report says about the host: read once, from the operating system.

Everything here may be unknown on some host; unknown is None, and the caller says why.
"""

import os
import subprocess
from pathlib import Path

import moe_runtime
from moe_runtime.report.schema import Machine, ModelSummary
from moe_runtime.spec.model import ModelSpec


def read_machine(*, hardware: str, device: str) -> Machine:
    """This host; `hardware` and `device` are the plan's words for what it runs on."""
    return Machine(
        hardware=hardware,
        device=device,
        cpu_model=_field(Path("/proc/cpuinfo"), "model name"),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=_memory_bytes(Path("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max")),
    )


def read_commit() -> str | None:
    """The commit the package runs from, `+` appended if tracked files differ; None outside a checkout."""
    root = Path(moe_runtime.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    commit = _git(root, "rev-parse", "HEAD")
    if commit is None:
        return None
    return commit + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")


def summarize_model(spec: ModelSpec, *, path: str, dtype: str) -> ModelSummary:
    """The lines of a ModelSpec that a reader of a report wants."""
    return ModelSummary(
        path=path,
        family=spec.family,
        dtype=dtype,
        hidden=spec.hidden,
        num_layers=spec.num_layers,
        num_moe_layers=spec.num_moe_layers,
        num_experts=spec.moe.num_experts,
        top_k=spec.moe.router.top_k,
        vocab_size=spec.vocab_size,
    )


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _field(path: Path, name: str) -> str | None:
    """First value of `name : value` lines."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == name and value.strip():
            return value.strip()
    return None


def available_memory_bytes() -> int | None:
    """What this host, or this container (cgroup v2), has left for new processes and buffers."""
    text = _field(Path("/proc/meminfo"), "MemAvailable")
    if text is None or not text.endswith(" kB"):
        return None
    free = int(text.removesuffix(" kB")) * 1024
    try:
        limit, used = (Path(f"/sys/fs/cgroup/memory.{n}").read_text().strip() for n in ("max", "current"))
    except OSError:
        return free
    return min(free, int(limit) - int(used)) if limit.isdigit() else free


def _memory_bytes(meminfo: Path, limit: Path) -> int | None:
    """Memory of the host, or the limit of this container (cgroup v2) where that is less."""
    text = _field(meminfo, "MemTotal")
    if text is None or not text.endswith(" kB"):
        return None
    total = int(text.removesuffix(" kB")) * 1024
    try:
        allowed = limit.read_text().strip()
    except OSError:
        return total
    return min(total, int(allowed)) if allowed.isdigit() else total
