"""Tokens that are never stored, and names of prefixes against hashes of them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moe_runtime.scheduler.blocks import BlockPool
from moe_runtime.scheduler.prefix import PrefixCache
from moe_runtime.scheduler.sequences import Sequence
from moe_runtime.virtual.cluster.requests import (
    Requests,
    VirtualPrefix,
    VirtualRequest,
    make_virtual_sequence,
)


def draw(rng: np.random.Generator, index: int) -> VirtualRequest:
    length = int(rng.integers(1, 70))
    block = float(rng.choice([8.0, 12.0, 10.5]))
    blocks = -(-length // int(block))
    ids = tuple(int(i) for i in rng.integers(0, 2, blocks))
    return VirtualRequest(
        index=index,
        at=0.0,
        input_length=length,
        output_length=int(rng.integers(1, 20)),
        hash_ids=ids if rng.random() < 0.8 else (),
        block_tokens=block,
    )


@given(st.integers(0, 2**20))
def test_slices_agree_with_single_tokens_and_equal_ids_with_equal_tokens(seed):
    rng = np.random.default_rng(seed)
    requests, one = Requests(), draw(rng, 0)
    sequence = make_virtual_sequence(requests.request(one))
    tokens = sequence.tokens
    assert len(tokens) == one.input_length + one.output_length
    whole = tokens[:]
    assert whole.tolist() == [int(tokens[i]) for i in range(len(tokens))]
    start, stop = sorted(int(i) for i in rng.integers(0, len(tokens) + 1, 2))
    assert tokens[start:stop].tolist() == whole[start:stop].tolist()
    assert not whole[one.input_length :].any()
    other = VirtualRequest(**{f: getattr(one, f) for f in one.__slots__} | {"index": 1})
    same = make_virtual_sequence(requests.request(other)).tokens
    shared = one.input_length if one.hash_ids else 0
    assert (same[:shared] == whole[:shared]).all()
    if not one.hash_ids:
        assert (same[: one.input_length] != whole[: one.input_length]).all()


@given(st.integers(0, 2**20), st.sampled_from([4, 8]))
def test_prefixes_are_found_where_hashes_of_the_tokens_would_find_them(seed, unit):
    """Prompts only: what is generated is found in its own request's prefix alone."""
    rng = np.random.default_rng(seed)
    requests = Requests()
    block = 12.0  # blocks of one size in a trace
    made = [draw(rng, index) for index in range(6)]
    made = [VirtualRequest(**{f: getattr(m, f) for f in m.__slots__} | {"block_tokens": block}) for m in made]
    sides: list[tuple[BlockPool, PrefixCache]] = []
    for kind in (PrefixCache, VirtualPrefix):
        pool = BlockPool(200)
        sides.append((pool, kind(pool, block_tokens=unit, unit_tokens=unit, model="", enabled=True)))
    for one in made:
        found = []
        for pool, prefix in sides:
            sequence: Sequence = make_virtual_sequence(requests.request(one))
            found.append(prefix.find(sequence))
            pool.share(found[-1])
            rest = pool.allocate(-(-one.input_length // unit) - len(found[-1]))
            blocks = np.concatenate([np.array(found[-1], np.int32), rest])
            prefix.admitted(sequence, len(found[-1]))
            prefix.keep(sequence, blocks, one.input_length)
        assert found[0] == found[1]
