"""Weight formats of grouped_gemm and their codecs: what a weight's tensors mean, and nothing else.

s slots, O outputs, K inputs. Every tensor has the slot axis first and one contiguous range per
slot. A plain weight is a tensor [s, O, K]; the others are the tuples below.

The four-bit formats keep 32 inputs of an output in four int32 words. Nibble p of word c belongs to
input 8 * (p % 4) + 2 * c + p // 4 of its 32: the order in which a thread of a matrix instruction
holds them, so that a kernel takes two neighbours from a word with one shift and one mask.
`words` brings the nibbles of published checkpoints (byte j: input 2j low, 2j + 1 high) into it.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from moe_runtime.kernels.errors import KernelError
from moe_runtime.kernels.quantize_fp8_block.reference import quantize_fp8_block

FP8_BLOCK: Literal[128] = 128  # a scale covers 128 outputs x 128 inputs of a weight, 128 inputs of a row
GROUP = 32  # a scale covers 32 inputs of one output (four-bit formats)

_WORD_NIBBLES = 8
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # OCP Microscaling Formats 1.0, table 5
_E2M1_EDGES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # halfway between neighbours
_E8M0_BIAS = 127


class Fp8Block(NamedTuple):
    """values e4m3 [s, O, K]; scales fp32 [s, ceil(O / 128), ceil(K / 128)]. Element = value * scale."""

    values: Tensor
    scales: Tensor


class Mxfp4(NamedTuple):
    """words int32 [s, O, K / 8] of e2m1; scales uint8 [s, O, K / 32], e8m0: 2 ** (scale - 127)."""

    words: Tensor
    scales: Tensor


class Int4(NamedTuple):
    """words int32 [s, O, K / 8] of value + 8; scales bf16 [s, O, K / 32]. Element = value * scale in bf16."""

    words: Tensor
    scales: Tensor


Weight = Tensor | Fp8Block | Mxfp4 | Int4


def outputs(weight: Weight) -> int:
    """O."""
    return (weight if isinstance(weight, Tensor) else weight[0]).shape[1]


def inputs(weight: Weight) -> int:
    """K."""
    if isinstance(weight, Tensor):
        return weight.shape[2]
    return weight[0].shape[2] * (1 if isinstance(weight, Fp8Block) else _WORD_NIBBLES)


def words(nibbles: Tensor) -> Tensor:
    """int32 [..., K / 8] of published bytes uint8 [..., K / 2]; KernelError unless K is a multiple of 32."""
    if nibbles.shape[-1] % (GROUP // 2):
        raise KernelError(f"four-bit weights of {2 * nibbles.shape[-1]} inputs: not a multiple of {GROUP}")
    in_order = torch.stack((nibbles & 0xF, nibbles >> 4), -1).view(*nibbles.shape[:-1], -1, GROUP)
    by_word = in_order[..., _word_order(nibbles.device)].view(*in_order.shape[:-1], 4, _WORD_NIBBLES)
    # In int64, then cut to 32 bits: nibble 7 reaches the sign.
    packed = (by_word.long() << _shifts(nibbles.device)).sum(-1)
    return packed.to(torch.int32).view(*nibbles.shape[:-1], -1)


def of_slot(weight: Weight, slot: int) -> Weight:
    """The weight of one slot, still with a slot axis (of 1)."""
    one = slice(slot, slot + 1)
    return weight[one] if isinstance(weight, Tensor) else type(weight)(*(t[one] for t in weight))


def decode(weight: Weight) -> Tensor:
    """[s, O, K]: the elements in fp32, those of Int4 rounded to bf16; a plain weight as it is."""
    if isinstance(weight, Tensor):
        return weight
    if isinstance(weight, Fp8Block):
        num_outputs, K = weight.values.shape[1:]
        grown = weight.scales.repeat_interleave(FP8_BLOCK, 1).repeat_interleave(FP8_BLOCK, 2)
        return weight.values.float() * grown[:, :num_outputs, :K]
    nibbles = _nibbles(weight.words)
    if isinstance(weight, Int4):
        values, scales = nibbles.float() - 8, weight.scales.float()
    else:
        table = torch.tensor((*_E2M1, *(-v for v in _E2M1)), device=nibbles.device)
        values, scales = table[nibbles], torch.exp2(weight.scales.float() - _E8M0_BIAS)
    elements = (values.view(*scales.shape, GROUP) * scales.unsqueeze(-1)).view(nibbles.shape)
    return elements.bfloat16().float() if isinstance(weight, Int4) else elements


def encode_fp8(weight_sOK: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Fp8Block:
    """Every slot as `quantize_fp8_block` quantises a weight."""
    slots = [quantize_fp8_block(w, rows_per_block=FP8_BLOCK, dtype=dtype) for w in weight_sOK]
    return Fp8Block(
        torch.stack([values for values, _ in slots]), torch.stack([scales for _, scales in slots])
    )


def encode_mxfp4(weight_sOK: Tensor) -> Mxfp4:
    """Scale 2 ** (floor(log2(largest)) - 2) per 32 inputs; ties to the even code, too large ones to 6."""
    groups = weight_sOK.float().view(*weight_sOK.shape[:2], -1, GROUP)
    exponent = groups.abs().amax(-1).clamp_(min=2.0**-120).log2().floor() - 2
    scaled = groups / torch.exp2(exponent).unsqueeze(-1)
    edges = torch.tensor(_E2M1_EDGES, device=scaled.device)
    magnitude = scaled.abs()
    up, down = (torch.bucketize(magnitude, edges, right=right) for right in (True, False))
    code = torch.where(up % 2 == 0, up, down) | ((scaled < 0).long() << 3)
    return Mxfp4(words(_bytes(code, weight_sOK)), (exponent + _E8M0_BIAS).to(torch.uint8))


def encode_int4(weight_sOK: Tensor) -> Int4:
    """Scale = largest magnitude / 7 per 32 inputs, rounded to bf16."""
    groups = weight_sOK.float().view(*weight_sOK.shape[:2], -1, GROUP)
    scales = (groups.abs().amax(-1).clamp_(min=1e-12) / 7).to(torch.bfloat16)
    code = (groups / scales.float().unsqueeze(-1)).round_().clamp_(-8, 7).long() + 8
    return Int4(words(_bytes(code, weight_sOK)), scales)


def _bytes(code: Tensor, like_sOK: Tensor) -> Tensor:
    """Published bytes [s, O, K / 2] of codes in input order."""
    pairs = code.view(*like_sOK.shape[:2], -1, 2)
    return (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8)


def _nibbles(packed: Tensor) -> Tensor:
    """int64 [..., K]: the inverse of `words`, one nibble an element."""
    apart = (packed.unsqueeze(-1).long() >> _shifts(packed.device)) & 0xF
    by_word = apart.view(*packed.shape[:-1], -1, GROUP)
    in_order = torch.empty_like(by_word)
    in_order[..., _word_order(packed.device)] = by_word
    return in_order.view(*packed.shape[:-1], -1)


def _word_order(device: torch.device) -> Tensor:
    """int64 [32]: the input that nibble p of word c holds, at 8 * c + p."""
    word, p = torch.arange(4, device=device)[:, None], torch.arange(_WORD_NIBBLES, device=device)
    return (8 * (p % 4) + 2 * word + p // 4).view(-1)


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(0, 32, 4, device=device)
