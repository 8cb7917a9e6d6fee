"""The seam between instances: how KV blocks get from a prefill to a decode rank.

A source exports its pool once; a destination connects once per source after comparing exact
layout fingerprints, then starts pulls and polls them. No pull ever blocks the step.
"""

import hashlib
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from moe_runtime.errors import LayoutMismatch
from moe_runtime.spec.kv import KVSpec
from moe_runtime.transfer.handoff import KVSource


class LayoutFingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """What must be equal on both sides before a byte moves."""

    model: str
    groups: list[tuple[str, int, int, str, int]]
    block_tokens: int
    token_bytes: int

    def require_equal(self, other: "LayoutFingerprint", peer: str) -> None:
        """Raise LayoutMismatch, with both values of the first field that differs."""
        for name in self.__struct_fields__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise LayoutMismatch(f"KV layout of {peer} differs in {name}: here {mine}, there {theirs}")


def fingerprint(model_digest: str, kv: KVSpec) -> LayoutFingerprint:
    """The exact layout of a pool: model, groups (name, layers, entry, dtype, tokens per entry), sizes."""
    groups = [(g.name, len(g.layers), g.entry, g.dtype, g.tokens_per_entry) for g in kv.groups]
    return LayoutFingerprint(
        model=model_digest, groups=groups, block_tokens=kv.primary.block_tokens, token_bytes=kv.token_bytes
    )


def digest(text: str) -> str:
    """16 hex digits of a text."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class Pull(Protocol):
    """A pull under way. `poll` returns None until it ended, then True, or raises TransferError."""

    def poll(self) -> bool | None: ...


class KVTransport(Protocol):
    """One rank's end of the transfer."""

    def start_pull(self, source: KVSource, blocks: NDArray[np.int32]) -> Pull:
        """Copy the source's blocks into `blocks` (int32, same order) of this rank's pool."""
        ...

    def close(self) -> None:
        """Give up pulls that have not begun and stop."""
        ...
