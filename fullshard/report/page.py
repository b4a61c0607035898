"""A self-contained HTML page with charts: style, scripts and data are inside, and a policy in it forbids every request.

Text is escaped here and nowhere else: `escape` for text in HTML, `script_json` for data in scripts.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from fullshard.report.charts import PACKAGE, Chart, chart_library
from fullshard.report.vega_lite import DASHES

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def escape(value: Any) -> str:
    """Text for HTML, also in attributes. Control characters are replaced."""
    return html.escape(_CONTROL.sub("\ufffd", value_text(value)))


def value_text(value: Any) -> str:
    """A value as people read it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:,.6g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def script_json(value: Any) -> str:
    """JSON that cannot end the script it is in. ASCII only; NaN and infinity are not allowed."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, default=str)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


# --- parts of a page ------------------------------------------------------------------------------------------------


def section(id: str, title: str, *parts: str) -> str:
    """A part of the page with a heading; empty if there is nothing in it."""
    inside = "\n".join(part for part in parts if part)
    if not inside:
        return ""
    heading = f'<h2 id="{id}-title">{escape(title)}</h2>'
    return f'<section id="{id}" aria-labelledby="{id}-title">\n{heading}\n{inside}\n</section>'


def fact_list(id: str, facts: Mapping[str, Any]) -> str:
    """Names with their values, in columns; without those that are None."""
    rows = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in facts.items()
        if value is not None
    )
    return f'<dl class="facts" id="{id}">{rows}</dl>' if rows else ""


def table(header: Sequence[str], rows: Iterable[Sequence[Any]], label: str) -> str:
    """A table that scrolls inside its own box, without the columns that are empty in every row."""
    rows = [list(row) for row in rows]
    filled = [i for i in range(len(header)) if i == 0 or any(row[i] not in ("", None) for row in rows)]
    header, rows = [header[i] for i in filled], [[row[i] for i in filled] for row in rows]
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in header)
    body = "".join(
        "<tr>"
        + "".join(f'<th scope="row">{escape(c)}</th>' if i == 0 else f"<td>{escape(c)}</td>" for i, c in enumerate(r))
        + "</tr>"
        for r in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def closed_part(summary: str, inside: str, *, open: bool = False, prints: bool = False) -> str:
    """A part that is closed at first."""
    marks = f"{' open' if open else ''}{' data-print' if prints else ''}"
    return f"<details{marks}><summary>{escape(summary)}</summary>{inside}</details>"


def note(text: str, *, bad: bool = False) -> str:
    """A short remark."""
    return f'<p class="note{" bad" if bad else ""}">{escape(text)}</p>'


def figure(chart: Chart) -> str:
    """The place of a chart, with its legend, notes and the table of its values."""
    label = f"{chart.id}-caption"
    few = f" ({len(chart.rows):,} of {chart.row_count:,} rows)" if len(chart.rows) < chart.row_count else ""
    rows = table(chart.header, chart.rows, f"Values of {chart.title}")
    wide = ' class="wide"' if chart.wide else ""
    return (
        f'<figure id="{escape(chart.id)}" aria-labelledby="{escape(label)}"{wide}>'
        f'<figcaption id="{escape(label)}">{escape(chart.title)}</figcaption>{_legend(chart)}'
        f'<div class="chart" data-chart="{escape(chart.id)}" role="img" aria-label="{escape(chart.description)}"></div>'
        + "".join(note(text) for text in chart.notes)
        + closed_part(f"Values{few}", rows, open=chart_library() is None)
        + "</figure>"
    )


def _legend(chart: Chart) -> str:
    items = []
    for name, color, dash in chart.legend:
        dashes = " ".join(map(str, DASHES[dash]))
        stroke = f'stroke="var(--s{color})" stroke-width="4" stroke-dasharray="{dashes}"'
        line = f'<line x1="0" y1="5" x2="22" y2="5" {stroke}/>'
        items.append(f'<li><svg width="22" height="10" aria-hidden="true">{line}</svg>{escape(name)}</li>')
    return f'<ul class="legend">{"".join(items)}</ul>' if items else ""


CONTROLS = {
    "smooths": '<label>Smoothing <input type="range" data-choice="smoothing" min="0" max="0.99" step="0.01" value="0">'
    "</label>",
    "log": '<label><input type="checkbox" data-choice="log"> Logarithmic axes</label>',
}
"""What a reader may choose for the charts below, by the property that one of them must have."""


def figures(charts: Sequence[Chart]) -> str:
    """Charts beside each other, as many as the width allows, below what the reader may choose for them."""
    if not charts:
        return ""
    choices = "".join(control for name, control in CONTROLS.items() if any(getattr(one, name) for one in charts))
    controls = f'<p class="controls" hidden>{choices}</p>' if choices else ""
    return f'{controls}<div class="charts">{"".join(map(figure, charts))}</div>'


# --- the page -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contents:
    """What a page shows."""

    title: str
    sections: Mapping[str, str]
    """By title, for the table of contents: what `section` returned."""
    charts: Sequence[Chart]
    lead: str = ""
    """HTML below the title."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Blocks of JSON by id, for readers of the page and its scripts."""


def page(
    title: str, sections: Mapping[str, str], charts: Sequence[Chart], *, lead: str = "",
    data: Mapping[str, Any] | None = None, scripts: Sequence[str] = (),
) -> str:  # fmt: skip
    """The whole page."""
    return whole_page(Contents(title, sections, charts, lead, data or {}), scripts)


def whole_page(contents: Contents, scripts: Sequence[str] = (), connects: bool = False) -> str:
    """The page with more scripts, which may ask the page's own server if it `connects`."""
    code = [text for text in (chart_library(), _asset("page.js"), *scripts) if text]
    return "\n".join([
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(code, connects)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(contents.title)}</title>\n<style>\n{_asset('page.css')}</style>\n</head>\n<body>",
        body(contents),
        *(f"<script>{text}</script>" for text in code),
        "</body>\n</html>\n",
    ])  # fmt: skip


def body(contents: Contents) -> str:
    """What changes with the contents: the body of the page without its scripts."""
    charts = {
        one.id: {"spec": one.spec, "columns": one.columns, "names": one.names, "smooths": one.smooths, "log": one.log}
        for one in contents.charts
    }
    blocks = {"charts": charts, **contents.data}
    there = {name: text for name, text in contents.sections.items() if text}
    links = "".join(f'<li><a href="#{_id_of(text)}">{escape(name)}</a></li>' for name, text in there.items())
    undrawn = (
        f"Charts are not drawn: {PACKAGE} is not installed here. The tables have the values; for the charts, "
        "pip install 'fullshard[report]' and make the report again with fullshard report."
    )
    lead = f"{contents.lead}\n{'' if chart_library() else note(undrawn)}"
    return "\n".join([
        '<a class="skip" href="#main">Skip to the content</a>',
        f"<header>\n<h1>{escape(contents.title)}</h1>\n{lead}</header>",
        f'<nav aria-label="Contents"><ul>{links}</ul></nav>',
        '<noscript><p class="note">Charts need JavaScript; the tables have their values.</p></noscript>',
        '<main id="main">', *there.values(), "</main>",
        '<div id="tip" role="status" hidden></div>',
        *(f'<script type="application/json" id="{id}">{script_json(block)}</script>' for id, block in blocks.items()),
    ])  # fmt: skip


def _id_of(text: str) -> str:
    match = re.match(r'<section id="([^"]+)"', text)
    return match[1] if match else "main"


def _policy(scripts: Sequence[str], connects: bool) -> str:
    """Only these scripts run, and nothing is requested but, if it `connects`, from the page's own server."""
    allowed = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(t.encode()).digest()).decode()}'" for t in scripts)
    own = "'self'" if connects else "'none'"
    rest = f"style-src 'unsafe-inline'; connect-src {own}; base-uri 'none'; form-action 'none'"
    return f"default-src 'none'; script-src {allowed}; {rest}"


@functools.cache
def _asset(name: str) -> str:
    return files("fullshard.report").joinpath(name).read_text(encoding="utf-8")
