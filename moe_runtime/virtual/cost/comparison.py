"""Comparison: predicted against published, every row, as a table for docs/cost-model.md.

Owns the summary figures the model is judged by: errors of the rows that were not fitted on, the effect of
balancing, and where two micro-batches begin to pay.
"""

from dataclasses import dataclass, replace

import numpy as np

from moe_runtime.virtual.cost.constants import Constants
from moe_runtime.virtual.cost.published import PublishedRow, error_of, held_out, predict, published_rows

LARGEST_BATCH = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What the held-out rows say.

    median, worst          absolute relative error of the held-out rows
    prefill_off, decode_off  throughput with balancing over that without
    pays_from              decoding sequences a rank from which two micro-batches are faster
    """

    held: int
    median: float
    worst: float
    prefill_off: float
    decode_off: float
    pays_from: int


def summary(known: Constants) -> Summary:
    """Evaluate the model as it is committed."""
    rows = published_rows()
    errors = [abs(error_of(row, known)) for row in held_out(known)]
    value = {
        name: predict(rows[name], known)[0]
        for name in ("lm_p_eplb_on", "lm_p_eplb_off", "lm_d_eplb_on", "lm_d_eplb_off")
    }
    return Summary(
        held=len(errors),
        median=float(np.median(errors)),
        worst=max(errors),
        prefill_off=value["lm_p_eplb_on"] / value["lm_p_eplb_off"],
        decode_off=value["lm_d_eplb_on"] / value["lm_d_eplb_off"],
        pays_from=pays_from(rows["lm_d_tbo_128_on"], known),
    )


def pays_from(row: PublishedRow, known: Constants) -> int:
    """The least number of sequences a rank at which two micro-batches beat one, by bisection."""
    low, high = 1, LARGEST_BATCH
    while high - low > 1:
        middle = (low + high) // 2
        two, one = (predict(replace(row, batch=middle, micro_batches=split), known)[0] for split in (2, 1))
        low, high = (low, middle) if two > one else (middle, high)
    return high


def table(known: Constants) -> str:
    """Markdown: one line per published row."""
    lines = [
        "| row | machine | published | predicted | error | used for | bound by |",
        "|---|---|---|---|---|---|---|",
    ]
    judged = {row.id for row in held_out(known)}
    for row in published_rows().values():
        value, cost = predict(row, known)
        used = "fit" if row.id in known.fitted.rows else row.inferred
        use = "score" if row.id in judged else used or "report"
        lines.append(
            f"| {row.id} | {row.machine} | {row.value:,.0f} | {value:,.0f} | {value / row.value - 1:+.1%}"
            f" | {use} | {cost.bound} |"
        )
    return "\n".join(lines) + "\n"
