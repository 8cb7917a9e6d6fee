"""KVSpec: what a token leaves in the cache, per group of layers.

Scheduler, cache and transfer iterate over groups; block ids are int32 `tier << 28 | index`
(tier 0 is the device; host and disk tiers come later), so a whole id is one int32.
"""

from dataclasses import dataclass
from typing import Literal

from moe_runtime.spec.model import DTYPE_BYTES, MlaSpec, ModelSpec

TIER_SHIFT = 28
INDEX_MASK = (1 << TIER_SHIFT) - 1

Retention = Literal["full", "window", "compressed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """Layers that cache alike. `entry` values of `dtype` per cached token and layer.

    `tokens_per_entry` > 1 is a compressed group. A block holds `block_tokens` tokens.
    """

    name: str
    layers: tuple[int, ...]
    entry: int
    dtype: str
    block_tokens: int
    tokens_per_entry: int = 1
    retention: Retention = "full"

    @property
    def token_bytes(self) -> int:
        """Bytes one token takes in all layers of the group."""
        return len(self.layers) * self.entry * DTYPE_BYTES[self.dtype] // self.tokens_per_entry

    @property
    def block_bytes(self) -> int:
        return self.token_bytes * self.block_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSpec:
    """The groups of a model. The first full-retention group is what `kv_cache.blocks` counts."""

    groups: tuple[KVGroup, ...]

    @property
    def primary(self) -> KVGroup:
        return next(g for g in self.groups if g.retention == "full")

    @property
    def token_bytes(self) -> int:
        return sum(g.token_bytes for g in self.groups)


def kv_spec(model: ModelSpec, *, block_tokens: int, dtype: str) -> KVSpec:
    """The KV groups of a model: one full-retention group for MLA latents or GQA heads."""
    name = "mla_latent" if isinstance(model.attention, MlaSpec) else "gqa"
    layers = tuple(range(model.num_layers))
    group = KVGroup(
        name=name, layers=layers, entry=model.attention.kv_entry, dtype=dtype, block_tokens=block_tokens
    )
    return KVSpec(groups=(group,))
