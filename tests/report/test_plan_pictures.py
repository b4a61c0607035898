"""Pictures of plans: what is drawn adds up to the plan, names are text, terminals of any width show all of it."""

from __future__ import annotations

import html.parser
import io
import json
import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest
from rich.console import Console

from fullshard.fsdp.plan import ShardingPlan
from fullshard.planner.engine_memory import gathered_timeline
from fullshard.planner.memory import memory_of_plan
from fullshard.report.plan_charts import plan_charts
from fullshard.report.plan_page import plan_facts, plan_page
from fullshard.report.plan_svg import NOT_XML, plan_svg
from fullshard.report.plan_terminal import draw_plan
from fullshard.report.plan_view import PlanView, view_plan
from fullshard.report.step_memory import StepMemory
from tests.report.plans import NAME, make_plan
from tests.report.test_plan_view import held_by

SVG = "{http://www.w3.org/2000/svg}"
MEMORY = StepMemory(
    {"forward": {"shards": 3 << 30, "gathered": 1 << 30}, "backward": {"shards": 3 << 30, "gradients": 5 << 30}},
    (("forward model.layers.0", 4 << 30), ("loss", 5 << 30), ("backward model.layers.0", 8 << 30)),
    reserved=1 << 29, limit=24 << 30, host={"shards": 7 << 30}, host_limit=64 << 30, notes=("every row is full",),
)  # fmt: skip


def parts(plan: ShardingPlan, **choice: Any) -> tuple[PlanView, Any, StepMemory]:
    gathered = gathered_timeline(plan)
    return view_plan(plan, 4, **choice), gathered, memory_of_plan(plan, gathered)


@pytest.mark.parametrize(
    ("kind", "mesh", "strategy"),
    [
        ("qlora", {"fsdp": 3}, "FULL_SHARD"),
        ("full", {"replica": 2, "fsdp": 20}, "HYBRID_SHARD"),
        ("full", {"fsdp": 4}, "NO_SHARD"),
    ],
)
def test_drawn_bytes_are_the_plan_s(kind: str, mesh: dict[str, int], strategy: str) -> None:
    plan = make_plan(kind, mesh, strategy)
    view, gathered, memory = parts(plan)
    world = view.grid.world
    everything = sum(held_by(plan, rank) for rank in range(world))

    root = ET.fromstring(plan_svg(view, "a title", plan_charts(gathered, memory)))
    drawn = padding = shards = 0
    for row in root.iter(f"{SVG}g"):
        if "data-parameter" not in row.attrib:
            continue
        times = int(row.get("data-units", 0)) * int(row.get("data-count", 0))
        cells = [cell for cell in row.iter(f"{SVG}rect") if "data-bytes" in cell.attrib]
        assert len(cells) == len(view.columns)
        drawn += times * sum(int(cell.get("data-bytes", 0)) for cell in cells)
        padding += times * sum(int(cell.get("data-padding", 0)) for cell in cells)
        shards += times * int(row.get("data-shard-bytes", 0))
    assert drawn == everything and shards == plan.shard_bytes and drawn + padding == world * plan.shard_bytes
    ranks = [int(cell.get("data-count", 0)) for cell in root.iter(f"{SVG}rect") if cell.get("class") == "rank"]
    assert sum(ranks) == world

    facts = json.loads(json.dumps(plan_facts("a title", view, gathered, memory)))
    assert sum(column["bytes"] for column in facts["columns"]) == everything
    units = facts["units"]
    assert sum(unit["count"] * unit["shard_bytes"] for unit in units) == facts["shard_bytes"] == plan.shard_bytes
    assert [name for unit in units for name in unit["names"]] == [unit.name for unit in plan.units]
    names = {name for unit in units for row in unit["parameters"] for part in row["parts"] for name in part["names"]}
    assert names == {name for unit in view.units for p in unit.plan.parameters for name in p.names}
    assert max(moment["bytes"] for moment in facts["gathered"]) == plan.gathered_bound()


def test_every_row_says_all_of_it() -> None:
    view, _, _ = parts(make_plan("tied", {"fsdp": 3}))
    root = ET.fromstring(plan_svg(view, "a title"))
    rows = {row.get("data-parameter"): row for row in root.iter(f"{SVG}g") if row.get("tabindex") == "0"}
    embedding = rows["model.embed_tokens.weight"]
    said = embedding.findtext(f"{SVG}title")
    assert said is not None
    for fact in (
        "67 × 32",
        "float32 → bfloat16",
        "('fsdp', None)",
        "2,944 B",
        "tied: lm_head.weight",
        "padded by 2",
        "trains",
    ):
        assert fact in said, fact
    texts = [text.text for text in embedding.iter(f"{SVG}text")]
    assert {"0:23", "23:46", "46:67"} <= {*texts}
    assert "trains" in str(embedding.get("class")) and "trains" in str(texts[1])


class Elements(html.parser.HTMLParser):
    """The tags of a page, and its text outside scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]

    def handle_data(self, data: str) -> None:
        if self.tags[-1:] not in (["script"], ["style"]):
            self.text += data


def test_names_are_text() -> None:
    plan = make_plan("odd", {"fsdp": 2})
    view, gathered, memory = parts(plan)
    shown = NOT_XML.sub("\ufffd", NAME)
    root = ET.fromstring(plan_svg(view, NAME, plan_charts(gathered, memory)))
    assert {one.tag for one in root.iter()} <= {
        SVG + tag for tag in ("svg", "g", "rect", "text", "title", "style", "defs", "pattern", "path", "line")
    }
    labels = {row.get("data-parameter") for row in root.iter(f"{SVG}g")}
    assert shown in labels and any(f"layers.{shown}" in str(row.get("data-unit")) for row in root.iter(f"{SVG}g"))

    page = plan_page(NAME, view, gathered, memory)
    read = Elements(page)
    assert "img" not in read.tags and not [name for name in read.attributes if name.startswith("on")]
    assert shown in read.text
    for width in (60, 120, 200):
        assert "\x1b" not in printed(plan, width) and "onerror=alert(1)" in re.sub(r"\s", "", printed(plan, width))


def printed(plan: ShardingPlan, width: int, memory: StepMemory | None = None, **choice: Any) -> str:
    view, gathered, own = parts(plan, **choice)
    console = Console(width=width, file=io.StringIO(), record=True, color_system=None)
    console.print(draw_plan("a title", view, gathered, memory or own, width))
    return console.export_text()


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_a_terminal_of_any_width(width: int) -> None:
    plan = make_plan("qlora", {"replica": 2, "fsdp": 4}, "HYBRID_SHARD")
    text = printed(plan, width, MEMORY)
    assert max(map(len, text.splitlines())) <= width
    view, flat = view_plan(plan), re.sub(r"\s+", "", text)
    for name in (*(unit.label for unit in view.units), *(row.label for unit in view.units for row in unit.parameters)):
        letters = iter(text)  # a name that is wrapped has other columns between its parts
        assert name in text or (width < 80 and all(letter in letters for letter in name)), name
    for words in (
        "replica1", "ranks4|5|6|7" if width > 40 else "ranks4–7", "node1", "frozen", "trains", "4-bit",
        "everyrowisfull", "8.50GiBof24.00GiB,inbackward", "7.00GiBof64.00GiB(shards7.00GiB)",
    ):  # fmt: skip
        assert words in flat, words
    assert ("dim 0:" in text) == (width == 200) and (" shape " in text) == (width >= 120)


def test_chosen_ranks_have_columns_of_their_own() -> None:
    text = printed(make_plan("full", {"fsdp": 3}), 160, ranks="0,2", units="(root)")
    (line,) = [line for line in text.splitlines() if "embed_tokens" in line]
    assert "rank 0" in text and "rank 2" in text and "rank 1" not in text and line.split()[-2:] == ["0:23", "46:67"]


def test_charts_hold_the_numbers() -> None:
    plan = make_plan()
    gathered = gathered_timeline(plan)
    charts = {chart.id: chart for chart in plan_charts(gathered, MEMORY)}
    assert [round(y * 1024) for y in charts["gathered"].columns["y"]] == [moment.bytes for moment in gathered]
    assert charts["gathered"].columns["l"][:2] == ["forward of the root", "forward of model.layers.0"]
    assert charts["allocated"].columns["y"] == [4.0, 5.0, 8.0]
    bars = charts["memory"]
    stacked: dict[str, float] = {}
    for bar, size in zip(bars.columns["b"], bars.columns["y"], strict=True):
        stacked[bar] = stacked.get(bar, 0) + size
    assert stacked == {"forward": 4.5, "backward": 8.5}
    assert bars.names == ("shards", "gathered", "gradients", "reserved")
    for chart in (charts["allocated"], bars):
        assert {"limit": 24.0} in [
            value for layer in chart.spec["layer"] for value in layer.get("data", {}).get("values", [])
        ]
        assert "24.00 GiB" in chart.description


def test_the_picture_has_its_charts() -> None:
    view, gathered, _ = parts(make_plan())
    root = ET.fromstring(plan_svg(view, "a title", plan_charts(gathered, MEMORY)))
    assert len([one for one in root.iter(f"{SVG}svg") if one is not root]) == 3
