"""kv_write: store the step's cache entries. T rows."""

from torch import Tensor


def kv_write(cache_BSE: Tensor, kv_slots_T: Tensor, entries_TE: Tensor) -> None:
    """Write entries[t] to row kv_slots[t] of the flattened cache [blocks * block_tokens, entry]."""
    cache_BSE.view(-1, cache_BSE.shape[-1]).index_copy_(0, kv_slots_T, entries_TE.to(cache_BSE.dtype))
