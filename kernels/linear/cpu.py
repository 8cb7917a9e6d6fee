"""linear on a CPU: products of few rows, split so that all threads work.

MKL runs a product of few rows with a large weight on one thread, and copies the weight into a
packed form first. Cut along the outputs into a batch of products, each thread takes a share; with
up to SWAP_ROWS rows the weight as the left operand is read without a copy. docs/cpu_paths.md has
the measurements. Results differ from the reference by rounding only (other order of summation).
"""

import torch
from torch import Tensor
from torch.nn import functional as F

SWAP_ROWS = 4  # up to here W x^T beats x W^T
SPLIT_ROWS = 192  # from here on MKL uses its threads well by itself
MIN_BLOCK = 16  # outputs per product; narrower ones waste the vector units


def linear(
    x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, *, add_to: Tensor | None = None
) -> Tensor:
    """As the reference."""
    T, N = x_TK.shape[0], weight_NK.shape[0]
    blocks = split_blocks(N, T, x_TK.dtype)
    if not blocks:
        return _plain(x_TK, weight_NK, bias_N, add_to)
    if T <= SWAP_ROWS:
        y_TN = swapped_product(x_TK, weight_NK, blocks).view(N, T).t()
        if bias_N is not None:
            y_TN = y_TN + bias_N
        return y_TN.contiguous() if add_to is None else add_to.add_(y_TN)
    y_TBN = split_product(x_TK, weight_NK, blocks).transpose(0, 1)
    if bias_N is not None:
        y_TBN = y_TBN + bias_N.view(blocks, -1)
    if add_to is None:
        return y_TBN.reshape(T, N)
    add_to.view(T, blocks, -1).add_(y_TBN)
    return add_to


def _plain(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, add_to: Tensor | None) -> Tensor:
    if add_to is None:
        return F.linear(x_TK, weight_NK, bias_N)
    add_to.addmm_(x_TK, weight_NK.t())
    return add_to if bias_N is None else add_to.add_(bias_N)


def split_blocks(num_outputs: int, num_rows: int, dtype: torch.dtype) -> int:
    """Into how many products to cut; 0: do not (no rows, many rows, or not float32)."""
    if not 0 < num_rows <= SPLIT_ROWS or dtype is not torch.float32:
        return 0
    threads = torch.get_num_threads()
    if threads == 1 and num_rows > SWAP_ROWS:
        return 0
    blocks = 2 * threads
    while blocks > 1 and (num_outputs % blocks or num_outputs // blocks < MIN_BLOCK):
        blocks //= 2
    return blocks


def swapped_product(x_TK: Tensor, weight_NK: Tensor, blocks: int) -> Tensor:
    """W x^T as [blocks, N / blocks, T]: the transposed product, for up to SWAP_ROWS rows."""
    N, K = weight_NK.shape
    return torch.bmm(weight_NK.view(blocks, N // blocks, K), x_TK.t().expand(blocks, K, x_TK.shape[0]))


def split_product(x_TK: Tensor, weight_NK: Tensor, blocks: int) -> Tensor:
    """x W^T as [blocks, T, N / blocks]."""
    N, K = weight_NK.shape
    weight_BKN = weight_NK.view(blocks, N // blocks, K).transpose(1, 2)
    return torch.bmm(x_TK.expand(blocks, x_TK.shape[0], K), weight_BKN)
