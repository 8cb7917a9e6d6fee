"""choose_slots against the sentence that defines it, and its CPU path against the reference."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_runtime.kernels.choose_slots.reference import choose_slots as reference
from moe_runtime.kernels.registry import select


def plain(expert_ids, start, slots, cumulative, offset):
    flat = [e for row in expert_ids for e in row]
    seen: dict[int, int] = {}
    out = []
    for e in flat:
        if e < 0:
            out.append(-1)
            continue
        i, n = seen.get(e, 0), flat.count(e)
        seen[e] = i + 1
        point = ((2 * i + 1) * 32768 // n + offset) % 65536
        bounds = [*cumulative[start[e] : start[e + 1]], 65536]
        holders = [r for r in range(len(bounds) - 1) if bounds[r] <= point < bounds[r + 1]]
        assert len(holders) == 1
        out.append(slots[start[e] + holders[0]])
    return out


@st.composite
def tables(draw):
    """CSR tables of 6 experts with 1-4 replicas (or one each) and some unused places at the end."""
    single = draw(st.booleans())
    replicas = [1] * 6 if single else [draw(st.integers(1, 4)) for _ in range(6)]
    start = [sum(replicas[:e]) for e in range(7)]
    slots = draw(st.permutations(range(start[-1])))
    cumulative = []
    for count in replicas:
        cuts = draw(st.lists(st.integers(0, 65535), min_size=count - 1, max_size=count - 1))
        cumulative += [0, *sorted(cuts)]
    unused = draw(st.integers(0, 2))
    return start, [*slots, *[-1] * unused], [*cumulative, *[0] * unused]


@settings(max_examples=200, deadline=None)
@given(
    tables(),
    st.lists(st.lists(st.integers(-1, 5), min_size=3, max_size=3), max_size=12),
    st.integers(0, 65535),
)
def test_choose_slots_is_the_plain_loop(csr, expert_ids, offset):
    start, slots, cumulative = csr
    args = (
        torch.tensor(expert_ids, dtype=torch.int64).view(-1, 3),
        torch.tensor(start, dtype=torch.int32),
        torch.tensor(slots, dtype=torch.int32),
        torch.tensor(cumulative, dtype=torch.uint16),
        offset,
    )
    before = args[0].clone()
    want = plain(expert_ids, start, slots, cumulative, offset)
    for choose in (reference, select("choose_slots", "cpu")):
        got = choose(*args)
        assert got.dtype == torch.int64
        assert got.shape == args[0].shape
        assert got.reshape(-1).tolist() == want
    assert torch.equal(args[0], before)


def test_replicas_get_their_shares_to_within_one_pair():
    """1000 pairs of one expert over shares 1/2, 1/4, 1/4."""
    ids = torch.zeros(250, 4, dtype=torch.int64)
    slots = select("choose_slots", "cpu")(
        ids,
        torch.tensor([0, 3], dtype=torch.int32),
        torch.tensor([7, 8, 9], dtype=torch.int32),
        torch.tensor([0, 32768, 49152], dtype=torch.uint16),
        12345,
    )
    counts = torch.bincount(slots.view(-1), minlength=10)[7:]
    assert (counts - torch.tensor([500, 250, 250])).abs().max() <= 1
