"""The search against brute force, its invariants, and what better machines must not make worse."""

from dataclasses import replace

import pytest

from moe_runtime.errors import InputError
from moe_runtime.virtual.search.candidate import Candidate, candidates, first_token, order
from moe_runtime.virtual.search.evaluate import Evaluator
from moe_runtime.virtual.search.explain import account
from moe_runtime.virtual.search.option import Choice, Option
from moe_runtime.virtual.search.query import recorded
from moe_runtime.virtual.search.render import render
from moe_runtime.virtual.search.room import FREE
from moe_runtime.virtual.search.search import PHASES, Found, Ladders, search
from moe_runtime.virtual.search.space import degrees, instances, redundancies
from moe_runtime.virtual.search.what_if import again, changed
from tests.virtual.search.queries import narrow, query

STEPS = 200  # of the utilisation, in the brute force


@pytest.fixture(scope="module")
def found() -> Found:
    return search(narrow())


@pytest.fixture(scope="module")
def ladders() -> dict[str, Ladders]:
    evaluator = Evaluator(narrow())
    return {phase: Ladders(evaluator, phase) for phase in PHASES}


def test_the_winner_is_what_brute_force_finds(found: Found, ladders: dict[str, Ladders]):
    """All options, none dropped, all numbers of instances, fewer than fit included; rates by hand."""
    asked, best = found.query, 0.0
    work, promise = asked.workload, asked.objectives
    for option in ladders["unified"].options():
        busy = option.choice.sequences * work.computed / work.output / option.choice.chunk
        if option.tpot <= promise.tpot and first_token(option, work, busy) <= promise.ttft:
            best = max(best, asked.ranks // option.choice.ranks * option.rate)
    for p in ladders["prefill"].options():
        shares = [promise.utilisation * i / STEPS for i in range(STEPS + 1)]
        busy = max((b for b in shares if first_token(p, work, b) <= promise.ttft), default=0.0)
        for d in ladders["decode"].options():
            if d.tpot > promise.tpot:
                continue
            for n in range(1, asked.ranks // p.choice.ranks + 1):
                left = asked.ranks - n * p.choice.ranks
                if n * p.choice.ranks % min(d.choice.ranks, asked.ranks_per_node):
                    continue
                for m in range(1, left // d.choice.ranks + 1):
                    best = max(best, min(n * p.rate * busy, m * d.rate))
    assert found.winner.throughput == pytest.approx(best * work.output / asked.nodes, rel=2 / STEPS)


def test_the_winner_is_on_the_front_and_meets_what_was_asked(found: Found):
    assert found.winner in found.front
    assert found.winner.meets(found.query.objectives)
    assert found.plan is not None
    assert found.plan.written
    for faster, slower in zip(found.front[1:], found.front, strict=False):
        assert faster.throughput <= slower.throughput
        assert faster.tpot < slower.tpot


def test_rates_match_and_nothing_is_busier_than_allowed(ladders: dict[str, Ladders]):
    asked = narrow()
    pools = [ladders[phase].options()[::9] for phase in PHASES]
    count = 0
    for c in candidates(asked, *pools):
        count += 1
        assert c.ranks <= asked.ranks
        assert max(c.busy) <= 1 + 1e-12
        if c.prefill is not None:
            assert c.busy[0] <= asked.objectives.utilisation + 1e-12
            assert c.rate == pytest.approx(c.copies[0] * c.prefill.rate * c.busy[0])
            assert c.rate == pytest.approx(c.copies[1] * c.decode.rate * c.busy[1])
    assert count > 50


def test_ranks_of_a_step_wait_for_the_longest_prompt(ladders: dict[str, Ladders]):
    short, asked = 1000, narrow()
    trace = recorded([(short, 500, 0.0)] * 99 + [(60_000, 500, 0.0)])
    mean = replace(trace, lengths=(1.0,))
    option = ladders["prefill"].options()[0]
    uneven, even = (Evaluator(replace(asked, workload=work)).option(option.choice) for work in (trace, mean))
    assert isinstance(uneven, Option)
    assert isinstance(even, Option)
    assert uneven.step > 1.5 * even.step
    assert uneven.cost.parts["imbalance"] > even.cost.parts["imbalance"]


def test_memory_and_rounds_are_respected(ladders: dict[str, Ladders]):
    room = (1 - FREE) * narrow().machine.hardware.memory_bytes
    options = [option for phase in PHASES for option in ladders[phase].options()]
    assert {o.choice.group for o in options} >= {1, 2, 4, 8, 16}
    for option in options:
        assert option.budget.total <= room
        if option.choice.phase == "decode" and not option.choice.whole and option.choice.ranks > 1:
            assert option.choice.sequences / option.choice.micro_batches <= 252


def test_the_account_sums_to_all_time(found: Found):
    for candidate in (found.winner, *found.rivals.values()):
        shares = account(found.query, candidate)
        whole = found.query.ranks / (candidate.throughput * found.query.nodes)
        assert sum(s.seconds for s in shares) == pytest.approx(whole)
        assert all(s.seconds >= -1e-12 for s in shares)


def test_rivals_are_worse_for_a_reason(found: Found):
    assert found.rivals
    for candidate in found.rivals.values():
        assert order(candidate) > order(found.winner)
    assert set(found.stops) == {"prefill", "decode"}
    assert all(found.stops.values())


def test_the_same_query_gives_the_same(found: Found):
    assert search(narrow()) == found


@pytest.mark.parametrize("change", ["memory_bandwidth=x1.3", "memory_bytes=x1.2"])
def test_a_better_machine_never_serves_less(found: Found, change: str):
    better = changed(found.query, f"hardware.{change}")
    assert search(better).winner.throughput >= found.winner.throughput * (1 - 1e-9)


@pytest.mark.parametrize(
    "change",
    ["memory_bandwidth=x2", "rdma_bandwidth=x2", "scaleup_bandwidth=x2", "flops=x2", "memory_bytes=x2"],
)
def test_no_plan_is_worse_on_a_better_machine(found: Found, change: str):
    same = again(changed(found.query, f"hardware.{change}"), found.winner)
    assert isinstance(same, Candidate)
    assert same.throughput >= found.winner.throughput * (1 - 1e-9)
    assert same.tpot <= found.winner.tpot * (1 + 1e-9)


def test_looser_objectives_never_serve_less(found: Found):
    looser = changed(changed(found.query, "tpot=60ms"), "ttft=3s")
    assert search(looser).winner.throughput >= found.winner.throughput


def test_a_plan_under_the_query_it_was_found_for_is_the_same(found: Found):
    assert again(found.query, found.winner) == found.winner
    smaller = again(replace(found.query, nodes=1), found.winner)
    assert smaller == "does not fit 8 ranks"
    tight = again(changed(found.query, "hardware.memory_bytes=x0.5"), found.winner)
    assert isinstance(tight, str)
    assert "memory" in tight


def test_time_to_the_first_token_grows_with_the_load(ladders: dict[str, Ladders]):
    option, work = ladders["prefill"].options()[0], narrow().workload
    seconds = [first_token(option, work, busy) for busy in (0.0, 0.2, 0.5, 0.8, 0.95)]
    assert seconds == sorted(seconds)
    assert seconds[0] == pytest.approx((0.9 + option.chunks) * option.step)
    uneven = replace(work, variation=2.0)
    assert first_token(option, uneven, 0.8) > first_token(option, work, 0.8)


def test_drafts_pay_in_rate_and_are_not_written():
    asked = query(workload="input=1200,output=500,acceptance=0.8")
    evaluator = Evaluator(asked)
    plain = Choice(phase="decode", ranks=16, redundant=0, sequences=32, max_tokens=64)
    without = evaluator.option(plain)
    drafted = evaluator.option(replace(plain, queries=2))
    assert isinstance(without, Option)
    assert isinstance(drafted, Option)
    assert without.rate < drafted.rate < 1.8 * without.rate
    assert drafted.budget.total > without.budget.total
    assert not drafted.choice.written


def test_degrees_and_redundancies_leave_no_slot_empty():
    asked = query(nodes=12)
    assert list(degrees(asked))[:5] == [1, 2, 4, 8, 16]
    assert max(degrees(asked)) == 96
    for ranks in degrees(asked):
        for redundant in redundancies(asked, ranks):
            assert (256 + redundant) % ranks == 0
    assert {c.ranks for c in instances(asked, "decode") if c.whole} == {2, 4, 8, 16, 32, 64}


def test_a_rack_that_is_one_scale_up_domain_uses_its_own_transport():
    rack = query(hardware="gb200-nvl72", nodes=4)
    assert rack.ranks_per_node == 4
    option = Evaluator(rack).option(
        Choice(phase="decode", ranks=16, redundant=0, sequences=128, max_tokens=128)
    )
    assert isinstance(option, Option)


def test_chunks_beyond_a_round_of_nccl_go_in_rounds():
    """Twelve ranks are no DeepEP group, so NCCL takes its place, with 2,048 rows in a round."""
    evaluator = Evaluator(query(hardware="gb200-nvl72", nodes=3))
    whole = Choice(phase="prefill", ranks=12, redundant=8, backend="torch", chunk=8192, max_tokens=8192)
    steps = {}
    for rows in (8192, 4096, 2048):
        option = evaluator.option(replace(whole, max_tokens=rows))
        assert isinstance(option, Option)
        steps[rows] = option.step
        halves = evaluator.option(replace(whole, max_tokens=rows, group=2, chunk=16384))
        assert isinstance(halves, Option)
        assert halves.cost.parts["experts"] == pytest.approx(option.cost.parts["experts"], rel=0.01)
    more = steps[4096] - steps[8192]
    assert more > 0
    assert steps[2048] - steps[4096] == pytest.approx(2 * more, rel=0.1)


def test_what_does_not_fit_or_cannot_be_met_is_said():
    with pytest.raises(
        InputError, match=r"no plan fits 1 node of 8 h100-sxm; the least needed: memory: \d+ GiB"
    ):
        search(narrow(hardware="h100-sxm", nodes=1))
    with pytest.raises(InputError, match=r"no plan meets .*the shortest TPOT \d+\.\d ms"):
        search(narrow(nodes=1, slo="ttft=2s,tpot=1ms"))


def test_balancing_off_is_worse():
    asked = query()
    on, off = Evaluator(asked), Evaluator(replace(asked, balanced=False))
    choice = Choice(phase="decode", ranks=16, redundant=32, sequences=64, max_tokens=64)
    better, worse = on.option(choice), off.option(choice)
    assert isinstance(better, Option)
    assert isinstance(worse, Option)
    assert worse.rate < 0.9 * better.rate


def test_whether_wide_ep_pays_is_said_as_far_as_the_cost_model_can_tell(found: Found):
    """Cuts of the same candidate with other throughputs; decode over two nodes, and in one."""
    option = found.winner.decode
    nodes = {
        "wide EP": replace(option, choice=replace(option.choice, ranks=16, group=1, whole=False)),
        "EP in a node": replace(option, choice=replace(option.choice, ranks=8, group=1, whole=False)),
    }
    pair = replace(found.winner, prefill=option)

    def verdict(wide: float, near: float) -> str:
        kinds = {
            kind: replace(pair, decode=nodes[kind], throughput=value)
            for kind, value in (("wide EP", wide), ("EP in a node", near))
            if value
        }
        return render(replace(found, kinds=kinds)).splitlines()[-1].strip()

    assert verdict(1.5, 1.0) == "wide EP pays here"
    assert verdict(1.0, 1.5) == "wide EP does not pay here: EP in a node has 50.0% more"
    assert verdict(1.0, 1.03).startswith("EP in a node has 3.0% more than wide EP, which is less than")
    assert verdict(1.03, 1.0).startswith("wide EP has 3.0% more than EP in a node, which is less than")
    assert verdict(0.0, 1.0) == "wide EP meets the objectives nowhere: it does not pay here"
    assert verdict(1.0, 0.0) == "wide EP pays here: nothing else meets the objectives"
