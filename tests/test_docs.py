"""Every Python block in the README and the docs runs as printed, in one process and in four."""

import re
from pathlib import Path

import pytest

from tests.pool import ranks

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks() -> dict[str, str]:
    found = {}
    for page in PAGES:
        for number, code in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)):
            found[f"{page.stem}-{number}"] = code
    return found


@ranks(1, 4)
@pytest.mark.parametrize("block", blocks())
def test_a_block_runs_as_printed(block):
    exec(compile(blocks()[block], block, "exec"), {"__name__": "__main__"})


def test_there_are_blocks_to_run():
    assert {name.split("-")[0] for name in blocks()} >= {"README", "spmd"}
