"""What `generate` writes: a line per prompt in input order, and first-token logits. Torch-free."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from moe_runtime.files import write_atomically


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateResult:
    """One prompt's outcome. `finish_reason`: stop, length or error; `error` says why, None otherwise."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    error: str | None = None


def write_results(path: Path, results: Sequence[GenerateResult]) -> None:
    """Write JSON lines in order of `index`, the whole file or nothing; InputError if that fails.

    Fields: index, token_ids, text, finish_reason, and error where there is one.
    """
    lines = [msgspec.json.encode(_line(r)) + b"\n" for r in sorted(results, key=lambda r: r.index)]
    write_atomically(path, b"".join(lines))


def _line(result: GenerateResult) -> dict[str, Any]:
    line: dict[str, Any] = {
        "index": result.index,
        "token_ids": list(result.token_ids),
        "text": result.text,
        "finish_reason": result.finish_reason,
    }
    if result.error is not None:
        line["error"] = result.error
    return line


def write_logits(path: Path, logits: Mapping[int, NDArray[np.float32]], *, vocab_size: int) -> None:
    """Write the first-token logits of the prompts that have any, the whole file or nothing.

    The .npz holds `index` int64 [n], ascending, and `logits` float32 [n, vocab_size]: row i belongs
    to prompt index[i]. Prompts that failed before their first token have no row.
    """
    index = np.array(sorted(logits), dtype=np.int64)
    rows = np.zeros((len(index), vocab_size), np.float32)
    for row, key in enumerate(index):
        rows[row] = logits[int(key)]
    out = io.BytesIO()
    np.savez(out, index=index, logits=rows)
    write_atomically(path, out.getvalue())
