"""The structure of the tree: who may import whom, the links, and what a wheel holds."""

import ast
import importlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("kernels", "placement", "eplb", "launch")

# Module prefix -> prefixes of the package it may import. The longest matching prefix counts.
# Everybody may import errors, files and shared_memory (`COMMON`), but kernels, placement and eplb.
COMMON = ("errors", "files", "shared_memory")
CONTROL = (
    "scheduler",
    "engine.agree",
    "engine.balancing.controller",
    "engine.balancing.merge",
    "engine.balancing.thinker",
    "engine.balancing.units",
    "engine.balancing.wire",
    "engine.limits",
    "engine.watchers",
    "engine.promises",
    "transfer.states",
    "transfer.leases",
    "frontend.router",
    "frontend.admission",
    "frontend.busy_rate",
    "frontend.board",
    "frontend.advice",
)
NUMPY = ("placement", "eplb")
HEAVY = ("models", "checkpoint", "expert_parallel", "kernels")
LAYERS: dict[str, tuple[str, ...]] = {
    "errors": (),
    "files": COMMON,
    "shared_memory": (),
    "spec": ("spec",),
    "plan": ("plan", "spec", "errors"),
    "scheduler": ("scheduler", "spec", "errors"),
    "engine.agree": ("spec", "errors"),
    "engine.promises": (),
    "engine.limits": ("engine.agree", "scheduler", "plan", "spec", "errors"),
    "transfer.leases": ("spec", "errors"),
    "transfer.handoff": (),
    "transfer": ("transfer", "spec", *COMMON),
    "frontend.router": ("engine.promises", "spec", "errors"),
    "frontend.busy_rate": (),
    "frontend.admission": ("frontend.busy_rate",),
    "frontend.board": ("engine.messages",),
    "frontend.advice": ("frontend.board",),
    "kernels": ("kernels",),
    "placement": ("placement",),
    "eplb": ("eplb", "placement"),
    "report": ("report", "spec", "plan", *COMMON),
    "virtual": ("virtual", "plan", "spec", "report", *CONTROL, *NUMPY, *COMMON),
    "models": ("models", "kernels", "spec", "expert_parallel.buffer", *COMMON),
    "checkpoint": ("checkpoint", "models.families", "spec", *COMMON),
    "expert_parallel": ("expert_parallel", "models.context", "kernels", "placement", "spec", *COMMON),
    "engine": ("engine", "transfer", "scheduler", "report", "plan", "spec", *NUMPY, *HEAVY, *COMMON),
    "frontend": ("frontend", "engine", "transfer", "report", "plan", "spec", "checkpoint", *COMMON),
    "launch": ("",),
    "__main__": ("launch",),
    "__init__": (),
}
# Importing these must not pull torch in: the planner, the command line and the frontend start fast.
TORCH_FREE = (
    "spec.model",
    "plan.load",
    "plan.validate",
    "plan.show",
    "scheduler.scheduler",
    "engine.agree",
    "engine.limits",
    "engine.messages",
    "transfer.leases",
    "transfer.handoff",
    "frontend.fleet",
    "frontend.metrics",
    "frontend.replay",
    "frontend.server.app",
    "report.build",
    "placement.placement",
    "virtual.cost.model",
    "virtual.cluster.simulate",
    "models.families.registry",
    "checkpoint.reader",
    "checkpoint.tokenizer",
    "launch.cli",
    "launch.preflight",
    "launch.session",
    "launch.commands.check",
    "launch.commands.bench",
    "launch.commands.generate",
    "launch.commands.report",
    "launch.commands.plan",
    "launch.commands.serve",
    "launch.commands.simulate",
)
# Control modules are pure: no clock, no sockets, no web framework, no torch.
IMPURE = {"time", "datetime", "socket", "asyncio", "zmq", "torch", "random", "threading"}


def modules() -> dict[str, Path]:
    """Dotted name without `moe_runtime.` -> file, links followed."""
    found = {}
    for directory, _, files in os.walk(ROOT / "moe_runtime", followlinks=True):
        for name in files:
            if name.endswith(".py"):
                path = Path(directory) / name
                parts = path.relative_to(ROOT / "moe_runtime").with_suffix("").parts
                found[".".join(parts)] = path
    return found


def imported(path: Path, *, with_type_checking: bool = False) -> set[str]:
    """Names of modules that a file imports, anywhere in it."""
    tree = ast.parse(path.read_text())
    skipped: set[int] = set()
    if not with_type_checking:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                skipped |= {id(n) for n in ast.walk(node)}
    names: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            names |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{a.name}" for a in node.names}
    return names


def within(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(p == "" or name == p or name.startswith(p + ".") for p in prefixes)


def layer_of(module: str) -> tuple[str, ...] | None:
    best = max((p for p in LAYERS if within(module, (p,))), key=len, default=None)
    return None if best is None else LAYERS[best]


def test_every_module_has_a_layer_and_keeps_to_it():
    known = modules()
    problems = []
    for module, path in known.items():
        allowed = layer_of(module)
        if allowed is None:
            problems.append(f"{module} is in no layer")
            continue
        for name in imported(path):
            target = name.removeprefix("moe_runtime.")
            if not name.startswith("moe_runtime.") or (
                target not in known and f"{target}.__init__" not in known
            ):
                continue
            if target in known and not within(target, allowed) and target != module:
                problems.append(f"{module} imports {target}")
    assert problems == []


def test_control_is_pure():
    for module, path in modules().items():
        if within(module, CONTROL):
            roots = {name.split(".")[0] for name in imported(path, with_type_checking=True)}
            assert not roots & IMPURE, module


def test_packages_import_nothing():
    for module, path in modules().items():
        if module.endswith("__init__") and module != "__init__":
            assert not ast.parse(path.read_text()).body, f"{module} is not empty"


@pytest.mark.parametrize("module", TORCH_FREE)
def test_torch_free_modules_do_not_load_torch(module):
    code = (
        f"import sys, moe_runtime.{module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False).returncode == 0


def test_root_folders_are_linked_and_have_no_init():
    for name in LINKED:
        link = ROOT / "moe_runtime" / name
        assert link.is_symlink()
        assert os.readlink(link) == f"../{name}"
        assert not (ROOT / name / "__init__.py").exists()


def test_modules_say_what_they_own():
    silent = [
        m
        for m, p in modules().items()
        if not m.endswith("__init__") and not ast.get_docstring(ast.parse(p.read_text()))
    ]
    assert silent == []


def test_a_wheel_holds_real_files_and_every_module_imports(tmp_path):
    pip = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        str(ROOT),
    ]
    # A build folder of its own: the tree's may hold modules that are gone.
    settings = tmp_path / "build.cfg"
    settings.write_text(f"[build]\nbuild_base = {tmp_path / 'build'}\n")
    env = {**os.environ, "DIST_EXTRA_CONFIG": str(settings)}
    subprocess.run(pip, check=True, timeout=200, capture_output=True, env=env)
    (wheel,) = tmp_path.glob("moe_runtime-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    held = {
        n.removesuffix(".py").replace("/", ".")
        for n in names
        if n.startswith("moe_runtime/") and n.endswith(".py")
    }
    expected = {f"moe_runtime.{m}" for m in modules()}
    assert held == expected
    assert "moe_runtime/report/html/look.css" in names, "files that are read belong to the package"
    wanted = sorted(m.removesuffix(".__init__") for m in expected if not m.endswith("__main__"))
    code = (
        "import sys, importlib\n"
        f"sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
        f"for name in {wanted!r}: importlib.import_module(name)\n"
        "import moe_runtime; print(moe_runtime.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, timeout=120, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path))


def test_dependencies_are_importable_by_the_names_we_use():
    names = ("torch", "numpy", "yaml", "pydantic", "msgspec", "zmq", "tokenizers", "rich")
    serving = ("transformers", "jinja2", "fastapi", "uvicorn", "uvloop", "httptools", "prometheus_client")
    for name in (*names, *serving):
        importlib.import_module(name)
