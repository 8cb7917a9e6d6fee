"""The short forms of the command line, the workload of a trace, and what cannot be, by name."""

from dataclasses import replace

import pytest

from moe_runtime.errors import InputError
from moe_runtime.virtual.search.query import checked, number, parse_objectives, parse_workload, recorded
from moe_runtime.virtual.search.what_if import changed
from tests.virtual.search.queries import query


def test_a_workload_of_equal_requests():
    work = parse_workload("input=1200, output=1500,prefix=0.25,acceptance=0.8")
    assert (work.computed, work.cached, work.acceptance) == (900, 300, 0.8)
    assert work.context == 1200 + 750
    assert work.spread == pytest.approx(1500 / 12**0.5)


def test_a_recorded_workload_counts_sequences_as_long_as_they_stay():
    """One request of 10 steps at contexts 0-10, one of 90 at 100-190: 9 of 10 sequences are the second."""
    work = recorded([(1, 10, 0.0), (100, 90, 50.0)])
    assert (work.input, work.output) == (50.5, 50)
    assert work.prefix == pytest.approx(50 / 101)
    assert work.context == pytest.approx(0.1 * 6 + 0.9 * 145)
    alike = recorded([(1200, 1500, 0.0)] * 3)
    equal = parse_workload("input=1200,output=1500")
    assert replace(alike, spread=0.0, lengths=(1.0,)) == replace(equal, spread=0.0)
    assert alike.spread == pytest.approx(equal.spread)
    assert alike.variation == 0
    with pytest.raises(InputError, match="no requests"):
        recorded([])


def test_long_prompts_count_as_often_as_they_have_tokens():
    assert recorded([(1200, 1500, 200.0)] * 3).lengths == (1.0,) * 64
    lengths = recorded([(100, 1, 0.0)] * 99 + [(9900, 1, 0.0)]).lengths
    assert lengths == pytest.approx((100 / 198,) * 32 + (9900 / 198,) * 32)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("input=1200", "output= is missing"),
        ("input=x,output=1", "input = 'x'"),
        ("input=0,output=1", "at least 1"),
        ("input=1,output=1,prefix=1", "prefix"),
        ("input=1,output=1,acceptance=2", "acceptance"),
        ("input=1,input=2,output=1", "input= is given twice"),
        ("input=1200ms,output=1", "'1200ms': a number"),
        ("inputs=1,output=1", "'inputs=1' is not one of input, output"),
    ],
)
def test_bad_workloads_are_named(text: str, word: str):
    with pytest.raises(InputError, match=word):
        parse_workload(text)


@pytest.mark.parametrize("text", ["ttft=2s", "ttft=0s,tpot=50ms", "ttft=2s,tpot=50ms,utilisation=1", "x"])
def test_bad_objectives_are_named(text: str):
    with pytest.raises(InputError, match="--slo"):
        parse_objectives(text)


def test_units():
    asked = parse_objectives("ttft=1500ms,tpot=0.05 s")
    assert (asked.ttft, asked.tpot) == (1.5, 0.05)
    with pytest.raises(InputError, match="tpot = '50': a time with its unit was expected"):
        parse_objectives("ttft=2s,tpot=50")
    for text in ("nan", "50ms", ""):
        with pytest.raises(InputError, match="number was expected"):
            number(text, "x")


def test_queries_that_cannot_be_are_named():
    with pytest.raises(InputError, match="machine 'cpu-host': one of h100-sxm"):
        checked(query(hardware="cpu-host"))
    with pytest.raises(InputError, match=r"machine 'h100': did you mean h100-sxm\?"):
        checked(query(hardware="h100"))
    with pytest.raises(InputError, match="--nodes is 0"):
        checked(query(nodes=0))
    with pytest.raises(InputError, match="no layers for multi-token prediction"):
        checked(query("kimi-k2", workload="input=10,output=10,acceptance=0.5"))
    with pytest.raises(InputError, match="positions for 163840"):
        checked(query(workload="input=160000,output=4000"))


def test_a_dtype_that_a_machine_has_no_rate_for_is_named():
    asked = query("qwen3-30b")
    with pytest.raises(InputError, match="--model catalog:qwen3-30b: .* has no rate for float32"):
        checked(replace(asked, model=replace(asked.model, dtype="float32")))


def test_what_if_changes_one_thing():
    asked = query()
    assert changed(asked, "nodes=4").nodes == 4
    assert changed(asked, "tpot=30ms").objectives == replace(asked.objectives, tpot=0.03)
    assert changed(asked, "balancing=off").balanced is False
    assert changed(asked, "overlap=2").micro_batches == 2
    hardware = changed(asked, "hardware.rdma_bandwidth=x2").machine.hardware
    assert hardware.rdma_bandwidth == 100e9
    assert hardware.memory_bytes == asked.machine.hardware.memory_bytes
    assert changed(asked, "hardware=h100-sxm").hardware == "h100-sxm"
    assert changed(asked, "prefix=0.5").workload.computed == 600
    flops = changed(asked, "hardware.flops=x0.5").machine.hardware.flops
    assert flops["bfloat16"] == asked.machine.hardware.flops["bfloat16"] / 2


@pytest.mark.parametrize(
    "text",
    [
        "speed=2",
        "nodes",
        "nodes=1.5",
        "overlap=3",
        "balancing=maybe",
        "hardware=abacus",
        "hardware.flops=2",
        "hardware.memory_bytes=x0",
        "prefix=1",
        "tpot=50",
        "ttft=2s,tpot=1ms",
        "nodes=200",
    ],
)
def test_bad_questions_are_named(text: str):
    with pytest.raises(InputError, match=f"--what-if '?{text}"):
        changed(query(), text)


def test_a_question_that_the_model_cannot_answer_is_named():
    with pytest.raises(InputError, match="--what-if acceptance=0.5: .*no layers for multi-token prediction"):
        changed(query("kimi-k2"), "acceptance=0.5")


def test_a_rate_that_a_machine_has_not_is_named():
    with pytest.raises(InputError, match="gb200-nvl72 has none"):
        changed(query(hardware="gb200-nvl72"), "hardware.rdma_bandwidth=x2")
