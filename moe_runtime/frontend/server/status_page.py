"""The status page: ranks, queues, KV, balancedness and throughput as one HTML page, without scripts.

Owns its look. Reloads itself; readable at 400 px, in light and dark.
"""

from collections.abc import Iterable
from html import escape

from moe_runtime.frontend.board import KINDS, RankView
from moe_runtime.frontend.server.service import Service

_KIND_NAMES = {"new_prefill": "new prefill", "cached_prefill": "cached prefill"}

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --dim: #626770; --bar: #3b82c4;
  --bad: #c0392b; --good: #1e7746 }
@media (prefers-color-scheme: dark) {
  :root { --dim: #a0a6ae; --bar: #5aa0dd; --bad: #ff7b6b; --good: #5fc48a }
}
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 62rem; padding: 1rem }
h1 { font-size: 1.2rem; margin: 0; overflow-wrap: anywhere } h2 { font-size: 1rem; margin: 1.6rem 0 .4rem }
.state { font-weight: 600 } .good { color: var(--good) } .bad { color: var(--bad) } .dim { color: var(--dim) }
.scroll { overflow-x: auto } table { border-collapse: collapse; width: 100% }
th, td { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap }
th { font-weight: 500; color: var(--dim) }
th:first-child, td:first-child { text-align: left; padding-left: 0 }
td { font-variant-numeric: tabular-nums }
.bar { display: inline-block; width: 5rem; height: .6rem; background: var(--line); vertical-align: middle;
  border-radius: .3rem; overflow: hidden } .bar i { display: block; height: 100%; background: var(--bar) }
@media (max-width: 40rem) {
  thead { display: none }
  tr { display: grid; grid-template-columns: repeat(3, 1fr); gap: .2rem .6rem; padding: .5rem 0;
    border-bottom: 1px solid var(--line) }
  td { border: 0; padding: 0; text-align: left; white-space: normal; overflow-wrap: anywhere }
  td:first-child { grid-column: 1 / -1; font-weight: 600 }
  td::before { content: attr(data-label); display: block; font-size: .8rem; color: var(--dim) }
  td:first-child::before { content: none } .bar { width: 3rem }
}
"""


def render_status(model: str, service: Service, now: float) -> str:
    """The page. `now` as in the board."""
    board = service.metrics.board
    views = board.ranks()
    missing = service.not_ready()
    silent = [] if missing else board.stale(now)
    admission = service.admission
    parts = [
        f"<h1>{escape(model)}</h1>",
        _state(missing, silent, draining=admission.draining),
        f'<p class="dim">{admission.num_requests} outputs under way, {admission.num_waiting} of them'
        f" wait for a first token; {admission.tokens} tokens reserved</p>",
        "<h2>Ranks</h2>",
        _table(
            ("rank", "role", "running", "waiting", "pulling", "KV used", "cached", "output/s", "last heard"),
            (_rank_row(v, now) for v in views),
        ),
        "<h2>Tokens per second and node</h2>",
        _table(
            ("role", *(_KIND_NAMES.get(k, k) for k in KINDS)),
            (
                (escape(role), *(f"{rates[k]:,.1f}" for k in KINDS))
                for role, rates in board.role_rates(service.ranks_per_node).items()
            ),
        ),
    ]
    balance = board.balancedness()
    if balance:
        rows = ((escape(i), f"{value:.2f}", _bar(value)) for i, value in balance.items())
        parts += ["<h2>Balancedness</h2>", _table(("instance", "mean / max load", ""), rows)]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="refresh" content="5"><title>{escape(model)}: status</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>"
    )


def _state(missing: list[str], silent: list[str], *, draining: bool) -> str:
    if missing:
        text, kind = f"starting: waiting for {', '.join(missing)}", "bad"
    elif silent:
        text, kind = f"silent: {', '.join(silent)}", "bad"
    elif draining:
        text, kind = "shutting down: running requests finish, new ones are refused", "bad"
    else:
        text, kind = "ready", "good"
    return f'<p class="state {kind}">{escape(text)}</p>'


def _rank_row(view: RankView, now: float) -> tuple[str, ...]:
    s = view.status
    return (
        escape(f"{s.instance} rank {s.rank}"),
        escape(s.deployment),
        str(s.running),
        f"{s.waiting}" + (f" ({s.waiting_tokens:,} tokens)" if s.waiting else ""),
        str(s.pulling),
        f"{_bar(s.kv_used / s.kv_blocks)} {100 * s.kv_used / s.kv_blocks:.0f} %",
        f"{100 * s.kv_cached / s.kv_blocks:.0f} %",
        f"{view.rate('output'):,.1f}",
        f"{max(0.0, now - view.heard):.1f} s ago",
    )


def _bar(share: float) -> str:
    return f'<span class="bar"><i style="width:{100 * min(1.0, max(0.0, share)):.0f}%"></i></span>'


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Cells are HTML already. On a narrow screen a row is a block, and each cell says its column's name."""
    labels = [escape(name) for name in head]
    names = "".join(f"<th>{label}</th>" for label in labels)
    body = "".join(
        f"<tr>{''.join(_cell(label, cell) for label, cell in zip(labels, row, strict=True))}</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(label: str, cell: str) -> str:
    return f'<td data-label="{label}">{cell}</td>'
