"""Next tokens from logits. Noise is a function of (seed, output position) and of nothing else,
so the same request gives the same tokens on any rank, in any batch, before and after a handoff.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_runtime.scheduler.sampling import SamplingInputs

_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def noise_seed(seed: int, position: int) -> int:
    """A 63-bit generator seed for one output position (splitmix64's finaliser over both)."""
    z = (seed * _MIX + position + 1) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z ^ (z >> 31)) >> 1


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """Of W samples: the chosen token's logprob [W], and the K best tokens [W, K] with theirs [W, K]."""

    chosen_W: Tensor
    top_ids_WK: Tensor
    top_WK: Tensor


def sample(logits_NV: Tensor, inputs: SamplingInputs) -> Tensor:
    """int64 [N] token ids: argmax where the temperature is 0, else by the Gumbel-max rule.

    `logits_NV` is float32 [N, V]; it is left as it is.
    """
    logits_NV = _adjusted(logits_NV, inputs)
    tokens_N = logits_NV.argmax(dim=-1)
    for n in np.flatnonzero(inputs.temperature_N > 0):
        seed = noise_seed(int(inputs.seed_N[n]), int(inputs.output_position_N[n]))
        exponential_V = torch.empty(logits_NV.shape[1]).exponential_(
            generator=torch.Generator().manual_seed(seed)
        )
        # The largest logit becomes 0, so that no temperature, however small, overflows.
        scaled_V = (logits_NV[n] - logits_NV[n].max()) / float(inputs.temperature_N[n])
        kept_V = truncated(
            scaled_V, float(inputs.top_p_N[n]), int(inputs.top_k_N[n]), float(inputs.min_p_N[n])
        )
        tokens_N[n] = (kept_V - exponential_V.log().to(kept_V.device)).argmax()
    return tokens_N


def truncated(logits_V: Tensor, top_p: float, top_k: int, min_p: float) -> Tensor:
    """Logits with what the three cut off at -inf; the best token always stays, ties to the lower id.

    top_k keeps the k best. top_p then keeps the fewest best tokens whose probabilities sum to at
    least p (arXiv 1904.09751). min_p then drops what is less likely than p times the best.
    """
    if not 0 < top_k < len(logits_V) and top_p >= 1.0 and min_p <= 0.0:
        return logits_V
    sorted_V, ids_V = logits_V.sort(descending=True, stable=True)
    kept = top_k if 0 < top_k < len(logits_V) else len(logits_V)
    probs = sorted_V[:kept].softmax(-1)
    keep = (probs.cumsum(-1) - probs < top_p) & (probs >= min_p * probs[0])
    keep[0] = True
    ids = ids_V[:kept][keep]
    return torch.full_like(logits_V, float("-inf")).index_copy(0, ids, logits_V[ids])


def top_logprobs(logits_WV: Tensor, tokens_W: Tensor, count: int) -> TopLogprobs:
    """Logprobs of the sampled tokens and of the `count` best, under the model's own distribution."""
    logprobs_WV = logits_WV.log_softmax(-1)
    best = logprobs_WV.topk(min(count, logprobs_WV.shape[1]), dim=-1)
    return TopLogprobs(logprobs_WV.gather(1, tokens_W[:, None])[:, 0], best.indices, best.values)


def _adjusted(logits_NV: Tensor, inputs: SamplingInputs) -> Tensor:
    """A copy with edits and masks applied, or the logits themselves where there are none."""
    edits, masks = inputs.edits, inputs.masks
    if not len(edits.sample) and not len(masks.sample):
        return logits_NV
    logits_NV = logits_NV.clone()
    device = logits_NV.device
    if len(edits.sample):
        place = (_on(edits.sample.astype(np.int64), device), _on(edits.token.astype(np.int64), device))
        divide, add = _on(edits.divide, device), _on(edits.add, device)
        old = logits_NV[place]
        logits_NV[place] = torch.where(old > 0, old / divide, old * divide) + add
    if len(masks.sample):
        bits = np.unpackbits(masks.words.view(np.uint8), axis=1, bitorder="little")
        forbidden_MV = _on(bits[:, : logits_NV.shape[1]] == 0, device)
        rows_M = _on(masks.sample.astype(np.int64), device)
        logits_NV[rows_M] = logits_NV[rows_M].masked_fill(forbidden_MV, float("-inf"))
    return logits_NV


def _on(array: NDArray[np.generic], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
