"""Records of a run: columns, batches and their wire form."""

import math

import msgspec
import numpy as np
import pytest

from moe_runtime.report import records
from moe_runtime.report.records import COLUMNS, PHASES, RankSteps, StepBatch, StepLog, concat, pack, unpack


def make_log(rank=0, instance="decode/0", layers=3):
    return StepLog(instance=instance, deployment="decode", rank=rank, num_moe_layers=layers)


def add(log, step, **changes):
    row = dict(
        step=step,
        start=float(step),
        wall=0.5,
        phases=[0.1, 0.05, 0.05, 0.1, 0.05, 0.1, 0.05],
        decode_tokens=step % 5,
        prefill_tokens=2,
        cached_tokens=1,
        recomputed_tokens=0,
        received_rows=[step, 2, 3],
        kv_used_blocks=7,
        preemptions=0,
        bytes_dispatched=100,
        bytes_combined=200,
        transport_busy=0.1,
        transport_waited=0.02,
    )
    log.append(**{**row, **changes})


def same(a: RankSteps, b: RankSteps) -> bool:
    head = (a.instance, a.deployment, a.rank) == (b.instance, b.deployment, b.rank)
    return head and all(np.array_equal(getattr(a, c), getattr(b, c), equal_nan=True) for c in COLUMNS)


def test_log_hands_over_each_step_once():
    log = make_log()
    add(log, 4)
    add(log, 5)
    first = log.take()
    assert first.step.tolist() == [4, 5]
    assert first.received_rows.tolist() == [[4, 2, 3], [5, 2, 3]]
    assert first.tokens.tolist() == [6, 2]
    assert first.end.tolist() == [4.5, 5.5]
    add(log, 6)
    assert log.take().step.tolist() == [6]
    assert len(log.take()) == 0


def test_what_was_not_given_is_not_zero():
    log = make_log()
    row = dict(
        step=0, start=0.0, wall=1.0, phases=[0.0] * 7, decode_tokens=1, prefill_tokens=0, cached_tokens=0
    )
    log.append(**row, recomputed_tokens=0, received_rows=[0, 0, 0], kv_used_blocks=1, preemptions=0)
    steps = log.take()
    assert steps.bytes_dispatched.tolist() == [-1]
    assert math.isnan(steps.transport_busy[0])


@pytest.mark.parametrize("num_steps", [0, 1, 17])
@pytest.mark.parametrize("layers", [0, 3])
def test_wire_form_survives_encoding(num_steps, layers):
    log = make_log(rank=3, layers=layers)
    for step in range(num_steps):
        add(log, step, received_rows=[step * 10**12] * layers, transport_busy=float("nan"))
    steps = log.take()
    wire = msgspec.msgpack.encode(pack(steps))
    back = unpack(msgspec.msgpack.decode(wire, type=StepBatch))
    assert same(steps, back)
    assert back.received_rows.shape == (num_steps, layers)


def test_damaged_batch_is_refused():
    log = make_log()
    add(log, 0)
    batch = pack(log.take())
    with pytest.raises(ValueError, match="wall of 1 steps has 7 bytes, expected 8"):
        unpack(msgspec.structs.replace(batch, wall=batch.wall[:-1]))
    with pytest.raises(ValueError, match="received_rows"):
        unpack(msgspec.structs.replace(batch, num_moe_layers=2))


def test_concat_keeps_order_and_refuses_other_ranks():
    log, other = make_log(), make_log(rank=1)
    for step in range(6):
        add(log, step)
        add(other, step)
    whole = log.take()
    parts = [whole.select(whole.step < 2), whole.select(whole.step == 2), whole.select(whole.step > 2)]
    assert same(concat(parts), whole)
    with pytest.raises(ValueError, match="different ranks"):
        concat([whole, other.take()])
    with pytest.raises(ValueError, match="no batches"):
        concat([])


def test_columns_of_unequal_length_are_refused():
    log = make_log()
    add(log, 0)
    add(log, 1)
    steps = log.take()
    columns = {c: getattr(steps, c) for c in COLUMNS}
    with pytest.raises(ValueError, match="kv_used_blocks"):
        RankSteps(
            instance="i", deployment="d", rank=0, **{**columns, "kv_used_blocks": steps.kv_used_blocks[:1]}
        )
    with pytest.raises(ValueError, match="phases"):
        RankSteps(instance="i", deployment="d", rank=0, **{**columns, "phases": steps.phases[:, 1:]})


def test_wire_struct_has_exactly_the_columns():
    head = {"instance", "deployment", "rank", "num_steps", "num_moe_layers"}
    assert set(StepBatch.__struct_fields__) - head == set(COLUMNS)
    assert len(PHASES) == len(set(PHASES)) == 7
    assert records.NOT_MEASURED == -1
