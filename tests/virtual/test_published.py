"""The model against published deployments: the committed table, and bounds that a worse model would break."""

from dataclasses import replace
from pathlib import Path

import pytest

from moe_runtime.errors import InputError
from moe_runtime.virtual.cost.comparison import summary, table
from moe_runtime.virtual.cost.constants import constants
from moe_runtime.virtual.cost.published import error_of, held_out, predict, published_rows

DOCS = Path(__file__).resolve().parents[2] / "docs" / "cost-model.md"
KNOWN = constants()


@pytest.fixture(scope="module")
def judged():
    return summary(KNOWN)


def test_no_more_than_twelve_rows_and_six_figures_are_used():
    rows = published_rows()
    scored = {row.id for row in rows.values() if row.scored}
    inferred = [row.id for row in rows.values() if row.inferred]
    assert len(scored) == 27
    assert len(KNOWN.fitted.rows) == len(set(KNOWN.fitted.rows)) == 10
    assert inferred == ["lm_p_eplb_on"]
    assert {row.id for row in held_out(KNOWN)} == scored - set(KNOWN.fitted.rows) - set(inferred)
    factors = [f for f in type(KNOWN.fitted).__slots__ if f != "rows"]
    assert len(KNOWN.fitted.rows) + len(inferred) <= 12
    assert len(factors) + len(inferred) <= 6


def test_held_out_rows_are_met(judged):
    assert judged.held == 16
    assert judged.median < 0.08
    assert judged.worst < 0.20


def test_the_prompt_length_of_the_balancing_rows_is_that_of_the_row_with_balancing():
    """Nearest multiple of 128; the row without balancing has no say in it."""
    on, off = (published_rows()[f"lm_p_eplb_{x}"] for x in ("on", "off"))
    assert on.context == off.context
    errors = {
        c: abs(error_of(replace(on, context=c), KNOWN))
        for c in range(on.context - 256, on.context + 257, 128)
    }
    assert min(errors, key=errors.__getitem__) == on.context


def test_fitted_rows_are_met():
    assert max(abs(error_of(published_rows()[name], KNOWN)) for name in KNOWN.fitted.rows) < 0.06


def test_two_micro_batches_pay_from_between_64_and_128_sequences(judged):
    """No row with two micro-batches and fewer than 256 tokens a rank was fitted on."""
    assert 64 < judged.pays_from < 128
    small = {"lm_d_tbo_128_on", "lm_d_tbo_32_on", "lm_d_tbo_2_on"}
    assert not small & set(KNOWN.fitted.rows)


def test_balancing_off_costs_decode_what_was_measured(judged):
    assert judged.decode_off == pytest.approx(2.54, rel=0.15)


def test_balancing_off_costs_prefill_what_was_measured(judged):
    assert judged.prefill_off == pytest.approx(1.49, rel=0.15)


def test_the_table_of_the_documentation_is_what_the_model_says(judged):
    text = DOCS.read_text()
    begin, end = "<!-- rows -->\n", "<!-- end of rows -->"
    assert text[text.index(begin) + len(begin) : text.index(end)] == table(KNOWN)
    for figure in (
        f"median {judged.median:.1%}",
        f"worst {judged.worst:.1%}",
        f"{judged.prefill_off:.2f}",
        f"{judged.decode_off:.2f}",
        f"from {judged.pays_from} sequences",
    ):
        assert figure in text, figure
    for name in KNOWN.fitted.rows:
        assert f"`{name}`" in text
    fitted = KNOWN.fitted
    factors = (fitted.kernel_start * 1e6, fitted.normal_start * 1e6, fitted.normal_transfers)
    for factor in (*factors, fitted.drift_common, fitted.drift_sequence):
        assert f"| {factor:.3f} |" in text


def test_whole_model_tensor_parallelism_loses_to_wide_expert_parallelism_in_throughput():
    rows = published_rows()
    for tensor, expert in (("lm_p_tp16_4k", "lm_p_4k"), ("lm_d_tp16_c", "lm_d_2k_100")):
        published = rows[expert].value / rows[tensor].value
        predicted = predict(rows[expert], KNOWN)[0] / predict(rows[tensor], KNOWN)[0]
        assert published > 2.5
        assert predicted > 2.5


def test_a_file_that_is_wrong_is_named(tmp_path):
    (tmp_path / "x.yaml").write_text("sources: {a: b}\nrows:\n  - {id: r, source: a, typo: 1}\n")
    with pytest.raises(InputError, match="typo"):
        published_rows("x", tmp_path)
    with pytest.raises(InputError, match=r"y\.yaml"):
        published_rows("y", tmp_path)
