"""Leases, layout fingerprints and the host transport: stale reads are refused, never served."""

import time

import numpy as np
import pytest
import torch

from moe_runtime.errors import LayoutMismatch, LeaseExpired, TransferError
from moe_runtime.spec.kv import KVGroup, KVSpec
from moe_runtime.transfer.handoff import KVSource
from moe_runtime.transfer.host import HostPool, HostTransport, PoolExport
from moe_runtime.transfer.interface import fingerprint
from moe_runtime.transfer.leases import Leases


def group(dtype: str = "float32", **changes) -> KVGroup:
    values = {"name": "mla_latent", "layers": (0, 1, 2), "entry": 24, "dtype": dtype, "block_tokens": 4}
    return KVGroup(**{**values, **changes})


def layout(g: KVGroup, model: str = "m"):
    return fingerprint(model, KVSpec(groups=(g,)))


def source(lease: int, blocks: list[int]) -> KVSource:
    return KVSource(instance="prefill/0", rank=0, lease=lease, num_tokens=4 * len(blocks), blocks=[blocks])


def wait(pull) -> bool:
    deadline = time.monotonic() + 10
    while (ended := pull.poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return ended


@pytest.fixture(params=["float32", "bfloat16"])
def pair(request):
    g = group(request.param)
    pool = HostPool.create(g, 16)
    for i, layer in enumerate(pool.cache):
        layer.copy_(torch.randn(layer.shape, generator=torch.Generator().manual_seed(i)))
    export = PoolExport(
        instance="prefill/0", rank=0, address=pool.window.address, num_blocks=16, layout=layout(g)
    )
    mine = [torch.zeros(8, 4, 24, dtype=getattr(torch, request.param)) for _ in g.layers]
    transport = HostTransport(mine, g, layout(g), [export])
    yield pool, mine, transport
    transport.close()


def test_a_pull_brings_the_leased_blocks_in_order(pair):
    pool, mine, transport = pair
    blocks = np.array([3, 11, 7], np.int32)
    pool.stamp(blocks, 5)
    assert wait(transport.start_pull(source(5, blocks.tolist()), np.array([6, 0, 2, 1], np.int32)))
    for remote, local in zip(pool.cache, mine, strict=True):
        assert torch.equal(local[[6, 0, 2]], remote[[3, 11, 7]])
        assert not local[[1, 3, 4, 5, 7]].any()


@pytest.mark.parametrize("lease", [None, 6])
def test_a_lease_that_is_over_is_refused(pair, lease):
    pool, _, transport = pair
    blocks = np.array([3, 11], np.int32)
    pool.stamp(blocks, 5)
    pool.stamp(blocks, lease)
    with pytest.raises(LeaseExpired, match="lease 5 of prefill/0 rank 0"):
        wait(transport.start_pull(source(5, blocks.tolist()), np.array([0, 1], np.int32)))


def test_leases_that_share_a_prefix_end_apart(pair):
    pool, _, transport = pair
    first, second = np.array([3, 11], np.int32), np.array([3, 11, 7], np.int32)
    pool.stamp(first, 5)
    pool.stamp(second, 6)
    assert wait(transport.start_pull(source(5, first.tolist()), np.array([0, 1], np.int32)))
    pool.stamp(first, None)
    with pytest.raises(LeaseExpired):
        wait(transport.start_pull(source(5, first.tolist()), np.array([0, 1], np.int32)))
    assert wait(transport.start_pull(source(6, second.tolist()), np.array([0, 1, 2], np.int32)))


def test_bad_sources_are_errors_and_the_next_pull_works(pair):
    pool, _, transport = pair
    stranger = KVSource(instance="prefill/1", rank=0, lease=0, num_tokens=4, blocks=[[0]])
    with pytest.raises(TransferError, match="prefill/1 rank 0 exports no KV pool"):
        wait(transport.start_pull(stranger, np.array([0], np.int32)))
    with pytest.raises(TransferError, match="3 blocks offered, 1 allocated"):
        wait(transport.start_pull(source(1, [0, 1, 2]), np.array([0], np.int32)))
    with pytest.raises(TransferError):
        wait(transport.start_pull(source(1, [99]), np.array([0], np.int32)))
    pool.stamp(np.array([2], np.int32), 1)
    assert wait(transport.start_pull(source(1, [2]), np.array([0], np.int32)))


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (layout(group(), model="other"), "model: here m, there other"),
        (layout(group(block_tokens=8)), "block_tokens: here 4, there 8"),
        (layout(group(entry=25)), "groups"),
        (layout(group("bfloat16")), "groups"),
    ],
)
def test_another_layout_is_refused_at_connect_with_both_values(other, named):
    g = group()
    pool = HostPool.create(g, 4)
    export = PoolExport(instance="prefill/0", rank=0, address=pool.window.address, num_blocks=4, layout=other)
    with pytest.raises(LayoutMismatch, match=named):
        HostTransport([], g, layout(g), [export])


def test_leases_end_exactly_once():
    leases = Leases(seconds=2.0)
    blocks = np.array([1, 2, 3], np.int32)
    first = leases.grant(10, blocks, now=0.0)
    second = leases.grant(11, blocks + 3, now=1.0)
    assert (first.id, second.id, leases.num_blocks) == (0, 1, 6)
    assert leases.expire(now=1.9) == []
    assert leases.next_expiry() == 2.0
    leases.renew(1, now=1.9)
    leases.renew(7, now=1.9)
    assert [lease.id for lease in leases.expire(now=3.5)] == [0]
    assert leases.next_expiry() == 3.9
    assert leases.release(0) is None
    assert leases.release(1) is not None
    assert leases.release(1) is None
    assert leases.release_request(11) == []
    assert leases.next_expiry() is None
    assert leases.num_blocks == 0


def test_an_aborted_request_gives_up_its_leases():
    leases = Leases(seconds=2.0)
    leases.grant(10, np.array([4], np.int32), now=0.0)
    leases.grant(11, np.array([5], np.int32), now=0.0)
    assert [b.tolist() for b in leases.release_request(10)] == [[4]]
    assert len(leases) == 1
