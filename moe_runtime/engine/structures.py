"""Structures: turns what a request's output must look like into a constraint on its tokens. LOCAL.

Compiling takes milliseconds to seconds, so it runs on a thread of its own while steps go on; only
advancing a compiled constraint by one token is done in a step. Wraps the xgrammar library.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_runtime.errors import RequestRefused, UnavailableError
from moe_runtime.scheduler.constraint import Constraint
from moe_runtime.spec.requests import Structure

ANY_OBJECT = '{"type": "object"}'
MAX_WHITESPACE = 32  # in a row: enough to indent, and a model that likes blanks still comes to an end


class TokenConstraint:
    """The state of one sequence's output within its grammar."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._words_W: NDArray[np.int32] = np.zeros(-(-vocab_size // 32), np.int32)

    def accept(self, token: int) -> None:
        """The output grew by a token, which the mask allowed."""
        if not self._matcher.is_terminated():
            accepted = self._matcher.accept_token(token)
            assert accepted, f"token {token} was sampled though its mask forbids it"

    def mask(self) -> NDArray[np.int32]:
        """int32 [W]: the tokens that may come next; everything is allowed once the grammar has ended."""
        if self._matcher.is_terminated():
            return np.full_like(self._words_W, -1)
        import torch

        words_1W = torch.from_numpy(self._words_W)[None]
        self._matcher.fill_next_token_bitmask(words_1W, 0)
        return self._words_W.copy()


class Structures:
    """Compiler of one rank. `vocab_size` is the model's, which may exceed the tokenizer's."""

    def __init__(self, checkpoint: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._checkpoint = checkpoint
        self._vocab_size = vocab_size
        self._eos = eos_token_ids
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="structures")
        self._compiler: Any = None

    def start(self, structure: Structure) -> "Future[Constraint]":
        """Begin to compile; the result is a fresh constraint.

        It raises RequestRefused for a schema that cannot be compiled, UnavailableError without xgrammar.
        """
        return self._thread.submit(self._compile, structure)

    def close(self) -> None:
        """Stop the thread; what still waits is dropped."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, structure: Structure) -> Constraint:
        try:
            import xgrammar
        except ImportError:
            raise UnavailableError("xgrammar", "response_format", "structured") from None
        if self._compiler is None:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(self._checkpoint)
            info = xgrammar.TokenizerInfo.from_huggingface(
                tokenizer, vocab_size=self._vocab_size, stop_token_ids=list(self._eos)
            )
            self._compiler = xgrammar.GrammarCompiler(info, max_threads=1)
        try:
            grammar = self._compiler.compile_json_schema(
                ANY_OBJECT if structure.kind == "json" else structure.schema,
                strict_mode=structure.kind != "json",
                max_whitespace_cnt=MAX_WHITESPACE,
            )
        except RuntimeError as error:  # the library raises no narrower class
            reason = str(error).rpartition("] ")[2].rpartition(": ")[2].strip()
            raise RequestRefused(f"response_format: the schema cannot be used: {reason}") from None
        return TokenConstraint(xgrammar.GrammarMatcher(grammar), self._vocab_size)
