"""Whether a trace's requests fit the caches of a plan: asked before anything runs, measured or simulated."""

from collections.abc import Iterable

from moe_runtime.errors import InputError
from moe_runtime.launch.preflight import Preflight


def sequence_room(flight: Preflight) -> int:
    """Tokens, prompt and output together, that a sequence may have where it decodes."""
    decoding = next(d for d in flight.effective.deployments if d.name in ("decode", "unified"))
    return min(flight.model.max_positions, decoding.kv_cache.blocks * decoding.kv_cache.block_tokens)


def require_prefill_room(flight: Preflight, prompts: Iterable[tuple[str, int]]) -> None:
    """InputError for a prompt, (where it stands, tokens), that does not fit a prefill rank's cache."""
    for where, length in prompts:
        for d in flight.effective.deployments:
            room = d.kv_cache.blocks * d.kv_cache.block_tokens
            if length > room:
                raise InputError(
                    f"{where}: input_length: {length} prompt tokens, a rank of {d.name} caches {room};"
                    f" deployments.{d.name}.kv_cache.blocks={-(-length // d.kv_cache.block_tokens)} would do"
                )
