"""kv_write, kv_gather, kv_scatter under the interpreter, bit for bit as their references; packed latents."""

import pytest
import torch

from moe_runtime.kernels.errors import KernelError
from moe_runtime.kernels.kv_gather import reference as gather_reference
from moe_runtime.kernels.kv_write import reference as write_reference
from moe_runtime.kernels.paged import latent
from tests.kernels.interpreter import interpreted
from tests.kernels.triton.cases import generator, normal

kv_write = interpreted("kv_write")
kv_gather = interpreted("kv_gather")


@pytest.mark.parametrize("rows", [0, 1, 7, 129])
@pytest.mark.parametrize(("source", "cache"), [(torch.float32, torch.bfloat16), (torch.bfloat16,) * 2])
def test_write(rows, source, cache):
    entries_TE = normal(rows, 100, dtype=source)[:, 8:88]
    slots_T = torch.randperm(160, generator=generator())[:rows]
    got, want = (torch.full((10, 16, 80), torch.nan, dtype=cache) for _ in range(2))
    kv_write.kv_write(got, slots_T, entries_TE)
    write_reference.kv_write(want, slots_T, entries_TE)
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize(("rank", "rope"), [(64, 16), (144, 16), (512, 64)])
def test_write_packed(rank, rope):
    entries_TE = normal(7, rank + rope, dtype=torch.bfloat16)
    entries_TE[1] = 0
    entries_TE[2] *= 1e4
    entries_TE[3] *= 1e-6
    entries_TE[4, :rank] = 448.0
    slots_T = torch.tensor([17, 0, 30, 3, 4, 31, 9])
    row_bytes = latent.row_bytes(rank, rope)
    got, want = (torch.full((2, 16, row_bytes), 255, dtype=torch.uint8) for _ in range(2))
    kv_write.kv_write(got, slots_T, entries_TE)
    write_reference.kv_write(want, slots_T, entries_TE)
    assert torch.equal(got, want)


def test_packed_layout_is_flash_mlas():
    assert latent.row_bytes(512, 64) == 656
    assert latent.rank_of(576, 656) == 512
    entries_TE = normal(3, 576, dtype=torch.bfloat16)
    entries_TE[0, :128] = torch.arange(128) * 3.5 / 127  # largest 3.5: scale 2^-7 = 3.5 / 448 exactly
    rows_TX = latent.pack(entries_TE, 512)
    scales_Tg = rows_TX[:, 512:528].contiguous().view(torch.float32)
    assert scales_Tg[0, 0] == 2.0**-7
    assert torch.equal(scales_Tg.log2(), scales_Tg.log2().round())
    first = rows_TX[0, :128].view(torch.float8_e4m3fn).float() * scales_Tg[0, 0]
    assert first[-1] == 3.5
    back_TE = latent.unpack(rows_TX, 512)
    assert torch.equal(back_TE[:, 512:], entries_TE[:, 512:].float())
    # e4m3 has 3 bits of mantissa: half a step is 1/16 of a value that is not subnormal.
    error = (back_TE - entries_TE.float()).abs()
    assert (error <= entries_TE.float().abs() / 16 + scales_Tg.max() * 2**-10).all()


def test_rows_that_no_rank_explains():
    with pytest.raises(KernelError, match="entries of 576 values do not pack into rows of 600 bytes"):
        latent.rank_of(576, 600)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.float32])
@pytest.mark.parametrize("blocks", [(), (4,), (3, 0, 8)])
def test_gather_and_scatter(dtype, blocks):
    # Random bits: NaNs with payloads included.
    bits = torch.randint(0, 256, (9, 16, 80, dtype.itemsize), dtype=torch.uint8, generator=generator())
    cache_BSE, blocks_N = bits.view(dtype).squeeze(-1), torch.tensor(blocks, dtype=torch.int64)
    got, want = (torch.zeros(len(blocks), 16, 80, dtype=dtype) for _ in range(2))
    kv_gather.kv_gather(cache_BSE, blocks_N, out_NSE=got)
    gather_reference.kv_gather(cache_BSE, blocks_N, out_NSE=want)
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(got.view(torch.uint8), cache_BSE[blocks_N].view(torch.uint8))
    copies = [torch.zeros_like(cache_BSE) for _ in range(2)]
    kv_gather.kv_scatter(copies[0], blocks_N, got)
    gather_reference.kv_scatter(copies[1], blocks_N, got)
    expected = torch.zeros_like(cache_BSE)
    expected[blocks_N] = cache_BSE[blocks_N]
    for copy in copies:
        assert torch.equal(copy.view(torch.uint8), expected.view(torch.uint8))


def test_gather_refuses_another_shape():
    cache = torch.zeros(4, 16, 8)
    with pytest.raises(KernelError, match=r"the buffer is torch.float32 \(1, 16, 8\)"):
        kv_gather.kv_gather(cache, torch.tensor([0, 1]), out_NSE=torch.zeros(1, 16, 8))
