"""Micro-batches: how inputs are cut, in which order stages run, and when it is worth it."""

import dataclasses
import itertools
from collections.abc import Generator
from operator import attrgetter
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_runtime.engine import overlap, split
from moe_runtime.engine.agree import AgreeLimits, OverlapReason, StepProposal, agree, step_tokens
from moe_runtime.engine.overlap_policy import MIN_OBSERVATIONS, OverlapModel
from moe_runtime.models.context import NoClock
from moe_runtime.models.layer import Cut
from moe_runtime.report.records import OVERLAP_REASONS
from moe_runtime.scheduler.scheduler import Scheduler
from moe_runtime.scheduler.sequences import make_sequence
from moe_runtime.scheduler.step import SchedulerLimits
from moe_runtime.scheduler.step_inputs import StepInputs
from moe_runtime.spec.requests import Request, SamplingParams
from tests.scheduler.fake_device import FakeDevice, expected_output


def test_every_field_declares_how_it_is_split():
    for field in dataclasses.fields(StepInputs):
        rule = field.metadata.get("split")
        assert rule in ("split", "copy", "drop"), field.name
        assert (rule == "drop") == (field.name in split.REBUILT), field.name


def test_a_field_without_a_declaration_is_refused(monkeypatch):
    field = next(f for f in dataclasses.fields(StepInputs) if f.name == "positions_T")
    monkeypatch.setattr(field, "metadata", {})
    with pytest.raises(TypeError, match="positions_T does not declare"):
        split.halves(scheduled_inputs([5], [], 8))


def scheduler(chunk: int) -> Scheduler:
    return Scheduler(
        SchedulerLimits(
            max_batch_tokens=256,
            max_sequences=16,
            chunk_tokens=chunk,
            block_tokens=4,
            num_blocks=200,
            max_positions=200,
        )
    )


def scheduled_inputs(decoding: list[int], prompts: list[int], chunk: int) -> StepInputs:
    """Inputs with a decode row for each prompt length in `decoding`, then prefill of `prompts`."""
    s = scheduler(chunk=256)
    for i, length in enumerate(decoding):
        s.add(make_sequence(Request(id=i, prompt=[7] * length, sampling=SamplingParams()), ()))
    s.propose()
    first = s.build(256)
    s.commit(first, np.zeros(len(first.sampled), np.int32))
    for i, length in enumerate(prompts):
        s.add(make_sequence(Request(id=100 + i, prompt=[9] * length, sampling=SamplingParams()), ()))
    s.propose()
    return s.build(len(decoding) + chunk).inputs


@settings(max_examples=80, deadline=None)
@given(
    decoding=st.lists(st.integers(1, 9), max_size=6),
    prompts=st.lists(st.integers(1, 30), max_size=5),
    chunk=st.integers(1, 40),
)
def test_halves_together_are_the_whole(decoding, prompts, chunk):
    whole = scheduled_inputs(decoding, prompts, chunk)
    parts = split.halves(whole)
    assert sum(p.num_tokens for p in parts) == whole.num_tokens
    assert abs(parts[0].num_tokens - parts[1].num_tokens) <= 1
    for name in ("token_ids_T", "positions_T", "sampling.temperature_N", "sampling.output_position_N"):
        value = attrgetter(name)
        assert np.concatenate([value(p) for p in parts]).tolist() == value(whole).tolist()
    assert sum(p.num_decode for p in parts) == whole.num_decode
    offset = 0
    for part in parts:
        assert part.segment_starts_P1[0] == part.num_decode
        assert part.segment_starts_P1[-1] == part.num_tokens
        assert (np.diff(part.segment_starts_P1) > 0).all()
        for p in range(part.num_segments):
            row = int(part.segment_starts_P1[p])
            assert part.segment_context_P[p] == part.positions_T[row], "context is what comes before"
        rows = part.sample_rows_N
        assert ((rows >= 0) & (rows < part.num_tokens)).all()
        offset += part.num_tokens
    samples = np.concatenate([parts[0].sample_rows_N, parts[1].sample_rows_N + parts[0].num_tokens])
    assert samples.tolist() == whole.sample_rows_N.tolist()


@pytest.mark.parametrize("chunk", [1, 9, 40])
def test_split_steps_give_the_same_tokens_on_the_fake_device(chunk):
    """The second half reads KV that the first half wrote in the same step."""
    s = scheduler(chunk)
    device = FakeDevice(200, 4)
    rng = np.random.default_rng(chunk)
    texts = [rng.integers(0, 50, n).tolist() for n in (1, 9, 30, 2, 17)]
    for i, text in enumerate(texts):
        s.add(make_sequence(Request(id=i, prompt=text, sampling=SamplingParams(max_tokens=12)), ()))
    outputs: dict[int, list[int]] = {i: [] for i in range(len(texts))}
    while True:
        work = s.propose()
        if not (work.decode_tokens or work.prefill_tokens):
            break
        scheduled = s.build(256)
        tokens = np.concatenate([device.run(part) for part in split.halves(scheduled.inputs)])
        for event in s.commit(scheduled, tokens):
            outputs[event.sequence.request.id].append(event.token)
    assert outputs == {i: expected_output(text, 12) for i, text in enumerate(texts)}


class TracedLayer:
    """A layer of five stages, or a dense one of one stage, that writes down who runs what."""

    CUTS: ClassVar[tuple[Cut, ...]] = ("attention", "dispatch", "shared", "combine")

    def __init__(self, number: int, log: list, *, dense: bool = False) -> None:
        self.number, self.log = number, log
        self.cuts = () if dense else self.CUTS

    def __call__(self, x_TH: Tensor, step) -> Generator[Cut, None, Tensor]:
        for cut in self.cuts:
            self.log.append((int(x_TH[0, 0]), self.number, cut))
            yield cut
        self.log.append((int(x_TH[0, 0]), self.number, "end"))
        return x_TH


class Step:
    clock = NoClock()
    shared_beside = ""


def order_of_stages(order: overlap.Order, layers: int, dense: int = 0) -> list[tuple[int, int, str]]:
    log: list = []
    made = [TracedLayer(n, log, dense=n < dense) for n in range(layers)]
    batches = [(torch.full((1, 1), float(b)), Step()) for b in range(2)]
    results = overlap.run(batches, made, order=order)  # type: ignore[arg-type]
    assert {step.shared_beside for _, step in batches} == {order.shared_beside}
    assert [int(r[0, 0]) for r in results] == [0, 1]
    whole = [(n, c) for n in range(layers) for c in (*made[n].cuts, "end")]
    assert all([(n, c) for batch, n, c in log if batch == b] == whole for b in range(2))
    return log


@pytest.mark.parametrize("behind", [0, 2, 4])
def test_the_order_of_stages_is_data(behind):
    log = order_of_stages(dataclasses.replace(overlap.DECODE, behind=behind), layers=3)
    # While both run, the first is `behind` stages ahead when the second begins a stage.
    ahead = 0
    for batch, _, _ in log[: len(log) - behind]:
        ahead += 1 if batch == 0 else -1
        assert 0 <= ahead <= behind + 1
    assert [b for b, _, _ in log[:behind]] == [0] * behind


def test_prefill_turns_at_transfers_only():
    """Nobody waits for the other's results before it goes on with its own, dense layers included."""
    log = order_of_stages(overlap.PREFILL, layers=3, dense=1)
    turns = [batch for batch, _ in itertools.groupby(log, key=lambda entry: entry[0])]
    up_to_dispatch, up_to_combine = [(1, "attention"), (1, "dispatch")], [(1, "shared"), (1, "combine")]
    assert [(n, c) for _, n, c in log[:7]] == [(0, "end"), *up_to_dispatch] * 2 + up_to_combine[:1]
    assert turns == [0, 1] * 5, "a turn each up to both transfers of two layers, and to the end"
    # Results are taken and the next layer begun in one turn.
    assert [entry for entry in log if entry[:2] == (0, 1)][-1] == (0, 1, "end")
    after = log.index((0, 1, "end"))
    assert log[after : after + 3] == [(0, 1, "end"), (0, 2, "attention"), (0, 2, "dispatch")]


def test_an_error_in_a_stage_comes_out():
    def broken(x_TH, step):
        yield "dispatch"
        raise ArithmeticError("stage")

    with pytest.raises(ArithmeticError, match="stage"):
        overlap.run([(torch.zeros(1, 1), Step())] * 2, [broken])  # type: ignore[list-item]


# -- the decision --------------------------------------------------------------------------------


def offer(tokens: int, gain: int = 0) -> StepProposal:
    return StepProposal(
        decode_tokens=tokens,
        prefill_tokens=0,
        in_flight=0,
        stop=False,
        placement_epoch=0,
        membership_epoch=0,
        alive=(True,) * 4,
        overlap_gain=gain,
    )


def limits(micro_batches) -> AgreeLimits:
    return AgreeLimits(
        max_batch_tokens=64, chunk_tokens=64, dispatch_max_tokens=4, micro_batches=micro_batches
    )


def test_all_ranks_split_or_none_does():
    for counts in itertools.product((0, 1, 2, 3, 7), repeat=4):
        offered = [offer(n) for n in counts]
        vectors = [p.to_vector() for p in offered]
        decisions = [agree([StepProposal.from_vector(v, 4) for v in vectors], limits(2)) for _ in range(4)]
        assert all(d == decisions[0] for d in decisions)
        decision = decisions[0]
        expected = 2 if max(counts) >= 2 else 1
        assert decision.micro_batches == expected
        if sum(counts):
            largest = max(step_tokens(p, decision.token_level, 64) for p in offered)
            assert decision.rounds * decision.round_tokens >= -(-largest // decision.micro_batches)


@pytest.mark.parametrize(
    ("setting", "gains", "micro_batches", "reason"),
    [
        (1, [900] * 4, 1, OverlapReason.OFF),
        (2, [-900] * 4, 2, OverlapReason.ASKED),
        ("per_step", [500, -100, -100, -100], 2, OverlapReason.GAIN),
        ("per_step", [500, -300, -300, 0], 1, OverlapReason.NO_GAIN),
        ("per_step", [0] * 4, 1, OverlapReason.NO_GAIN),
    ],
)
def test_gains_of_all_ranks_decide(setting, gains, micro_batches, reason):
    decision = agree([offer(8, g) for g in gains], limits(setting))
    assert (decision.micro_batches, decision.overlap_reason) == (micro_batches, reason)


def test_an_idle_rank_does_not_stop_the_others_from_overlapping():
    decision = agree([offer(8, 400), offer(8, 400), offer(0, 0), offer(8, 400)], limits("per_step"))
    assert decision.micro_batches == 2


def test_reasons_have_the_names_of_the_report():
    assert [r.name.lower() for r in OverlapReason] == list(OVERLAP_REASONS)


def observed(fixed: float, per_token: float, transport_fixed: float, transport: float) -> OverlapModel:
    model = OverlapModel()
    for tokens in (8, 32, 64, 128, 256) * 3:
        compute, moved = fixed + per_token * tokens, transport_fixed + transport * tokens
        model.observe(tokens=tokens, micro_batches=1, busy=compute + moved, compute=compute, transport=moved)
    return model


def test_large_batches_gain_and_small_ones_lose():
    model = observed(fixed=10e-3, per_token=0.1e-3, transport_fixed=1e-3, transport=0.08e-3)
    assert model.gain(8) < 0
    assert model.gain(256) > 0


def test_nothing_is_expected_before_enough_was_seen():
    model = OverlapModel()
    for _ in range(MIN_OBSERVATIONS - 1):
        model.observe(tokens=64, micro_batches=1, busy=2.0, compute=1.0, transport=1.0)
    assert model.gain(64) == 0.0


def test_what_was_measured_both_ways_decides():
    model = observed(fixed=1e-3, per_token=0.1e-3, transport_fixed=1e-3, transport=0.1e-3)
    assert model.gain(128) > 0
    for _ in range(MIN_OBSERVATIONS):
        model.observe(tokens=128, micro_batches=2, busy=0.5, compute=0.5, transport=0.1)
    assert model.gain(128) < 0
