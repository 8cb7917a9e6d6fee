"""Prompts: from a trace's request or a prompt file's line to token ids that the model can take.

Torch-free; a tokenizer is only ever a function that is passed in. A prompt that does not fit is
an error, never cut.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_runtime.errors import InputError
from moe_runtime.frontend.jsonl import Line, read_lines
from moe_runtime.frontend.trace import HASH_BLOCK_TOKENS, MOST_TOKENS, TraceRequest
from moe_runtime.spec.requests import SamplingParams

MAX_TEMPERATURE = 100.0
Encode = Callable[[str], Sequence[int]]
_FIELDS = ("prompt", "prompt_token_ids", "max_tokens", "temperature", "seed", "ignore_eos")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRequest:
    """A line of a prompt file: exactly one of `prompt` and `prompt_token_ids` is not None."""

    index: int
    where: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...] | None
    sampling: SamplingParams


def read_prompts(path: Path, *, want_logits: bool = False) -> list[PromptRequest]:
    """All lines of a prompt file, in order; InputError naming file, line and field."""
    return [_read(line, index, want_logits) for index, line in enumerate(read_lines(path))]


def _read(line: Line, index: int, want_logits: bool) -> PromptRequest:
    line.only(_FIELDS)
    if line.has("prompt") == line.has("prompt_token_ids"):
        both = line.has("prompt")
        line.fail("prompt", f"give prompt or prompt_token_ids, not {'both' if both else 'neither'}")
    ids = line.integers("prompt_token_ids") if line.has("prompt_token_ids") else None
    if ids is not None and not ids:
        line.fail("prompt_token_ids", "is empty")
    defaults = SamplingParams()
    return PromptRequest(
        index=index,
        where=line.where,
        prompt=line.text("prompt") if ids is None else None,
        prompt_token_ids=ids,
        sampling=SamplingParams(
            max_tokens=line.integer("max_tokens", default=defaults.max_tokens, low=1),
            temperature=line.number("temperature", default=defaults.temperature, low=0, high=MAX_TEMPERATURE),
            seed=line.integer("seed", default=defaults.seed),
            ignore_eos=line.boolean("ignore_eos", default=defaults.ignore_eos),
            want_logits=want_logits,
        ),
    )


def prompt_ids(request: PromptRequest, *, encode: Encode, vocab_size: int, max_tokens: int) -> list[int]:
    """The prompt as token ids.

    `max_tokens` bounds prompt and generated tokens together. Raises InputError for an id outside the
    vocabulary, a text without tokens, and a request that does not fit.
    """
    if request.prompt is None:
        ids = list(request.prompt_token_ids or ())
        for position, token in enumerate(ids):
            if token >= vocab_size:
                raise InputError(
                    f"{request.where}: prompt_token_ids[{position}]: is {token},"
                    f" the vocabulary ends at {vocab_size - 1}"
                )
    else:
        ids = _encode(request.prompt, request.where, encode)
    asked = request.sampling.max_tokens
    if len(ids) + asked > max_tokens:
        room = max_tokens - len(ids)
        hint = f"max_tokens up to {room} would fit" if room > 0 else "the prompt alone is too long"
        raise InputError(
            f"{request.where}: max_tokens: {len(ids)} prompt tokens + {asked} to generate"
            f" are {len(ids) + asked}, a sequence holds {max_tokens}; {hint}"
        )
    return ids


def usable_ids(vocab_size: int, special_ids: Sequence[int]) -> NDArray[np.int64]:
    """int64 [n], ascending: the ids random prompts are drawn from, all but the special ones.

    Raises InputError if fewer than two are left.
    """
    usable = np.setdiff1d(np.arange(vocab_size), np.asarray(special_ids, dtype=np.int64))
    if len(usable) < 2:
        raise InputError(f"a vocabulary of {vocab_size} has no two ids that are not special")
    return usable


def trace_prompts(
    requests: Sequence[TraceRequest], *, ids: NDArray[np.int64], encode: Encode, max_tokens: int
) -> list[list[int]]:
    """A prompt for each request of a trace.

    Text is encoded; other prompts are pseudo-random draws from `ids` (see `usable_ids`), a function of
    hash id and place in the block, so equal blocks give equal tokens in every run and on every host.
    `max_tokens` bounds prompt and generated tokens together: InputError names the longest request.
    """
    texts = [_encode(r.prompt, r.where, encode) if r.prompt else None for r in requests]
    lengths = [r.input_length if t is None else len(t) for r, t in zip(requests, texts, strict=True)]
    if requests:
        _require_fit(requests, lengths, max_tokens)
    return [_draw(r, ids) if t is None else t for r, t in zip(requests, texts, strict=True)]


def trace_lengths(requests: Sequence[TraceRequest], *, encode: Encode, max_tokens: int) -> list[int]:
    """Prompt tokens of each request, without making them; texts and errors as in `trace_prompts`."""
    lengths = [len(_encode(r.prompt, r.where, encode)) if r.prompt else r.input_length for r in requests]
    if requests:
        _require_fit(requests, lengths, max_tokens)
    return lengths


def _require_fit(requests: Sequence[TraceRequest], lengths: Sequence[int], max_tokens: int) -> None:
    totals = [n + r.output_length for r, n in zip(requests, lengths, strict=True)]
    worst = max(range(len(totals)), key=totals.__getitem__)
    total, request = totals[worst], requests[worst]
    if total <= max_tokens:
        return
    scaled = max(request.input_length, request.output_length) < MOST_TOKENS  # and not cut off there
    known = not request.prompt and scaled and math.isfinite(request.block_tokens)
    hint = f"; --scale-lengths {_scale_down(request, total, max_tokens):g} would fit" if known else ""
    raise InputError(
        f"{request.where}: input_length: {lengths[worst]} prompt tokens + {request.output_length}"
        f" to generate are {total}, a sequence holds {max_tokens}{hint}"
    )


def _scale_down(request: TraceRequest, total: int, max_tokens: int) -> float:
    """A scale of the original lengths with which all fit: rounding may add a token to each of two lengths."""
    scale = request.block_tokens / HASH_BLOCK_TOKENS * max(max_tokens - 1, 1) / (total + 2)
    digit = 10.0 ** (math.floor(math.log10(scale)) - 2)
    return math.floor(scale / digit) * digit


def _encode(text: str, where: str, encode: Encode) -> list[int]:
    ids = [int(i) for i in encode(text)]
    if not ids:
        raise InputError(f"{where}: prompt: has no tokens")
    return ids


def _draw(request: TraceRequest, ids: NDArray[np.int64]) -> list[int]:
    place = np.arange(request.input_length, dtype=np.int64)
    if request.hash_ids:
        # Blocks may be fractional, and rounding may add a token after the last one.
        block = np.minimum((place / request.block_tokens).astype(np.int64), len(request.hash_ids) - 1)
        offset = place - np.ceil(block * request.block_tokens).astype(np.int64)
        stream = 2 * np.asarray(request.hash_ids, dtype=np.uint64)[block]
    else:
        offset = place
        stream = np.full(len(place), 2 * request.index + 1, dtype=np.uint64)
    words = _mix(_mix(stream) + offset.astype(np.uint64))
    return [int(i) for i in ids[(words % np.uint64(len(ids))).astype(np.int64)]]


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64 (Steele, Lea, Flood 2014): one well-mixed word per counter value, the same everywhere."""
    z = x * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
