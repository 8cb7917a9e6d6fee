"""pack on a CPU: rows in blocks, each block transposed in place.

A block of b rows [b, K] becomes [K, b] in the same bytes, so x W^T is a batch of products
x [T, K] @ [K, b]: MKL reads such a narrow right operand as it lies, where it would first copy a
plain weight into a form of its own, on one thread. docs/cpu_paths.md has the measurements.
"""

import torch
from torch import Tensor

BLOCK_ROWS = (64, 32, 16)  # the first that divides the rows
_CHUNK_VALUES = 1 << 20  # values transposed at a time


def pack(weight: Tensor, *, parts: int = 1) -> Tensor:
    """[..., N / b, K, b] in the storage of `weight`; float32 only, and N / parts must be a multiple of 16.

    Any other weight is returned as it is.
    """
    *lead, N, K = weight.shape
    block = next((b for b in BLOCK_ROWS if N % parts == 0 and N // parts % b == 0), 0)
    if weight.dtype is not torch.float32 or not block or not weight.numel():
        return weight
    plain, packed = weight.view(-1, block, K), weight.view(-1, K, block)
    step = max(1, _CHUNK_VALUES // (block * K))
    for first in range(0, len(plain), step):
        packed[first : first + step] = plain[first : first + step].transpose(1, 2).contiguous()
    return weight.view(*lead, N // block, K, block)
