"""mla_assemble: what lies between an MLA layer's projections and its attention.

T rows, A heads, Q = nope + D values per query head, R latent rank, D rotated values, E = R + D.
"""

from torch import Tensor

from moe_runtime.kernels.kv_write.reference import kv_write
from moe_runtime.kernels.rms_norm.reference import rms_norm
from moe_runtime.kernels.rope.reference import rope


def mla_assemble(
    q_TAQ: Tensor,
    entries_TE: Tensor,
    latent_weight_R: Tensor,
    cos_sin_TD: Tensor,
    cache_BSE: Tensor,
    kv_slots_T: Tensor,
    *,
    eps: float,
    interleaved: bool,
) -> None:
    """Rotate the last D values of every query head in place, and write the rows' cache entries.

    An entry is the first R values of `entries`, normalised, then its last D, rotated; it goes to row
    kv_slots[t] (int64) of the flattened cache. `entries` itself may be changed.
    """
    R, D = len(latent_weight_R), cos_sin_TD.shape[1]
    rope(q_TAQ[..., q_TAQ.shape[2] - D :], cos_sin_TD, interleaved=interleaved)
    latent_TR = entries_TE[:, :R]
    rms_norm(latent_TR, latent_weight_R, eps, out=latent_TR)
    rope(entries_TE[:, R:].unsqueeze(1), cos_sin_TD, interleaved=interleaved)
    kv_write(cache_BSE, kv_slots_T, entries_TE)
