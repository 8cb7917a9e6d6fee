"""The DeepEP package as the adapter sees it: which classes, and which arguments this version takes.

Owns the lazy import and the probing of signatures; knows nothing of tokens. Published versions
differ in arguments (`use_fabric`, `enable_shrink`, ...), so every call is made by keyword, and an
argument that a version lacks is left out only when its value asks for nothing.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from moe_runtime.errors import UnavailableError, UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """buffer          the V1 class: normal and low-latency mode; None where a build has none
    elastic_buffer  the V2 class; None before version 2
    topk_idx_dtype  the dtype of expert ids this build was compiled for: int64 or int32
    """

    version: str
    buffer: Any
    elastic_buffer: Any
    topk_idx_dtype: torch.dtype


def load_library() -> Library:
    """Import `deep_ep`.

    UnavailableError when it is not installed; UserError when it is but cannot be imported (no CUDA
    device, another NCCL than the one it was linked with).
    """
    try:
        module = import_module("deep_ep")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "deep_ep":
            raise UserError(f"deep_ep is installed but cannot be imported: {error}") from error
        raise UnavailableError("deep_ep", "dispatch.backend: deepep", "deepep") from error
    except (ImportError, AssertionError, OSError, RuntimeError) as error:
        reason = str(error) or type(error).__name__
        raise UserError(f"deep_ep is installed but cannot be imported: {reason}") from error
    return Library(
        version=getattr(module, "__version__", "unknown"),
        buffer=getattr(module, "Buffer", None),
        elastic_buffer=getattr(module, "ElasticBuffer", None),
        topk_idx_dtype=getattr(module, "topk_idx_t", torch.int64),
    )


def call(function: Callable[..., Any], /, **arguments: object) -> Any:
    """`function(**arguments)`, without those arguments that this version of it does not take.

    Only arguments that ask for nothing (False, None, 0) may be left out; UserError names another.
    """
    return function(**accepted(function, arguments))


def accepted(function: Callable[..., Any], arguments: dict[str, object]) -> dict[str, object]:
    """The part of `arguments` that `function` takes; UserError for one that it lacks and that matters."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return arguments
    lacking = [name for name, value in arguments.items() if name not in parameters and value]
    if lacking:
        name = getattr(function, "__qualname__", repr(function))
        raise UserError(f"the installed deep_ep cannot do {', '.join(lacking)}: {name} has no such argument")
    return {name: value for name, value in arguments.items() if name in parameters}
