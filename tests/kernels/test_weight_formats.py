"""Codecs of the experts' weight formats against their definitions."""

import pytest
import torch

from moe_runtime.kernels.errors import KernelError
from moe_runtime.kernels.grouped_gemm import formats


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_words_keep_published_nibbles_in_a_threads_order():
    # Byte j: input 2j low, 2j + 1 high. Inputs numbered 0..15 twice over.
    published = torch.tensor([(2 * j % 16) | ((2 * j + 1) % 16) << 4 for j in range(16)], dtype=torch.uint8)
    words = formats.words(published)
    assert words.dtype == torch.int32
    # Word c, nibbles from the low end: inputs 2c, 8 + 2c, 16 + 2c, 24 + 2c, then the same + 1.
    want = []
    for c in range(4):
        inputs = [8 * i + 2 * c + h for h in range(2) for i in range(4)]
        want.append(sum((k % 16) << 4 * p for p, k in enumerate(inputs)))
    assert [w % 2**32 for w in words.tolist()] == want
    with pytest.raises(KernelError, match="multiple of 32"):
        formats.words(published[:8])


def test_mxfp4_values():
    table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    codes = torch.arange(32) % 16
    published = (codes[0::2] | codes[1::2] << 4).to(torch.uint8).view(1, 1, 16)
    for exponent in (0, 100, 127, 130, 250):
        scales = torch.full((1, 1, 1), exponent, dtype=torch.uint8)
        weight = formats.Mxfp4(formats.words(published), scales)
        assert formats.inputs(weight) == 32
        want = [v * 2.0 ** (exponent - 127) for v in [*table, *(-t for t in table)] * 2]
        assert formats.decode(weight).flatten().tolist() == want


def test_mxfp4_rounds_to_nearest_with_ties_to_even():
    row = torch.zeros(1, 1, 32)
    row[0, 0, :10] = torch.tensor([4.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, -3.5, 0.3, -0.2])
    got = formats.decode(formats.encode_mxfp4(row))[0, 0, :10].tolist()
    assert got == [4.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, -4.0, 0.5, 0.0]


def test_int4_values():
    weight = formats.encode_int4(randn(2, 5, 64))
    groups = formats.decode(weight).view(2, 5, 2, 32)
    steps = groups / weight.scales.float().unsqueeze(-1)
    assert (steps - steps.round()).abs().max() <= 7 / 2**8  # products are rounded to bf16
    assert steps.abs().amax(-1).round().eq(7).all()
    assert weight.scales.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("encode", "bound"),
    [(formats.encode_fp8, 1 / 16), (formats.encode_int4, 1 / 14 + 0.004), (formats.encode_mxfp4, 0.26)],
)
def test_codecs_are_near(encode, bound):
    """Error against the largest magnitude of a group: half a step of the format."""
    weight = randn(3, 160, 96, seed=1)
    got = formats.decode(encode(weight))
    assert got.shape == weight.shape
    groups = weight.view(3, 160, 3, 32)
    worst = ((got - weight).view(groups.shape).abs() / groups.abs().amax(-1, keepdim=True)).max()
    assert 0 < worst <= bound


def test_fp8_scale_grid_covers_odd_sizes():
    weight = randn(1, 1000, 320, seed=2)
    weight[0, :128] *= 100
    encoded = formats.encode_fp8(weight)
    assert encoded.scales.shape == (1, 8, 3)
    assert encoded.scales[0, 0].min() > 50 * encoded.scales[0, 1].max() / 2
    assert torch.equal(encoded.values.float().abs().view(1000, 320)[:128, :128].max(), torch.tensor(448.0))
    row127, row128 = (formats.decode(encoded)[0, row] / weight[0, row] for row in (127, 128))
    assert (row127 - 1).abs().max() < 0.07
    assert (row128 - 1).abs().median() < 0.07
