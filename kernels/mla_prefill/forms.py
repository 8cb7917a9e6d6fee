"""The operations of the two forms of latent attention for a chunk of a prompt, counted from shapes.

Expanded: keys and values of all attended tokens come out of the latent first, so that a pair of a row and a
token costs little. Absorbed (as in mla_decode): queries go into the latent's space, so that only the chunk's
own rows are multiplied with a projection but a pair costs more. So short chunks after long contexts want the
absorbed form. A multiplication and an addition are two operations. No torch.
Source of the forms: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSizes:
    """Sizes of latent attention: heads, and values per head of a key's parts, a value, and a latent."""

    heads: int
    nope: int
    rope: int
    value: int
    rank: int


def expanded_operations(sizes: LatentSizes, rows: int, context: int) -> float:
    """`rows` new tokens, each after `context` cached ones and those of the chunk before it."""
    expand = (context + rows) * sizes.rank * (sizes.nope + sizes.value)
    per_pair = sizes.nope + sizes.rope + sizes.value
    return 2 * sizes.heads * (expand + _pairs(rows, context) * per_pair)


def absorbed_operations(sizes: LatentSizes, rows: int, context: int) -> float:
    """As `expanded_operations`."""
    absorb = rows * sizes.rank * (sizes.nope + sizes.value)
    per_pair = 2 * sizes.rank + sizes.rope
    return 2 * sizes.heads * (absorb + _pairs(rows, context) * per_pair)


def absorbed_is_cheaper(sizes: LatentSizes, rows: int, context: int) -> bool:
    """Whether the absorbed form takes fewer operations; without a context it never does."""
    return absorbed_operations(sizes, rows, context) < expanded_operations(sizes, rows, context)


def _pairs(rows: int, context: int) -> float:
    """Pairs of a row and a token it attends to: the context, the chunk's rows before it, itself."""
    return rows * (context + (rows + 1) / 2)
