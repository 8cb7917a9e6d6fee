"""Tokenizer: text to ids and back, a thin layer over the `tokenizers` library.

Owns how special tokens are treated: encode adds none, decode leaves them out.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as _Tokenizer

from moe_runtime.errors import CheckpointError

FILE_NAME = "tokenizer.json"


class Tokenizer:
    """The tokenizer of a checkpoint directory. CheckpointError if it is missing or damaged."""

    def __init__(self, checkpoint_dir: Path) -> None:
        # There is one text at a time, so a pool of threads would have nothing to do.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        file = checkpoint_dir / FILE_NAME
        if not file.is_file():
            raise CheckpointError(f"{file}: file not found")
        try:
            self._tokenizer = _Tokenizer.from_file(str(file))
        except Exception as error:  # noqa: BLE001, the library raises no narrower class
            raise CheckpointError(f"{file}: not a tokenizer: {error}") from None

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str) -> list[int]:
        """The ids of a text. A special token spelled out in it becomes its id.

        Other threads run meanwhile: `encode` of the library would keep the interpreter to itself.
        """
        return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; bytes that are not UTF-8 become the replacement character."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))
