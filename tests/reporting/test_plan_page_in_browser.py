"""The page of `fullshard show`, as a reader meets it: in a browser, skipped without one."""

import pytest

from fullshard.capacity.gathered_timeline import gathered_timeline
from fullshard.reporting.plan_page import plan_page
from fullshard.reporting.plan_view import view_plan
from fullshard.reporting.step_memory import memory_of_plan
from tests.reporting.made_run import HOSTILE
from tests.reporting.plans import make_plan
from tests.reporting.test_report_in_browser import PHONE, WIDE, faults, opened, texts

pytest.importorskip("vl_convert", reason="needs vl-convert-python, which draws charts")


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
