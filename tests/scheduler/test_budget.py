"""What prefill rows cost, and how many fit."""

from hypothesis import given
from hypothesis import strategies as st

from moe_runtime.scheduler.budget import affordable_rows, row_cost
from moe_runtime.scheduler.scheduler import Scheduler
from moe_runtime.scheduler.sequences import make_sequence
from tests.scheduler.test_scheduler import limits, request


@given(
    budget=st.integers(0, 20_000),
    context=st.integers(0, 200_000),
    span=st.one_of(st.just(0), st.integers(1, 50_000)),
)
def test_the_most_rows_fit(budget, context, span):
    rows = affordable_rows(budget, context, span)
    assert row_cost(rows, context, span) <= budget * (1 + 1e-9)
    assert row_cost(rows + 1, context, span) > budget


def test_a_row_costs_what_it_attends_to():
    assert row_cost(3, 10, 0) == 3
    assert row_cost(3, 10, 5) == 3 + (10 + 11 + 12) / 5


def test_a_rank_deep_in_a_long_prompt_takes_fewer_rows_and_gets_on():
    scheduler = Scheduler(limits(attention_span=32, num_blocks=256, max_positions=1000))
    scheduler.add(make_sequence(request(0, [1] * 200, 1), ()))
    taken = []
    while (offered := scheduler.propose().prefill_tokens) > 0:
        built = scheduler.build(16)
        assert built.prefill_tokens == offered
        taken.append(offered)
    assert sum(taken) == 200
    assert taken[0] == 13  # 13 + (0 + ... + 12) / 32 = 15.4
    assert taken[:-1] == sorted(taken[:-1], reverse=True)
    assert taken[-2] == 2  # about 16 / (1 + 195 / 32)
