"""Write the signatures of a DeepEP wheel as JSON: names, kinds and defaults, parsed and never imported.

    python scripts/deepep_signatures.py sgl_deep_ep-VERSION.whl > tests/expert_parallel/deepep/signatures.json

Only names of classes, methods and arguments leave the wheel, and defaults as text.
"""

import argparse
import ast
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

SOURCES = {
    "Buffer": "deep_ep/buffers/legacy.py",
    "ElasticBuffer": "deep_ep/buffers/elastic.py",
    "EventOverlap": "deep_ep/utils/event.py",
}


def wheel_signatures(wheel: Path) -> dict[str, Any]:
    """{"wheel": file name, "classes": {class: {method: [argument, ...]}}}, `self` left out."""
    with zipfile.ZipFile(wheel) as archive:
        classes = {
            name: class_signatures(archive.read(path).decode(), name) for name, path in SOURCES.items()
        }
    return {"wheel": wheel.name, "classes": classes}


def class_signatures(source: str, name: str) -> dict[str, list[dict[str, Any]]]:
    """Public methods of a class and `__init__`."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return {
                item.name: _arguments(item)
                for item in node.body
                if isinstance(item, ast.FunctionDef)
                and (item.name == "__init__" or not item.name.startswith("_"))
            }
    raise ValueError(f"no class {name}")


def _arguments(function: ast.FunctionDef) -> list[dict[str, Any]]:
    a = function.args
    positional = [*a.posonlyargs, *a.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(a.defaults))
    static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in function.decorator_list)
    listed = [
        _argument(arg, "positional_only" if arg in a.posonlyargs else "positional_or_keyword", default)
        for arg, default in zip(positional, [*defaults, *a.defaults], strict=True)
    ]
    listed = listed if static else listed[1:]
    if a.vararg:
        listed.append({"name": a.vararg.arg, "kind": "var_positional"})
    listed += [_argument(arg, "keyword_only", d) for arg, d in zip(a.kwonlyargs, a.kw_defaults, strict=True)]
    if a.kwarg:
        listed.append({"name": a.kwarg.arg, "kind": "var_keyword"})
    return listed


def _argument(arg: ast.arg, kind: str, default: ast.expr | None) -> dict[str, Any]:
    given = {} if default is None else {"default": ast.unparse(default)}
    return {"name": arg.arg, "kind": kind, **given}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("wheel", type=Path)
    json.dump(wheel_signatures(parser.parse_args().wheel), sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
