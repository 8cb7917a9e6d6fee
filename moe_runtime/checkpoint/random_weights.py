"""Random weights that behave like a trained model where it matters: spread logits, skewed routing.

Owns the distribution of each kind of tensor; knows no file format. Every tensor has a
generator of its own, seeded by (seed, name), so tensors can be made in any order.
"""

import hashlib
import math

import torch
from torch import Tensor

LOGIT_STD = 3.0
BIAS_STD = 0.02
# Standard deviation of the router logits of the r-th hottest expert: ROUTER_STD * (r + 1) ** -ROUTER_DECAY.
# An expert with wide logits is chosen by nearly every token on its side of the hidden space.
ROUTER_STD, ROUTER_DECAY = 3.0, 1.0
# Gain over 1 / sqrt(fan in), by the last part of the tensor's name; 1 for the others.
_GAINS = {
    "q_norm": 1.7,
    "k_norm": 1.7,
    "q_b_proj": 1.6,
    "kv_b_proj": 1.6,
    "down_proj": 1.6,
    "o_proj": 0.8,
}


def random_tensor(name: str, shape: tuple[int, ...], *, seed: int) -> Tensor:
    """The float32 values of one checkpoint tensor, a function of (name, shape, seed)."""
    generator = torch.Generator().manual_seed(_tensor_seed(name, seed))
    noise = torch.randn(shape, generator=generator)
    kind = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if kind == "e_score_correction_bias":
        return noise * BIAS_STD
    if kind.endswith("norm"):
        return _GAINS.get(kind, 1.0) * (1.0 + 0.1 * noise)
    if kind == "embed_tokens":
        return noise
    scale = 1.0 / math.sqrt(shape[-1])
    if kind == "lm_head":
        return noise * (LOGIT_STD * scale)
    if kind == "gate":
        rank = torch.randperm(shape[0], generator=generator) + 1.0
        return noise * (ROUTER_STD * scale * rank[:, None] ** -ROUTER_DECAY)
    return noise * (_GAINS.get(kind, 1.0) * scale)


def _tensor_seed(name: str, seed: int) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
