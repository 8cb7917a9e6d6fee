"""Traces: when requests arrive, how long they are, and which prefixes they share.

Owns the file format (docs/trace.md); knows nothing of token ids, tokenizers or ranks.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from moe_runtime.errors import InputError
from moe_runtime.frontend.jsonl import Line, read_lines

HASH_BLOCK_TOKENS = 512
_LONGEST_MS = 1e12
MOST_TOKENS = 1 << 40
_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids", "prompt")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request of a trace, times and lengths already scaled.

    index          order in the file, from 0
    where          `file:line`, for messages
    arrival        seconds after the first arrival
    input_length   prompt tokens; 0 if `prompt` decides
    output_length  tokens to generate
    hash_ids       one per block of the prompt; equal ids mean equal tokens. Empty: a prompt of its own
    block_tokens   tokens of such a block, 512 x the scale; may be fractional
    prompt         text of the prompt, if the trace has it
    """

    index: int
    where: str
    arrival: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    block_tokens: float
    prompt: str | None


def read_trace(
    path: Path, *, limit: int | None = None, speed: float = 1.0, scale_lengths: float = 1.0
) -> list[TraceRequest]:
    """The requests of a trace in order of arrival, the first at 0 seconds.

    `limit` keeps the first requests to arrive, `speed` divides the time between arrivals,
    `scale_lengths` multiplies prompt and output lengths (at least 1 token remains) and the size of
    the blocks, so that what was shared stays shared.

    Raises InputError naming file, line and field, or the option.
    """
    if limit is not None and limit < 1:
        raise InputError(f"--limit is {limit}, must be 1 or more")
    for option, value in (("--speed", speed), ("--scale-lengths", scale_lengths)):
        if not (math.isfinite(value) and value > 0):
            raise InputError(f"{option} is {value}, must be a number above 0")
    timed = [_read(line, index, scale_lengths) for index, line in enumerate(read_lines(path))]
    timed.sort(key=lambda pair: pair[0])
    timed = timed[:limit]
    first, last = timed[0][0], timed[-1][0]
    if (last - first) / speed > 2 * _LONGEST_MS:
        raise InputError(f"--speed is {speed:g}: the last request would arrive after more than 60 years")
    return [
        TraceRequest(
            index=r.index,
            where=r.where,
            arrival=(timestamp - first) / 1e3 / speed,
            input_length=r.input_length,
            output_length=r.output_length,
            hash_ids=r.hash_ids,
            block_tokens=r.block_tokens,
            prompt=r.prompt,
        )
        for timestamp, r in timed
    ]


def _read(line: Line, index: int, scale: float) -> tuple[float, TraceRequest]:
    """(timestamp in ms, the request without its arrival)."""
    line.no_misspelling(_FIELDS)
    timestamp = line.number("timestamp")
    if abs(timestamp) > _LONGEST_MS:
        line.fail("timestamp", f"is {timestamp:g}, must lie within {_LONGEST_MS:g} ms, about 30 years")
    output_length = line.integer("output_length", low=1)
    prompt = line.text("prompt") if line.has("prompt") else None
    if prompt is not None and scale != 1:
        line.fail("prompt", f"a text cannot be scaled: replay this trace without --scale-lengths {scale:g}")
    input_length = 0 if prompt is not None else line.integer("input_length", low=1)
    hash_ids = line.integers("hash_ids") if line.has("hash_ids") and prompt is None else ()
    blocks = -(-input_length // HASH_BLOCK_TOKENS)
    if hash_ids and len(hash_ids) != blocks:
        line.fail(
            "hash_ids",
            f"has {len(hash_ids)} ids, but input_length {input_length} is {blocks} blocks"
            f" of {HASH_BLOCK_TOKENS} tokens",
        )
    return timestamp, TraceRequest(
        index=index,
        where=line.where,
        arrival=0.0,
        input_length=0 if prompt is not None else _scaled(input_length, scale),
        output_length=_scaled(output_length, scale),
        hash_ids=hash_ids,
        block_tokens=HASH_BLOCK_TOKENS * scale,
        prompt=prompt,
    )


def _scaled(length: int, scale: float) -> int:
    """A length of at least one token; what is absurdly large stays so and is refused later."""
    return max(1, round(min(length * scale, MOST_TOKENS)))
