"""Every `topk_fp32` backend against the dense reference, bit for bit: full grid, pairs of factors,
sizes of operators' reports, tokens in flight of two micro-batches, slow ranks."""

import itertools
import random
import time

import pytest
import torch

from moe_runtime.engine.agree import AgreeLimits, StepProposal, agree
from tests.expert_parallel.cases import Case, inputs, pairwise_cases, run_experts
from tests.expert_parallel.exercise import (
    check_case,
    make_local,
    make_shm,
    make_torch,
    output_problems,
    run_cases,
)
from tests.expert_parallel.world import Rank, run_world

COUNTS = (0, 1, 2, 3, 7, 129)
PAIRWISE = pairwise_cases()


def check(tmp_path, make, cases: list[Case]) -> None:
    results = run_world(tmp_path, cases[0].num_ranks, run_cases, make, cases)
    wrong = [line for lines in results for line in lines]
    assert wrong == [], "\n".join(wrong[:10])


def run_grid(rank: Rank, counts: list[tuple[int, ...]]) -> list[str]:
    """Every combination on one buffer, as steps of one instance."""
    buffer = make_shm(Case(tokens=(max(COUNTS),) * rank.num_ranks), rank, "grid")
    wrong = []
    for seed, tokens in enumerate(counts):
        case = Case(tokens=tokens, seed=seed, routing=("uniform", "holes", "one")[seed % 3])
        sent = inputs(case, rank.rank)
        rows = buffer.dispatch(sent.x_TH, sent.slot_ids_TK, sent.weights_TK).wait()
        out_TH = buffer.combine(run_experts(case, rows, rank.rank), rows).wait()
        wrong += [f"{case}, rank {rank.rank}: {p}" for p in output_problems(case, sent, out_TH)]
    return wrong


@pytest.mark.multiproc
def test_full_grid_of_token_counts_on_four_ranks(tmp_path):
    grid = list(itertools.product(COUNTS, repeat=4))
    results = run_world(tmp_path, 4, run_grid, grid)
    assert [line for lines in results for line in lines][:10] == []


@pytest.mark.multiproc
@pytest.mark.parametrize("make", [make_shm, make_torch])
@pytest.mark.parametrize("ranks", sorted(PAIRWISE))
def test_pairs_of_factors(tmp_path, make, ranks):
    check(tmp_path, make, PAIRWISE[ranks])


def test_pairs_of_factors_on_one_rank_without_transport(tmp_path):
    assert run_cases(Rank(0, 1, tmp_path), make_local, PAIRWISE[1]) == []


def test_the_pairs_hold_what_is_asked_of_them():
    cases = [c for cs in PAIRWISE.values() for c in cs]
    assert {c.num_ranks for c in cases} == set(range(1, 9))
    assert {c.hidden for c in cases} >= {64, 7168}
    assert {c.top_k for c in cases} >= {1, 11}
    assert any(c.experts % c.num_ranks for c in cases)
    assert any(c.refusal for c in cases)
    assert any(c.payload == "float8_e4m3" and not c.refusal and max(c.tokens) for c in cases)
    assert {c.layout for c in cases} == {"grouped", "masked"}
    assert any(c.rounds > 1 and max(c.tokens) > c.round_tokens for c in cases)


@pytest.mark.multiproc
@pytest.mark.parametrize("make", [make_shm, make_torch])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 6, 7])
def test_sizes_that_other_libraries_refuse(tmp_path, make, ranks):
    """Rank counts and hidden sizes without kernels elsewhere, experts that do not divide by the ranks."""
    check(
        tmp_path,
        make,
        [
            Case(tokens=tuple((5 * r + 4) % 9 for r in range(ranks)), hidden=hidden, experts=13, top_k=3)
            for hidden in (64, 96, 1000, 1536)
        ],
    )


@pytest.mark.parametrize("layout", ["grouped", "masked"])
def test_no_rows_of_one_scale_each_in_either_layout(tmp_path, layout):
    case = Case(tokens=(0,), hidden=128, payload="float8_e4m3", layout=layout)
    assert run_cases(Rank(0, 1, tmp_path), make_shm, [case]) == []


def test_outputs_that_are_no_rows_may_have_any_strides(tmp_path):
    case = Case(tokens=(0,))
    sent, buffer = inputs(case, 0), make_shm(case, Rank(0, 1, tmp_path), "none")
    rows = buffer.dispatch(sent.x_TH, sent.slot_ids_TK, sent.weights_TK).wait()
    assert buffer.combine(torch.empty(0, case.hidden, 2)[..., 0], rows).wait().shape == (0, case.hidden)


LIMITS = AgreeLimits(max_batch_tokens=1024, chunk_tokens=0, dispatch_max_tokens=256)


def run_agreed_rounds(rank: Rank, steps: list[tuple[int, ...]], limits: AgreeLimits) -> list[str]:
    """Rounds as the step agreement gives them, on one buffer."""
    most = limits.dispatch_max_tokens
    buffer = make_shm(Case(tokens=(most,) * rank.num_ranks), rank, "rounds")
    wrong = []
    for tokens in steps:
        proposals = [
            StepProposal(
                decode_tokens=n,
                prefill_tokens=0,
                in_flight=0,
                stop=False,
                placement_epoch=0,
                membership_epoch=0,
                alive=(True,) * len(tokens),
            )
            for n in tokens
        ]
        rounds = agree(proposals, limits).rounds
        case = Case(tokens=tokens, rounds=rounds)
        assert rounds == max(1, -(-max(tokens) // most))
        sent, out = inputs(case, rank.rank), []
        for i in range(rounds):
            part = slice(i * most, (i + 1) * most)
            rows = buffer.dispatch(sent.x_TH[part], sent.slot_ids_TK[part], sent.weights_TK[part]).wait()
            out.append(buffer.combine(run_experts(case, rows, rank.rank), rows).wait())
        wrong += [f"{tokens}, rank {rank.rank}: {p}" for p in output_problems(case, sent, torch.cat(out))]
        wrong += [f"{tokens}: {[len(o) for o in out]}"] if sum(map(len, out)) != tokens[rank.rank] else []
    return wrong


@pytest.mark.multiproc
def test_rounds_are_the_same_on_every_rank_whatever_their_rows(tmp_path):
    steps = [(500, 200, 256), (0, 0, 700), (0, 0, 0), (1, 0, 0)]
    assert run_world(tmp_path, 3, run_agreed_rounds, steps, LIMITS) == [[], [], []]


@pytest.mark.multiproc
def test_one_row_more_than_the_capacity_goes_out_in_a_second_round_on_all_ranks(tmp_path):
    limits = AgreeLimits(max_batch_tokens=1024, chunk_tokens=0, dispatch_max_tokens=128)
    assert run_world(tmp_path, 3, run_agreed_rounds, [(129, 0, 128)], limits) == [[], [], []]


def run_two_micro_batches(rank: Rank, layers: int) -> list[str]:
    """Two micro-batches in turn, each with a transfer in flight, on ranks that dawdle at random."""
    cases = [
        Case(tokens=(9,) * rank.num_ranks, seed=1),
        Case(tokens=tuple(range(rank.num_ranks)), seed=2, routing="holes"),
    ]
    buffer = make_shm(Case(tokens=(9,) * rank.num_ranks), rank, "two")
    random_ = random.Random(rank.rank)
    wrong = []

    def micro_batch(case: Case):
        sent = inputs(case, rank.rank)
        for layer in range(layers):
            handle = buffer.dispatch(sent.x_TH, sent.slot_ids_TK, sent.weights_TK)
            yield
            rows = handle.wait()
            y = run_experts(case, rows, rank.rank)
            combined = buffer.combine(y, rows)
            yield
            out_TH = combined.wait()
            if problems := output_problems(case, sent, out_TH):
                wrong.append(f"layer {layer}, rank {rank.rank}: {problems}")

    batches = [micro_batch(case) for case in cases]
    while batches:
        for batch in list(batches):
            if random_.random() < 0.1:
                time.sleep(random_.random() * 0.003)
            try:
                next(batch)
            except StopIteration:
                batches.remove(batch)
    return wrong


@pytest.mark.multiproc
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_two_transfers_in_flight_on_dawdling_ranks(tmp_path, ranks):
    results = run_world(tmp_path, ranks, run_two_micro_batches, 40)
    assert [line for lines in results for line in lines][:10] == []


def run_counted(rank: Rank, case: Case) -> tuple[list[int], int, int, int, int]:
    buffer = make_shm(case, rank, "counted")
    assert check_case(buffer, case, rank.rank) == []
    t = buffer.meter.take()
    assert 0 <= t.waited <= t.busy < 60
    return t.received_rows, t.rows_dispatched, t.bytes_dispatched, t.bytes_combined, t.bytes_dispatched


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("payload", "row_bytes"), [("float32", 1024), ("bfloat16", 512), ("float8_e4m3", 264)]
)
def test_a_row_crosses_once_per_token_and_rank(tmp_path, payload, row_bytes):
    case = Case(tokens=(40, 0, 25), hidden=256, experts=12, top_k=6, payload=payload, routing="holes")
    counted = run_world(tmp_path, 3, run_counted, case)
    s = case.placement.slots_per_rank
    received = [0, 0, 0]
    for rank, (_, rows, dispatched, *_rest) in enumerate(counted):
        slots = inputs(case, rank).slot_ids_TK
        away = {
            (t, int(slot) // s)
            for t, row in enumerate(slots)
            for slot in row
            if slot >= 0 and int(slot) // s != rank
        }
        assert rows == len(away)
        assert dispatched == len(away) * row_bytes + 2 * (8 + 4 * slots.numel())
        for slot in slots[slots >= 0].tolist():
            received[slot // s] += 1
    assert [c[0] for c in counted] == [[n] for n in received]
    own = [int(((slots := inputs(case, r).slot_ids_TK) // s == r).sum()) for r in range(3)]
    assert [c[3] for c in counted] == [(n - o) * 1024 for n, o in zip(received, own, strict=True)]
