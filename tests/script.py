"""Scripts of the repository as modules, for tests of what is in them; scripts belong to no package."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]


def load_script(path: str) -> ModuleType:
    """The module of a file, `path` from the root of the repository; loaded once per process."""
    name = path.removesuffix(".py").replace("/", "_") + "_script"
    if name not in sys.modules:
        specification = importlib.util.spec_from_file_location(name, ROOT / path)
        assert specification is not None
        assert specification.loader is not None
        module = importlib.util.module_from_spec(specification)
        sys.modules[name] = module  # dataclasses look their module up there
        specification.loader.exec_module(module)
    return sys.modules[name]
