"""docs/options.md is what the typed configurations say today."""

import runpy

from tests.pool import ROOT


def test_the_page_of_options_is_current():
    tool = runpy.run_path(str(ROOT / "tools" / "options.py"))
    text = tool["page"]()
    assert tool["PAGE"].read_text(encoding="utf-8") == text, "write it anew: python tools/options.py"
    for _, _, options in tool["PAGES"]:
        for one in options:
            assert f"`{one.key}`" in text
            assert one.help, f"{one.name} has no text"
