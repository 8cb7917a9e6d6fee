"""kv_write: store the step's cache entries. T rows, E values per entry."""

import torch
from torch import Tensor

from moe_runtime.kernels.paged import latent


def kv_write(cache_BSE: Tensor, kv_slots_T: Tensor, entries_TE: Tensor) -> None:
    """Write entries[t] to row kv_slots[t] of the flattened cache [blocks * block_tokens, entry].

    A uint8 cache holds packed latents (`paged.latent`): entries are quantised on the way.
    """
    width = cache_BSE.shape[-1]
    if cache_BSE.dtype == torch.uint8:
        rows = latent.pack(entries_TE, latent.rank_of(entries_TE.shape[1], width))
    else:
        rows = entries_TE.to(cache_BSE.dtype)
    cache_BSE.view(-1, width).index_copy_(0, kv_slots_T, rows)
