"""The shapes that every Triton kernel is tested with: one generator, so that no kernel gets an easier list.

Small hidden sizes, as the interpreter is slow; rows, groups and sizes that do not fit the tiles.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

ROWS = (0, 1, 7, 128, 129)
# N x K, neither a multiple of the tiles used in tests; the last has a scale grid of 8 x 3 blocks of 128.
MATRICES = ((96, 80), (144, 272), (1000, 320))


def group_counts(num_groups: int = 4) -> dict[str, tuple[int, ...]]:
    """Name -> rows per group: none at all, one row, empty groups, uneven, all rows in one group."""
    last = num_groups - 1
    return {
        "no rows": (0,) * num_groups,
        "one row": tuple(int(g == last) for g in range(num_groups)),
        "empty between": tuple((7, 0)[g % 2] for g in range(num_groups)),
        "uneven": tuple((1, 129, 0, 7)[g % 4] for g in range(num_groups)),
        "all in one": tuple(128 * int(g == 1) for g in range(num_groups)),
    }


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=generator(seed)).to(dtype)


@contextmanager
def poisoned() -> Iterator[None]:
    """Inside, `torch.empty` gives NaN (the largest integer for integers): what a kernel leaves out shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def relative_error(got: Tensor, want: Tensor) -> float:
    """Largest |got - want| over the largest |want| of its row, in double precision; 0 for empty tensors."""
    assert got.shape == want.shape
    if not want.numel():
        return 0.0
    got64, want64 = got.double(), want.double()
    scale = want64.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    return float(((got64 - want64).abs() / scale).nan_to_num(torch.inf).max())
