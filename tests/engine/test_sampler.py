"""Sampling: what each parameter does to the distribution, and that noise depends on nothing else."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_runtime.engine.device_step import Samples
from moe_runtime.engine.extras import extras_of
from moe_runtime.engine.sampler import sample, top_logprobs, truncated
from moe_runtime.scheduler.sampling import Edits, Masks, greedy

INF = float("inf")


def edits(*rows):
    sample_, token, divide, add = zip(*rows, strict=True)
    return Edits(
        sample=np.array(sample_, np.int32),
        token=np.array(token, np.int32),
        divide=np.array(divide, np.float32),
        add=np.array(add, np.float32),
    )


def kept(logits, **cuts):
    values = {"top_p": 1.0, "top_k": 0, "min_p": 0.0} | cuts
    row = truncated(torch.tensor(logits), values["top_p"], values["top_k"], values["min_p"])
    return [i for i, x in enumerate(row.tolist()) if x > -INF]


def test_truncation_by_hand():
    logits = np.log([0.5, 0.3, 0.1, 0.1]).astype(np.float32)
    assert kept(logits) == [0, 1, 2, 3]
    assert kept(logits, top_k=3) == [0, 1, 2], "ties go to the lower id"
    assert kept(logits, top_p=0.5) == [0]
    assert kept(logits, top_p=0.51) == [0, 1]
    assert kept(logits, top_p=0.0) == [0], "the best always stays"
    assert kept(logits, min_p=0.3) == [0, 1]
    assert kept(logits, min_p=1.0) == [0]
    assert kept(logits, top_k=2, top_p=0.6) == [0], "top_p is of what top_k left: 0.625"
    assert kept(logits, top_k=99) == [0, 1, 2, 3]


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.floats(-9, 9, width=32), min_size=1, max_size=30),
    top_p=st.floats(0, 1),
    top_k=st.integers(0, 40),
    min_p=st.floats(0, 1),
)
def test_truncation_keeps_a_prefix_of_the_best(values, top_p, top_k, min_p):
    row = torch.tensor(values)
    out = truncated(row, top_p, top_k, min_p)
    order = row.sort(descending=True, stable=True).indices
    alive = out[order] > -INF
    count = int(alive.sum())
    assert count >= 1
    assert alive[:count].all()
    assert torch.equal(out[order][:count], row[order][:count])
    assert top_k == 0 or count <= top_k


def test_frequencies_follow_the_temperature():
    logits = torch.tensor([[2.0, 1.0, 0.0]]).repeat(4000, 1)
    inputs = replace(
        greedy(4000),
        temperature_N=np.full(4000, 0.5, np.float32),
        seed_N=np.arange(4000),
    )
    share = torch.bincount(sample(logits, inputs), minlength=3) / 4000
    assert torch.allclose(share, (logits[0] / 0.5).softmax(-1), atol=0.03)


def test_noise_does_not_depend_on_the_batch():
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(0))
    inputs = replace(
        greedy(5),
        temperature_N=np.array([1, 0, 1, 1, 1], np.float32),
        seed_N=np.arange(5),
        output_position_N=np.arange(5, dtype=np.int32),
        top_p_N=np.array([1, 1, 0.9, 0.5, 1], np.float32),
    )
    together = sample(logits, inputs).tolist()
    alone = [sample(logits[n : n + 1], inputs.cut(slice(n, n + 1))).item() for n in range(5)]
    assert together == alone


def test_edits_divide_add_and_forbid():
    logits = torch.tensor([[4.0, 3.0, -1.0], [4.0, 3.0, -1.0], [4.0, 3.0, -1.0]])
    inputs = replace(greedy(3), edits=edits((0, 0, 2.0, 0.0), (1, 0, 1.0, -INF), (2, 2, 2.0, 6.5)))
    assert sample(logits, inputs).tolist() == [1, 1, 2], "4/2 < 3; forbidden; -1*2+6.5 = 4.5 > 4"
    assert logits[1, 0] == 4.0, "the logits of others are left as they are"


def test_a_mask_leaves_only_its_tokens():
    logits = torch.arange(40.0).repeat(2, 1)
    mask = np.zeros((1, 2), np.uint32)
    mask[0, 0], mask[0, 1] = 1 << 31, 1 << 2  # tokens 31 and 34
    inputs = replace(greedy(2), masks=Masks(sample=np.array([1], np.int32), words=mask.view(np.int32)))
    assert sample(logits, inputs).tolist() == [39, 34]


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 9), at=st.integers(0, 9), data=st.data())
def test_cut_inputs_give_the_same_samples(count, at, data):
    at = min(at, count)
    logits = torch.randn(count, 37, generator=torch.Generator().manual_seed(count))
    pairs = data.draw(st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, 36)), unique=True))
    masked = sorted(data.draw(st.sets(st.integers(0, count - 1))))
    mask = np.random.default_rng(0).integers(0, 1 << 32, (len(masked), 2), dtype=np.uint32)
    mask[:, 0] |= 1
    inputs = replace(greedy(count), masks=Masks(sample=np.array(masked, np.int32), words=mask.view(np.int32)))
    if pairs:
        inputs = replace(inputs, edits=edits(*((n, t, 1.5, float(t)) for n, t in sorted(pairs))))
    parts = [inputs.cut(slice(0, at)), inputs.cut(slice(at, count))]
    cut = [
        sample(part, p).tolist()
        for part, p in zip((logits[:at], logits[at:]), parts, strict=True)
        if len(part)
    ]
    assert sum(cut, []) == sample(logits, inputs).tolist()


def test_logprobs_are_of_the_models_own_distribution():
    logits = torch.randn(3, 30, generator=torch.Generator().manual_seed(1))
    inputs = replace(greedy(3), num_logprobs_N=np.array([2, -1, 0], np.int32))
    tokens = sample(logits, inputs)
    found = top_logprobs(logits[[0, 2]], tokens[[0, 2]], 20)
    extras = extras_of(inputs, Samples(tokens, None, found))
    assert list(extras) == [0, 2]
    expected = logits.log_softmax(-1)
    first, last = extras[0].logprobs, extras[2].logprobs
    assert first is not None
    assert first.chosen == pytest.approx(expected[0].max().item(), abs=1e-5)
    assert first.top_ids == expected[0].topk(2).indices.tolist()
    assert first.top == pytest.approx(expected[0].topk(2).values.tolist(), abs=1e-5)
    assert last is not None
    assert last.top_ids == []
