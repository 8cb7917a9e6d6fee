"""choose_slots: bit for bit what the placement's own chooser says, in both modes; and what it counts."""

import numpy as np
import pytest
import torch

from moe_runtime.kernels.registry import select
from moe_runtime.placement.choose import choose_balanced, choose_sticky
from tests.kernels.interpreter import interpreted
from tests.kernels.triton.cases import ROWS, generator, poisoned

EXPERTS = 12
triton_choose = interpreted("choose_slots").choose_slots
CHOOSERS = {
    "triton": triton_choose,
    "reference": select("choose_slots", "any"),
    "cpu": select("choose_slots", "cpu"),
}


def tables(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """CSR tables of experts with 1 to 5 replicas of uneven shares, and two unused places."""
    gen = np.random.default_rng(seed)
    replicas = gen.integers(1, 6, EXPERTS)
    start = np.concatenate(([0], np.cumsum(replicas)))
    slots = np.concatenate((gen.permutation(start[-1]), [-1, -1]))
    shares = [np.concatenate(([0], np.sort(gen.integers(0, 65536, n - 1)))) for n in replicas]
    cumulative = np.concatenate((*shares, [0, 0]))
    return (
        torch.tensor(start, dtype=torch.int32),
        torch.tensor(slots, dtype=torch.int32),
        torch.tensor(cumulative, dtype=torch.uint16),
    )


@pytest.mark.parametrize("choose", CHOOSERS.values(), ids=CHOOSERS)
@pytest.mark.parametrize("tokens", ROWS)
def test_both_modes_are_those_of_the_placement(tokens, choose):
    csr = tables(tokens)
    start, slots, cumulative = (t.numpy() for t in csr)
    gen = generator(tokens)
    ids = torch.randint(-1, EXPERTS, (tokens, 3), generator=gen)
    ids[tokens // 2 :, 0] = 4  # one expert with many pairs
    request = torch.randint(-(2**62), 2**62, (tokens,), generator=gen) * 2
    position = torch.randint(0, 100_000, (tokens,), generator=gen)
    for offset in (0, 40_000):
        with poisoned():
            got = choose(ids, *csr, offset)
        want = choose_balanced(ids.numpy(), start, slots, cumulative, offset)
        assert torch.equal(got, torch.from_numpy(want))
    with poisoned():
        sticky = choose(ids, *csr, 0, mode="sticky", request_T=request, position_T=position)
    want = choose_sticky(
        ids.numpy(), request.numpy().view(np.uint64), position.numpy(), start, slots, cumulative
    )
    assert torch.equal(sticky, torch.from_numpy(want))


@pytest.mark.parametrize("choose", CHOOSERS.values(), ids=CHOOSERS)
@pytest.mark.parametrize("mode", ["balanced", "sticky"])
def test_only_real_tokens_count_and_go_anywhere(mode, choose):
    """Padding gets slot -1, is not dealt a share, and is not counted; counts add up over calls."""
    csr = tables(1)
    ids = torch.randint(-1, EXPERTS, (40, 3), generator=generator(5))
    where = {"mode": mode, "request_T": torch.arange(40), "position_T": torch.arange(40) * 3}
    real, load = torch.tensor([29], dtype=torch.int32), torch.arange(EXPERTS)
    got = choose(ids, *csr, 7, real_tokens=real, load_E=load, **where)
    short = {name: v[:29] if isinstance(v, torch.Tensor) else v for name, v in where.items()}
    assert torch.equal(got[:29], choose(ids[:29], *csr, 7, **short))
    assert (got[29:] == -1).all()
    counts = torch.bincount(ids[:29][ids[:29] >= 0], minlength=EXPERTS)
    assert torch.equal(load, torch.arange(EXPERTS) + counts)
    choose(ids, *csr, 7, real_tokens=real, load_E=load, **where)
    assert torch.equal(load, torch.arange(EXPERTS) + 2 * counts)


@pytest.mark.parametrize("choose", CHOOSERS.values(), ids=CHOOSERS)
def test_a_share_begins_with_its_first_point(choose):
    """One pair alone has point 32768, and an offset moves it: the start itself is the later replica's."""
    start, slots = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([5, 7], dtype=torch.int32)
    half = torch.tensor([0, 32_768], dtype=torch.uint16)
    for offset, slot in ((0, 7), (65_535, 5), (32_767, 7), (32_768, 5)):
        assert choose(torch.zeros(1, 1, dtype=torch.int64), start, slots, half, offset).item() == slot
