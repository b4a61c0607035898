"""Runs the quickstart and draws what it prints as `docs/quickstart.svg`.

    python tools/record_quickstart.py

Every line is the run's own. Of the training command's output only the lines named in `KEPT` are drawn; where others
were left out there is an ellipsis. The picture refers to nothing outside itself.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.terminal_theme import MONOKAI

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from quickstart import run  # noqa: E402 - found by the line above

PICTURE = ROOT / "docs" / "quickstart.svg"
WIDTH = 108
KEPT = ("training data", "evaluation data", "plan:", "      at rest", "      optimizer", "trainable", "step ")


def record() -> None:
    console = Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False, color_system="truecolor")

    def train() -> int:
        environment = {**run.environment(), "COLUMNS": str(WIDTH)}
        out = subprocess.PIPE
        left_out = False
        with subprocess.Popen(run.command(), cwd=ROOT, env=environment, stdout=out, stderr=None, text=True) as training:
            assert training.stdout is not None
            for line in map(str.rstrip, training.stdout):
                print(line, flush=True)
                if line.startswith(KEPT):
                    console.print(escape(line.replace(f"{ROOT}/", "")), no_wrap=True, overflow="ellipsis")
                elif not left_out:
                    console.print("[dim]…[/]")
                left_out = not line.startswith(KEPT)
        return training.returncode

    run.train = train
    console.print("[bold green]$[/] make quickstart")
    if run.main(console):
        sys.exit("the quickstart failed; there is no picture")
    svg = console.export_svg(title="make quickstart", theme=MONOKAI, unique_id="quickstart")
    svg = re.sub(r"@font-face\s*{.*?}\s*", "", svg, flags=re.DOTALL)  # fonts from the web
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    PICTURE.write_text(svg, encoding="utf-8")
    print(f"{PICTURE.relative_to(ROOT)}: {PICTURE.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    record()
