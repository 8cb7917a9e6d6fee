"""Loads that change as a script says."""

import numpy as np
import pytest

from moe_runtime.errors import InputError
from moe_runtime.virtual.run.course import LoadDrift, course
from tests.virtual.run.small import prepared_of, shift


def test_loads_shift_to_what_is_named(tmp_path):
    prepared = prepared_of(tmp_path)
    start_LE = prepared.assumed.load_LE / prepared.assumed.load_LE.sum(axis=1, keepdims=True)
    file = tmp_path / "other.npz"
    np.savez(file, load=np.arange(3 * 32).reshape(3, 32) + 1.0)
    shifts = [
        shift(9.0, "start"),
        shift(1.0, "topic:3"),
        shift(2.0, "uniform", mix=0.25),
        shift(3.0, str(file)),
        shift(4.0, "power:0.5"),
    ]
    found = dict(course(prepared, shifts, ()))
    assert list(found) == [1.0, 2.0, 3.0, 4.0, 9.0]
    assert np.sort(found[1.0], axis=1) == pytest.approx(np.sort(start_LE, axis=1))
    assert not np.array_equal(found[1.0], start_LE)
    assert found[2.0] == pytest.approx(0.75 * found[1.0] + 0.25 / 32)
    assert found[3.0][0, 31] == pytest.approx(32 / sum(range(1, 33)))
    assert found[4.0].max() / found[4.0].min() == pytest.approx(32**0.5)
    assert np.array_equal(found[9.0], start_LE)


def test_loads_drift_around_their_mean_for_a_while(tmp_path):
    prepared = prepared_of(tmp_path)
    drift = LoadDrift(
        deployment="decode", start=10.0, end=20.0, every=0.01, noise=0.3, correlation=0.9, seed=4
    )
    changes = list(course(prepared, [shift(15.0, "topic:1")], [drift]))
    assert [at for at, _ in changes] == pytest.approx([10 + i / 100 for i in range(1001)])
    start_LE, topic_LE = (prepared.assumed.load_LE, changes[-1][1])
    logs = np.log(np.stack([load_LE for _, load_LE in changes[:500]]) / start_LE)
    logs -= logs.mean(axis=2, keepdims=True)
    assert logs.std() == pytest.approx(0.3, rel=0.1)
    assert (logs[1:] * logs[:-1]).mean() / (logs**2).mean() == pytest.approx(0.9, abs=0.05)
    later = np.log(changes[700][1] / topic_LE)
    assert later.std() == pytest.approx(0.3, rel=0.3), "the drift goes on around the new mean"
    assert [load_LE.tolist() for _, load_LE in course(prepared, [shift(15.0, "topic:1")], [drift])] == [
        load_LE.tolist() for _, load_LE in changes
    ]


@pytest.mark.parametrize(
    ("to", "message"),
    [
        (
            "recorded",
            "events.yaml:2: to is 'recorded': must be start, topic:NUMBER, .* only loads of DeepSeek-V3",
        ),
        ("topic:x", "events.yaml:2: to is 'topic:x': a topic has a number"),
        ("weather", "must be start, topic:NUMBER"),
        ("none.csv", "events.yaml:2: to: none.csv: cannot be read"),
        ("{}/short.csv", r"has loads \[1, 3\]; the model's MoE layers and experts are \[3, 32\]"),
    ],
)
def test_loads_that_cannot_be_are_refused_before_anything_runs(tmp_path, to, message):
    (tmp_path / "short.csv").write_text("1,2,3\n")
    with pytest.raises(InputError, match=message):
        course(prepared_of(tmp_path), [shift(1.0, to.format(tmp_path))], ())


def test_a_drift_of_no_time_changes_nothing(tmp_path):
    prepared = prepared_of(tmp_path)
    drift = LoadDrift(deployment="decode", start=10.0, end=10.0, every=1.0, noise=0.3, correlation=0.9)
    ((at, load_LE),) = course(prepared, (), [drift])
    assert at == 10.0
    assert load_LE / prepared.assumed.load_LE == pytest.approx(load_LE.sum() / prepared.assumed.load_LE.sum())
