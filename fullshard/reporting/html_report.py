"""The HTML report of a run: one self-contained file with its curves, sample answers and settings."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fullshard.paths import replace_text

WIDTH, HEIGHT, MARGIN = 640, 200, 44
CURVES = {
    "Loss": ("loss", "eval_loss"),
    "Token accuracy": ("mean_token_accuracy", "eval_mean_token_accuracy"),
    "Learning rate": ("learning_rate",),
    "Gradient norm": ("grad_norm",),
    "Tokens per second": ("tokens_per_second",),
}
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:52em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse}td,th{padding:.15em .8em .15em 0;text-align:left}"
    "svg{display:block;background:#fafafa}h2{margin-top:2em}text{font-size:11px;fill:#555}"
    "pre{white-space:pre-wrap;background:#fafafa;padding:.5em;margin:.3em 0}th{vertical-align:top;font-weight:normal}"
)
COLORS = ("#2563eb", "#dc2626")


def write_report(
    path: Path,
    run_name: str | None,
    settings: dict[str, Any],
    history: Sequence[dict[str, Any]],
    facts: dict[str, Any],
    samples: Sequence[dict[str, Any]] = (),
) -> None:
    """Write the report. `settings` are those that differ from their defaults; `history` and `samples` are the logged
    records. Without a `run_name` the title is the name of the folder."""
    title = html.escape(run_name or path.parent.resolve().name)
    parts = [f"<!doctype html><meta charset=utf-8><title>{title}</title><style>{STYLE}</style><h1>{title}</h1>"]
    parts.append(_table(facts))
    for heading, names in CURVES.items():
        lines = {
            name: [(r["step"], r[name]) for r in history if isinstance(r.get(name), int | float)] for name in names
        }
        lines = {name: points for name, points in lines.items() if points}
        if lines:
            parts.append(f"<h2>{heading}</h2>{_chart(lines)}")
    if samples:
        parts.append(f"<h2>Answers</h2>{_answers(samples)}")
    parts.append(f"<h2>Settings</h2>{_table(settings)}<p>All other settings have their default values.</p>")
    replace_text(path, "\n".join(parts))


def _table(rows: dict[str, Any]) -> str:
    cells = (f"<tr><td>{html.escape(str(k))}</td><td>{html.escape(_text(v))}</td></tr>" for k, v in rows.items())
    return f"<table>{''.join(cells)}</table>"


def _answers(samples: Sequence[dict[str, Any]]) -> str:
    """Each prompt with the model's answers, by step."""
    by_prompt: dict[str, list[dict[str, Any]]] = {}
    for sample in samples:
        by_prompt.setdefault(sample["prompt"], []).append(sample)
    out = []
    for prompt, answers in by_prompt.items():
        texts = [(f"step {one['step']}", one["answer"]) for one in answers]
        if answers[-1]["reference"] is not None:
            texts.append(("reference", answers[-1]["reference"]))
        rows = (f"<tr><th>{html.escape(name)}</th><td><pre>{html.escape(text)}</pre></td></tr>" for name, text in texts)
        out.append(f"<h3>Prompt</h3><pre>{html.escape(prompt)}</pre><table>{''.join(rows)}</table>")
    return "".join(out)


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _chart(lines: dict[str, list[tuple[int, float]]]) -> str:
    """An SVG chart of named lines, each a list of (step, value). Non-finite values are left out."""
    points = [p for line in lines.values() for p in line if p[1] == p[1] and abs(p[1]) != float("inf")]
    if not points:
        return "<p>no finite values</p>"
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)

    def pixel(x: float, y: float) -> tuple[float, float]:
        across = (x - left) / (right - left or 1)
        up = (y - low) / (high - low or 1)
        return MARGIN + across * (WIDTH - 2 * MARGIN), HEIGHT - MARGIN / 2 - up * (HEIGHT - MARGIN)

    out = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img">']
    for (name, line), color in zip(lines.items(), COLORS, strict=False):
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in (pixel(*p) for p in line if p in points))
        out.append(f'<polyline fill="none" stroke="{color}" stroke-width="1.5" points="{path}"/>')
        if len(line) == 1:
            a, b = pixel(*line[0])
            out.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{color}"/>')
        legend = MARGIN + 130 * list(lines).index(name)
        out.append(f'<text x="{legend}" y="12" style="fill:{color}">{html.escape(name)}</text>')
    out.append(
        f'<text x="2" y="{MARGIN / 2 + 4}">{high:.4g}</text><text x="2" y="{HEIGHT - MARGIN / 2}">{low:.4g}</text>'
    )
    out.append(f'<text x="{MARGIN}" y="{HEIGHT - 4}">{left}</text>')
    out.append(f'<text x="{WIDTH - MARGIN}" y="{HEIGHT - 4}" text-anchor="end">step {right}</text></svg>')
    return "".join(out)
