"""Vocabulary: the bytes that every token id stands for, read from a `tokenizer.json`.

Owns the two ways in which tokenizers write bytes as text (byte-level BPE, sentencepiece with byte
fallback). Knows nothing of how text is encoded, or of anything that is streamed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from moe_runtime.checkpoint.tokenizer import FILE_NAME
from moe_runtime.errors import CheckpointError

_SPACE = "\u2581"  # sentencepiece's visible space
LARGEST_ID = 1 << 24  # far beyond any vocabulary: a table of all ids is made


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What ids mean, as tuples indexed by id.

    text_bytes     what the id adds to an output: empty for special tokens and for ids without a token
    shown_bytes    the same, special tokens spelled out: for log probabilities
    leading_spaces how many spaces at the very beginning of a text are not part of it
    """

    text_bytes: tuple[bytes, ...]
    shown_bytes: tuple[bytes, ...]
    leading_spaces: int

    @property
    def size(self) -> int:
        return len(self.text_bytes)

    def shown(self, token_id: int) -> bytes:
        """The bytes of an id, special or not; empty for one that has no token."""
        return self.shown_bytes[token_id] if token_id < len(self.shown_bytes) else b""


class _AddedToken(msgspec.Struct, frozen=True):
    id: int
    content: str
    special: bool = False


class _File(msgspec.Struct, frozen=True):
    model: dict[str, Any]
    added_tokens: list[_AddedToken] = []
    decoder: dict[str, Any] | None = None


def read_vocabulary(checkpoint_dir: Path) -> Vocabulary:
    """The vocabulary of a checkpoint's tokenizer.

    Raises CheckpointError for a file that is missing or damaged, and for a decoder that is neither
    byte-level nor sentencepiece's: its text depends on what comes later, so it cannot be streamed.
    """
    file = checkpoint_dir / FILE_NAME
    try:
        parsed = msgspec.json.decode(file.read_bytes(), type=_File)
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from None
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CheckpointError(f"{file}: not a tokenizer: {error}") from None
    steps = list(_steps(parsed.decoder))
    kinds = [s.get("type") for s in steps]
    if kinds == ["ByteLevel"]:
        to_bytes, leading = _byte_level, 0
    elif kinds and all(_is_sentencepiece(s) for s in steps) and "Replace" in kinds:
        to_bytes = _sentencepiece
        leading = sum(int(s["start"]) for s in steps if s["type"] == "Strip")
    else:
        raise CheckpointError(f"{file}: decoder {kinds}: only byte-level and sentencepiece text is streamed")
    pieces = {**_model_pieces(parsed.model), **{t.id: t.content for t in parsed.added_tokens}}
    if (last := max(pieces, default=0)) > LARGEST_ID:
        raise CheckpointError(f"{file}: not a tokenizer: {len(pieces)} tokens, but an id is {last}")
    special = {t.id for t in parsed.added_tokens if t.special}
    shown = tuple(to_bytes(pieces.get(i, "")) for i in range(max(pieces, default=-1) + 1))
    text = tuple(b"" if i in special else piece for i, piece in enumerate(shown))
    return Vocabulary(text_bytes=text, shown_bytes=shown, leading_spaces=leading)


def _steps(decoder: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if decoder is None:
        return
    if decoder.get("type") == "Sequence":
        for step in decoder.get("decoders", []):
            yield from _steps(step)
    else:
        yield decoder


def _is_sentencepiece(step: dict[str, Any]) -> bool:
    match step:
        case {"type": "Replace", "pattern": {"String": pattern}, "content": content}:
            return bool(pattern == _SPACE and content == " ")
        case {"type": "Strip", "content": content, "stop": stop}:
            return bool(content == " " and stop == 0)
        case {"type": "ByteFallback" | "Fuse"}:
            return True
    return False


def _model_pieces(model: dict[str, Any]) -> dict[int, str]:
    vocab = model.get("vocab", {})
    if isinstance(vocab, dict):
        return {token_id: piece for piece, token_id in vocab.items()}
    return {token_id: piece for token_id, (piece, _) in enumerate(vocab)}


def _alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable Latin-1 stands for itself, others are shifted.

    The table of GPT-2's `bytes_to_unicode`.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTES_OF = _alphabet()


def _byte_level(piece: str) -> bytes:
    """A piece with a character outside the alphabet (an added token) is meant literally."""
    try:
        return bytes([_BYTES_OF[c] for c in piece])
    except KeyError:
        return piece.encode()


def _sentencepiece(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes([int(piece[3:5], 16)])
        except ValueError:
            pass
    return piece.replace(_SPACE, " ").encode()
