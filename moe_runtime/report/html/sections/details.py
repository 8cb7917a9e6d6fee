"""Everything else: what ran where, the figures of each deployment, the plan, and why figures are missing."""

import json
from collections.abc import Sequence

from moe_runtime.report.html.figures import Format, Key, Run, count
from moe_runtime.report.html.markup import Child, Html, el, join
from moe_runtime.report.html.parts import bullets, run_heading, section
from moe_runtime.report.html.tables import cell, fold, name, table
from moe_runtime.report.show import number, percent

_ROWS: tuple[tuple[str, tuple[Key, ...], Format], ...] = (
    ("ranks", ("ranks",), count),
    ("nodes", ("nodes",), count),
    ("EP degree", ("expert_parallel",), count),
    ("redundant experts", ("redundant_experts",), count),
    ("steps", ("steps",), count),
    ("mean step, ms", ("mean_step_ms",), number),
    ("step fill", ("step_fill",), percent),
    ("KV blocks of a rank", ("kv", "blocks_per_rank"), count),
    ("KV blocks used, peak", ("kv", "peak_fraction"), percent),
    ("KV blocks used, mean", ("kv", "mean_fraction"), percent),
    ("preemptions", ("preemptions",), count),
    ("recomputed tokens", ("recomputed_tokens",), count),
    ("dispatched, rows per token", ("exchange", "dispatched_rows_per_token"), number),
    ("dispatched, bytes per token", ("exchange", "dispatched_bytes_per_token"), number),
    ("combined, bytes per token", ("exchange", "combined_bytes_per_token"), number),
    ("transport time hidden", ("hidden",), percent),
    ("steps in two micro-batches", ("overlap", "overlapped_fraction"), percent),
)
_COUNTERS = (
    ("steps by dispatch mode", ("dispatch_modes",)),
    ("steps by why one or two micro-batches", ("overlap", "reasons")),
)
_RANK = (
    ("steps", count),
    ("new_prefill_tokens_per_second", number),
    ("decode_rows_per_second", number),
    ("mean_decode_rows", number),
    ("peak_kv_fraction", percent),
    ("active_fraction", percent),
)


def details(runs: Sequence[Run]) -> Html:
    parts: list[Child] = []
    for run in runs:
        parts += [
            run_heading(run, runs),
            _facts(run),
            _deployments(run),
            _ranks(run),
            _plan(run),
            _missing(run),
        ]
    return section("details", "Details", *parts)


def _facts(run: Run) -> Html:
    entries: list[tuple[str, Child]] = [
        ("model", _model(run)),
        ("trace", join([run.word("options", "trace"), " at speed ", run.figure("options", "speed")])),
        ("window", run.word("window", "note")),
        ("hardware", join([run.word("machine", "hardware"), ", ", run.word("machine", "device")])),
        (
            "written on",
            join(
                [run.word("machine", "cpu_model"), ", ", run.figure("machine", "cores", form=count), " cores"]
            ),
        ),
        ("plan", el("code", run.word("plan_digest"))),
        ("moe-runtime", join([run.word("version"), ", commit ", el("code", run.word("commit"))])),
        ("created", run.word("created")),
    ]
    if run.report.simulation is not None:
        entries += [
            ("simulation", join([key, ": ", run.word("simulation", key)]))
            for key in ("balance", "weights", "events")
            if run.value("simulation", key) is not None
        ]
        virtual = run.figure("simulation", "virtual_seconds")
        entries.append(("simulated", join([virtual, " virtual seconds"])))
    return el("dl", join(join([el("dt", term), el("dd", value)]) for term, value in entries))


def _model(run: Run) -> Html:
    def of(field: str) -> Html:
        return run.figure("model", field, form=count)

    return join(
        [
            run.word("model", "path"),
            " (",
            run.word("model", "family"),
            ", ",
            run.word("model", "dtype"),
            "): ",
            of("num_layers"),
            " layers, ",
            of("num_moe_layers"),
            " of them MoE with ",
            of("num_experts"),
            " experts, ",
            of("top_k"),
            " for each token",
        ]
    )


def _deployments(run: Run) -> Html:
    names = [d.name for d in run.report.deployments]
    head: list[Child] = ["", *(run.word("deployments", n, "name") for n in names)]
    rows = [
        (name(shown), *(run.figure("deployments", n, *at, form=form, tag="td") for n in names))
        for shown, at, form in _ROWS
    ]
    rows += [
        (name(shown), *(cell(_counters(run, ("deployments", n, *at)), words=True) for n in names))
        for shown, at in _COUNTERS
    ]
    rows.append(
        (name("dispatch backend"), *(cell(run.word("deployments", n, "dispatch_backend")) for n in names))
    )
    kernels = [cell(_kernels(run, n), words=True) for n in names]
    rows.append((name("kernels"), *kernels))
    return fold("Deployments", table(head, rows))


def _counters(run: Run, path: tuple[Key, ...]) -> Html:
    counts = run.value(*path)
    return join(
        join([", " if i else "", str(key), " ", run.figure(*path, key, form=count)])
        for i, key in enumerate(counts)
    )


def _kernels(run: Run, role: str) -> Html:
    modules = run.value("deployments", role, "kernels")
    return join(
        join([", " if i else "", run.word("deployments", role, "kernels", op)])
        for i, op in enumerate(modules)
    )


def _ranks(run: Run) -> Html:
    rows = []
    for d in run.report.deployments:
        for i in range(len(d.per_rank)):
            at = ("deployments", d.name, "per_rank", i)
            who = name(run.word(*at, "instance"), " rank ", run.figure(*at, "rank", form=count))
            rows.append((who, *(run.figure(*at, field, form=form, tag="td") for field, form in _RANK)))
    head = (
        "",
        "steps",
        "new prefill/s",
        "decode rows/s",
        "decode rows of a step",
        "peak KV",
        "time in steps",
    )
    return fold("Ranks", table(head, rows))


def _plan(run: Run) -> Html:
    shown = json.dumps(run.value("plan"), indent=2, ensure_ascii=False)
    return fold("Plan as it ran", el("pre", shown, data_run=run.index, data_json="plan", tabindex=0))


def _missing(run: Run) -> Html | None:
    gaps = run.report.missing
    if not gaps:
        return None
    items = [
        join([el("code", run.word("missing", i, "path")), ": ", run.word("missing", i, "reason")])
        for i in range(len(gaps))
    ]
    return fold("Why figures are n/a", bullets(items))
