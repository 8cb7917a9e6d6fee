#!/usr/bin/env python3
"""Open a report's page in headless Chromium, as a reader would: pictures, and what a program can see.

`python scripts/look_at_report.py PAGE.html RUN.json ... --out FOLDER`, runs in the order of the page. Writes
a picture for each width and theme, and ends with 1 if the browser logs an error, a figure is not RUN.json's,
something sticks out of the page, or a text is hard to read on its ground. Needs Chromium (Debian: chromium).
"""

import argparse
import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from moe_runtime.report.files import load_report
from moe_runtime.report.html.figures import Run, count, milliseconds
from moe_runtime.report.show import number, percent

WIDTHS = (1280, 400)
THEMES = {"light": 1, "dark": 0}  # Chromium's numbers for them
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
NARROWEST = 500  # Chromium's windows; a narrower page is shown in a frame
CONTRAST = 4.5  # WCAG 2, level AA
FORMS = (
    number,
    percent,
    count,
    milliseconds,
    lambda v: f"{v:.3f}",
    lambda v: f"{v:.2f}",
)

# Runs beside the page, which allows no scripts of its own, and writes what it sees as JSON.
PROBE = """
addEventListener("load", () => {
  const frame = document.querySelector("iframe"), page = frame.contentDocument, view = frame.contentWindow;
  page.getElementById("theme-" + frame.dataset.theme).checked = true;
  const rgb = c => (c.match(/[\\d.]+/g) || []).map(Number);
  const light = c => rgb(c).slice(0, 3).map(v => v / 255)
    .map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const ground = e => {
    for (; e; e = e.parentElement) {
      const color = view.getComputedStyle(e).backgroundColor;
      if ((rgb(color)[3] ?? 1) > 0) return color;
    }
    return "rgb(255, 255, 255)";
  };
  const width = page.documentElement.clientWidth, outside = [], faint = [], figures = [];
  for (const e of page.body.querySelectorAll("*")) {
    if (e.dataset.path !== undefined) figures.push([Number(e.dataset.run), e.dataset.path, e.textContent]);
    const own_text = [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
    if (!own_text || e.closest("title, fieldset")) continue;
    const box = e.getBoundingClientRect(), text = e.textContent.trim().slice(0, 40);
    if (!box.width || !e.checkVisibility()) continue;
    if (!e.closest(".scroll, pre") && (box.right > width + 1 || box.left < -1)) outside.push(text);
    const style = view.getComputedStyle(e), cell = e.classList.contains("on");
    if (cell) continue;  // its ground is a path, not a parent
    const own = light(e.closest("svg") ? style.fill : style.color), below = light(ground(e));
    const ratio = (Math.max(own, below) + .05) / (Math.min(own, below) + .05);
    if (ratio < CONTRAST) faint.push(text + " " + ratio.toFixed(2));
  }
  const seen = {height: page.documentElement.scrollHeight, wide: page.documentElement.scrollWidth > width,
    outside, faint, figures};
  document.querySelector("pre").textContent = JSON.stringify(seen);
});
"""


def browse(program: str, *flags: str, page: Path) -> subprocess.CompletedProcess[str]:
    """Open a file without a window."""
    with tempfile.TemporaryDirectory() as profile:
        fixed = (
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={profile}",
        )
        more = ("--allow-file-access-from-files", "--enable-logging=stderr", "--virtual-time-budget=5000")
        return subprocess.run(
            [program, *fixed, *more, *flags, page.as_uri()],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )


def console_errors(program: str, page: Path) -> list[str]:
    """What the browser says of the page itself."""
    log = browse(program, "--dump-dom", page=page).stderr
    return [line for line in log.splitlines() if ":CONSOLE" in line]


def probe(program: str, page: str, width: int, theme: str, folder: Path) -> dict[str, Any]:
    """What stands where at a width: see PROBE."""
    frame = f'<iframe data-theme="{theme}" style="border:0;width:{width}px;height:900px"'
    wrapper = folder / "probe.html"
    wrapper.write_text(
        f'<!doctype html><meta charset="utf-8"><body style="margin:0"><pre></pre>'
        f"<script>const CONTRAST = {CONTRAST};{PROBE}</script>"
        f'{frame} srcdoc="{html.escape(page)}"></iframe>',
        encoding="utf-8",
    )
    dom = browse(program, f"--window-size={max(width, NARROWEST)},900", "--dump-dom", page=wrapper).stdout
    found = re.search(r"<pre>(\{.*?\})</pre>", dom, re.DOTALL)
    assert found is not None, "the page did not load"
    seen: dict[str, Any] = json.loads(html.unescape(found[1]))
    return seen


def wrong_figures(figures: Iterable[tuple[int, str, str]], runs: Sequence[Run]) -> list[str]:
    """Figures, as (run, path, text), that are not what RUN.json has there."""
    wrong = []
    for index, path, text in figures:
        value = look_up(runs[index], path)
        if isinstance(value, str):
            right = text == value
        elif value is None:
            right = text.endswith("n/a")
        else:
            right = any(text == form(value) or text.endswith(f": {form(value)}") for form in FORMS)
        if not right:
            wrong.append(f"run {index}, {path}: {text!r} for {value!r}")
    return wrong


def look_up(run: Run, path: str) -> Any:
    """The field at a dotted path; names of deployments have no dots."""
    keys: list[str | int] = []
    for part in path.split("."):
        keys.append(int(part) if isinstance(run.value(*keys), list | tuple) else part)
    return run.value(*keys)


def picture(program: str, page: Path, width: int, height: int, theme: str, out: Path, folder: Path) -> None:
    """The whole page as a PNG; under NARROWEST in a frame, with an empty strip beside it."""
    wrapper = folder / "picture.html"
    style = f"border:0;width:{width}px;height:{height}px"
    wrapper.write_text(
        f'<!doctype html><body style="margin:0"><iframe src="{page.as_uri()}" style="{style}"></iframe>'
    )
    browse(
        program,
        f"--window-size={max(width, NARROWEST)},{height}",
        f"--blink-settings=preferredColorScheme={THEMES[theme]}",
        f"--screenshot={out}",
        page=wrapper,
    )


def look(program: str, page: Path, runs: Sequence[Run], out: Path) -> list[str]:
    """Pictures into `out`; what is wrong."""
    wrong = [f"console: {line}" for line in console_errors(program, page)]
    text = page.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        for width in WIDTHS:
            for theme in THEMES:
                seen = probe(program, text, width, theme, Path(folder))
                where = f"{width} px, {theme}"
                wrong += [f"{where}: scrolls sideways"] * seen["wide"]
                wrong += [f"{where}: sticks out: {t}" for t in seen["outside"]]
                wrong += [f"{where}: hard to read: {t}" for t in seen["faint"]]
                wrong += [f"{where}: {t}" for t in wrong_figures(seen["figures"], runs)]
                shot = out / f"{page.stem}-{width}-{theme}.png"
                picture(program, page, width, seen["height"], theme, shot, Path(folder))
                sys.stdout.write(f"{shot}: {len(seen['figures'])} figures, {seen['height']} px high\n")
    return wrong


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Open a report's page in headless Chromium")
    parser.add_argument("page", type=Path)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN.json")
    parser.add_argument("--out", type=Path, default=Path("runs"), metavar="FOLDER", help="for the pictures")
    given = parser.parse_args(arguments)
    program = next((found for name in PROGRAMS if (found := shutil.which(name))), None)
    if program is None:
        sys.stderr.write(f"Chromium is not installed (looked for {', '.join(PROGRAMS)})\n")
        return 2
    given.out.mkdir(parents=True, exist_ok=True)
    runs = [Run.of(i, path.name, load_report(path)) for i, path in enumerate(given.runs)]
    wrong = look(program, given.page.resolve(), runs, given.out.resolve())
    sys.stdout.write("".join(f"{line}\n" for line in wrong) or "nothing is wrong\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
