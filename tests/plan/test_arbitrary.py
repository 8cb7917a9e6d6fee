"""Whatever stands in a plan, the answer is a plan or a PlanError."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from moe_runtime.errors import PlanError
from moe_runtime.plan.keys import DEPLOYMENTS, leaf_paths, schema_keys
from moe_runtime.plan.load import LoadedPlan, load_plan
from moe_runtime.plan.resolve import resolve
from moe_runtime.plan.validate import validate
from tests.spec.model_specs import SMALL_DEEPSEEK

KEYS = sorted({key for path in schema_keys() for key in path} | {"prefill", "decode", "unified"})
SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8)
    | st.sampled_from(["auto", "torch", "local", "float32", "cpu", "cpu-host", "slots"])
)  # fmt: skip
NAMES = st.sampled_from(KEYS) | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)
SETTINGS = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def attempt(path: Path, overrides: tuple[str, ...] = ()) -> LoadedPlan | PlanError:
    """The whole way of a plan: what it became, or why it was refused."""
    try:
        loaded = load_plan(path, overrides)
        effective = resolve(loaded.plan, SMALL_DEEPSEEK)
        validate(loaded, effective, SMALL_DEEPSEEK)
    except PlanError as error:
        return error
    return loaded


def check_error(result: LoadedPlan | PlanError) -> None:
    """A refusal has a line of printable text per problem."""
    if isinstance(result, PlanError):
        lines = str(result).splitlines()
        assert len(lines) == len(result.problems)
        assert all(line.strip() and line.isprintable() for line in lines)


@SETTINGS
@given(values=st.dictionaries(NAMES, VALUES, max_size=5) | VALUES)
@example(values={"server": 0.0})
def test_arbitrary_trees(tmp_path: Path, values: Any):
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False, allow_unicode=False), encoding="utf-8")
    check_error(attempt(path))


@SETTINGS
@given(data=st.binary(max_size=60) | st.text("ab:{}[]&*!#|>-'\"\n \t?,%@0.~", max_size=40).map(str.encode))
def test_arbitrary_bytes(tmp_path: Path, data: bytes):
    path = tmp_path / "plan.yaml"
    path.write_bytes(data)
    result = attempt(path)
    assert isinstance(result, PlanError), "no such bytes make a plan"
    check_error(result)


@SETTINGS
@given(overrides=st.lists(st.text(max_size=30) | st.sampled_from(KEYS).map(lambda k: f"{k}=1"), max_size=3))
def test_arbitrary_overrides(tmp_path: Path, overrides: list[str]):
    path = tmp_path / "plan.yaml"
    path.write_text("model: {path: x}\ndeployments: {unified: {}}\n")
    check_error(attempt(path, tuple(overrides)))


@SETTINGS
@given(data=st.data())
def test_arbitrary_values_of_real_keys(tmp_path: Path, data: st.DataObject):
    """One real key gets any value: accepted plans have it, refused ones name it or what it breaks."""
    path = tmp_path / "plan.yaml"
    path.write_text("model: {path: x}\ndeployments: {prefill: {}, decode: {}}\n")
    key = ".".join(data.draw(st.sampled_from(list(leaf_paths(["prefill", "decode"])))))
    value = data.draw(SCALARS)
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=False).replace("\n...", "").strip()
    result = attempt(path, (f"{key}={text}",))
    check_error(result)
    if isinstance(result, PlanError):
        section = key.split(".")[0]
        assert {p.key.split(".")[0] for p in result.problems} <= {section, "cluster", "deployments", "model"}
    else:
        assert str(result.origins[key]) == "command line"


def test_key_tables_cover_each_other():
    leaves = {
        path[:1] + ("*",) + path[2:] if path[0] == DEPLOYMENTS else path for path in leaf_paths(["decode"])
    }
    assert leaves == {p for p, key in schema_keys().items() if key.section is None and p != (DEPLOYMENTS,)}


def test_defaults_are_accepted_by_their_keys():
    for key in schema_keys().values():
        if isinstance(key.default, str | int | float):
            assert key.accepts(key.default), key.path


@pytest.mark.parametrize("text", ["", "a", "0", "auto"])
def test_pathological_keys_are_printable(tmp_path: Path, text: str):
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump({f"{text}\n\x1b[31m.": 1, "model": {"path": "x"}}))
    result = attempt(path)
    assert isinstance(result, PlanError)
    check_error(result)
