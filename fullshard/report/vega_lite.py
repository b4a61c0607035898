"""Specifications of charts in Vega-Lite: https://vega.github.io/vega-lite/docs/.

The data of a chart has the name `values` and these fields: `s`, the number of the series; `n`, its name, which the page
adds; `y`; for lines `x`, `d` (1 where a dot is drawn) and `l` (a label); for bars `b`, the name of the bar. `a` and `m`
are of smoothed lines, which the page draws.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

COLORS = 10
"""The number of colors in the page's style; series beyond are told apart by their dashes."""
DASHES = ((1, 0), (6, 3), (2, 3), (8, 3, 2, 3))
HEIGHT = 220
WIDE_HEIGHT = 340
"""The height of a chart that has a row of the page for itself."""
BAR = 26
"""The height of a horizontal bar, with the gap to the next."""
LABELLED = 24
"""The most vertical bars that have their names below them."""
VALUES = ",.6~g"
"""d3's format of values where the chart has none of its own."""
TICKS = ",.12~g"
"""The same on axes, without powers of ten."""
X_FORMS = {"step": ",~d", "tokens": "~s"}
"""d3's formats of numbers on x axes."""

Spec = dict[str, Any]


@dataclass(frozen=True)
class Axes:
    """Titles and scales of a chart."""

    x: str
    unit: str
    form: str
    """d3's format of values."""
    zero: bool = False
    x_labels: Mapping[float, str] | None = None
    """Text instead of numbers on the x axis."""
    x_domain: tuple[float, float] | None = None
    """Where the x axis begins and ends; by default with the data."""


def lines(
    styles: Sequence[tuple[int, int]], axes: Axes, dots: bool, labelled: bool, markers: Sequence[tuple[float, str]],
    height: int,
) -> Spec:  # fmt: skip
    """A chart of lines; those of the values are the first layer. `markers` stand at the bottom."""
    scale_x: Spec = {"nice": False, "zero": False}
    if axes.x_domain is not None:
        scale_x["domain"] = list(axes.x_domain)
    encoding = {
        "x": {"field": "x", "type": "quantitative", "scale": scale_x, "axis": _x_axis(axes)},
        "y": {**_amount(axes), "scale": {"zero": axes.zero}},
        "color": _color(styles),
    }
    dashes = {"domain": list(range(len(styles))), "range": [list(DASHES[dash]) for _, dash in styles]}
    stroke = {"strokeDash": {"field": "s", "type": "ordinal", "legend": None, "scale": dashes}}
    layers: list[Spec] = [{"mark": {"type": "line", "strokeWidth": 1.8}, "encoding": stroke}]
    if dots:
        layers.append({"mark": _point(26), "transform": [{"filter": "datum.d && isValid(datum.y)"}]})
    layers.append(_nearest(axes, labelled))
    if markers:
        layers.append(_marker_layer(markers, height))
    return _chart({"encoding": encoding, "layer": layers}, height)


def bars(styles: Sequence[tuple[int, int]], axes: Axes, count: int, horizontal: bool, ticks: int | None) -> Spec:
    """A chart of stacked bars. `ticks` is the number of the series that is shown as ticks, not as a part."""
    across, up = ("y", "x") if horizontal else ("x", "y")
    many = count > LABELLED and not horizontal
    axis = {
        "title": axes.x or None, "labelAngle": 0, "labelLimit": 160, "labelOverlap": "greedy", "labels": not many,
        "ticks": not many,
    }  # fmt: skip
    gap = {"paddingInner": 0.05 if many else 0.25}
    shared = {
        across: {"field": "b", "type": "ordinal", "sort": None, "axis": axis, "scale": gap},
        "color": _color(styles),
        "tooltip": [_text("b"), _text("n"), {**_text("y"), "type": "quantitative", "format": axes.form}],
    }
    stacked = {up: {**_amount(axes), "stack": "zero"}, "order": {"field": "s", "type": "ordinal"}}
    bar, height = {"type": "bar", "aria": False}, BAR * count if horizontal else HEIGHT
    if ticks is None:
        return _chart({"mark": bar, "encoding": {**shared, **stacked}}, height)
    tick = {"type": "tick", "thickness": 3, "aria": False}
    layers = [
        {"mark": bar, "transform": [{"filter": f"datum.s != {ticks}"}], "encoding": stacked},
        {"mark": tick, "transform": [{"filter": f"datum.s == {ticks}"}], "encoding": {up: _amount(axes)}},
    ]
    return _chart({"layer": layers, "encoding": shared}, height)


# --- parts ----------------------------------------------------------------------------------------------------------


def _chart(body: Spec, height: int) -> Spec:
    axis = {
        "labelColor": "var(--muted)", "titleColor": "var(--muted)", "gridColor": "var(--grid)",
        "domainColor": "var(--rule)", "tickColor": "var(--rule)", "titleFontWeight": "normal", "labelFontSize": 11,
        "titleFontSize": 11,
    }  # fmt: skip
    return {
        "width": "container", "height": height, "autosize": {"type": "fit-x", "contains": "padding"},
        "data": {"name": "values"},
        "config": {"font": "system-ui, sans-serif", "view": {"stroke": None}, "axis": axis, "background": None},
        **body,
    }  # fmt: skip


def _x_axis(axes: Axes) -> Spec:
    if axes.x_labels is None:
        return {"title": axes.x, "format": X_FORMS.get(axes.x, TICKS), "tickMinStep": 1}
    # JSON, whose strings no text in them can end.
    labels = json.dumps({f"{at:g}": text for at, text in axes.x_labels.items()})
    expression = f"split({labels}['' + datum.value], ' ')"  # a line for each word
    shown = {"labelOverlap": "greedy", "labelSeparation": 4, "labelFlush": False}
    return {"title": axes.x, "values": list(axes.x_labels), "labelExpr": expression, **shown}


def _amount(axes: Axes) -> Spec:
    form = TICKS if axes.form == VALUES else axes.form
    return {"field": "y", "type": "quantitative", "axis": {"title": axes.unit or None, "format": form}}


def _color(styles: Sequence[tuple[int, int]]) -> Spec:
    scale = {"domain": list(range(len(styles))), "range": [f"var(--s{color})" for color, _ in styles]}
    return {"field": "s", "type": "ordinal", "scale": scale, "legend": None}


def _point(size: int, shape: str = "circle") -> Spec:
    # Points are many, and the table has their values: screen readers pass over them.
    return {"type": "point", "shape": shape, "filled": True, "size": size, "opacity": 1, "aria": False}


def _nearest(axes: Axes, labelled: bool) -> Spec:
    """The point that is nearest to the pointer, with its tooltip."""
    where = _text("l") if labelled else {"field": "x", "type": "quantitative", "title": axes.x}
    point = {key: value for key, value in _point(60).items() if key != "opacity"}
    return {
        "mark": point,
        "transform": [{"filter": "isValid(datum.y)"}],
        "params": [
            {"name": "hover", "select": {"type": "point", "nearest": True, "on": "pointermove", "clear": "pointerout"}}
        ],
        "encoding": {
            "opacity": {"condition": {"param": "hover", "empty": False, "value": 1}, "value": 0},
            "tooltip": [where, _text("n"), {**_text("y"), "type": "quantitative", "format": axes.form}],
        },
    }


def _marker_layer(markers: Sequence[tuple[float, str]], height: int) -> Spec:
    return {
        "data": {"values": [{"x": at, "n": label} for at, label in markers]},
        "mark": _point(45, "triangle-up"),
        "encoding": {
            "x": {"field": "x", "type": "quantitative"},
            "y": {"value": height - 5},
            "color": {"value": "var(--muted)"},
            "tooltip": [{"field": "x", "type": "quantitative", "title": "step"}, _text("n")],
        },
    }


def _text(name: str) -> Spec:
    """A line of a tooltip that shows the value alone: its title is the field's name (`page.js`)."""
    return {"field": name, "type": "nominal", "title": name}
