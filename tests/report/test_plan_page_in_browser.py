"""The page of `fullshard show`, as a reader meets it: in a browser, skipped without one."""

from __future__ import annotations

import pytest

from fullshard.planner.engine_memory import gathered_timeline
from fullshard.planner.memory import memory_of_plan
from fullshard.report.plan_charts import plan_charts
from fullshard.report.plan_page import plan_page
from fullshard.report.plan_svg import plan_svg
from fullshard.report.plan_view import view_plan
from fullshard.report.step_memory import StepMemory
from tests import page_checks
from tests.report.plans import make_plan
from tests.report.synthetic_runs import HOSTILE
from tests.report.test_report_in_browser import PHONE, WIDE, faults, opened, texts


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    """The page of a plan, under a hostile title."""
    plan = make_plan("qlora", {"replica": 2, "fsdp": 4}, "HYBRID_SHARD")
    gathered = gathered_timeline(plan)
    file = tmp_path_factory.mktemp("plan") / "plan.html"
    file.write_text(plan_page(HOSTILE[1], view_plan(plan, 4), gathered, memory_of_plan(plan, gathered)))
    return file


@pytest.mark.parametrize(
    ("size", "dark"), [(WIDE, False), pytest.param(WIDE, True, marks=pytest.mark.slow), (PHONE, True)]
)
def test_the_page_is_sound(browser, page_file, size, dark):
    with browser.page(*size, dark) as page:
        opened(page, page_file)
        assert not faults(page)
        assert texts(page, "h1") == [HOSTILE[1]] and page.run("document.querySelectorAll('[data-chart]').length") >= 2


@pytest.mark.slow
def test_pointer_and_keys_tell_the_same_of_a_row(browser, page_file):
    with browser.page(*WIDE) as page:
        opened(page, page_file)
        page.run("document.querySelector('.plan g[tabindex=\"0\"]').focus()")
        page.press("ArrowDown")
        by_key = page.run("tip.hidden ? null : tip.textContent")
        assert "shape" in by_key
        x, y = page.run("""(() => { const row = document.activeElement; row.blur();
            const box = row.getBoundingClientRect(); return [box.x + 20, box.y + box.height / 2]; })()""")
        assert page.run("tip.hidden")
        page.point(x, y)
        assert page.wait("!tip.hidden && tip.textContent") == by_key


# --- tiny models on large devices -------------------------------------------------------------------------------------


def tiny_memory(reserved: int) -> StepMemory:
    """A step of some MiB on a device of 24 GiB."""
    timeline = (
        ("forward model.layers.0", 20_832_224), ("forward model.layers.1", 38_761_824), ("loss", 68_637_804),
        ("backward of the loss", 43_065_192), ("backward model.layers.1", 42_061_928),
        ("backward model.layers.0", 24_002_552), ("end of backward", 1_814_776), ("optimizer step", 361_768),
    )  # fmt: skip
    small = dict.fromkeys(("shards", "gathered", "gradients", "optimizer", "communication", "buffers"), 30_000)
    large = {"activations": 37_000_000, "logits": 31_000_000}
    moments = {name: {**small, **(large if name == "loss" else {})} for name in (
        "load", "forward", "loss", "backward", "optimizer step", "save")}  # fmt: skip
    return StepMemory(moments, timeline, reserved, limit=24 * 2**30)


@pytest.mark.parametrize(
    ("size", "dark", "reserved"),
    [
        pytest.param(size, dark, reserved, marks=[] if fast else pytest.mark.slow)
        for size, dark, reserved, fast in (
            (WIDE, False, 0, True), (WIDE, False, 3 * 2**30, False), ((380, 800), True, 0, False),
            ((380, 800), True, 3 * 2**30, True), (WIDE, True, 0, False), (WIDE, True, 3 * 2**30, False),
        )
    ],
)  # fmt: skip
def test_the_page_of_a_tiny_model_can_be_read(browser, tmp_path, reserved, size, dark):
    """Its bytes are nothing beside the memory of the device, and its phases are a few moments each."""
    plan = make_plan("full", {"fsdp": 2})
    view, gathered, memory = view_plan(plan), gathered_timeline(plan), tiny_memory(reserved)
    (tmp_path / "plan.html").write_text(plan_page("tiny", view, gathered, memory))
    with browser.page(*size, dark) as page:
        opened(page, tmp_path / "plan.html")
        assert not faults(page)
        seen = "[...document.querySelectorAll('#memory .legend li')].map(one => one.textContent)"
        assert page.run(seen) == (["reserved"] if reserved else ["activations", "logits"])
        notes = texts(page, "#memory .note")
        assert any("Too small to be seen: shards, gathered, gradients" in note for note in notes)
        assert ("far above what is drawn" in notes[0]) == (not reserved)
        highest = page.run("Math.max(...fullshard.views.allocated.view.data('values').map(one => one.y))")
        top = page.run("fullshard.views.allocated.view.scale('y').domain()[1]")
        assert highest > top / 2, "the line lies on the axis"
        header = texts(page, "#memory th[scope=col]")
        assert {"shards", "communication", "total"} <= set(header), "the table has all parts"
        labels = texts(page, "#allocated .role-axis-label text")
        assert {"forward", "backward"} <= set(labels) and "end" not in labels


@pytest.mark.parametrize("reserved", [0, 3 * 2**30])
def test_the_picture_of_a_tiny_model_can_be_read(browser, tmp_path, reserved):
    plan = make_plan("full", {"fsdp": 2})
    charts = plan_charts(gathered_timeline(plan), tiny_memory(reserved))
    picture = plan_svg(view_plan(plan), "tiny", charts)
    (tmp_path / "plan.html").write_text(f"<!doctype html><meta charset=utf-8><body>{picture}")
    with browser.page(*WIDE) as page:
        page.open(tmp_path / "plan.html")
        assert not page_checks.colliding_texts(page) and not page_checks.powers_on_axes(page)
        assert page.run("document.querySelectorAll('svg.plan svg').length") == 3
