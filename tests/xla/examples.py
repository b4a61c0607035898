"""Runs the scripts of examples/xla one after another in one process, on the engine of this process.

`python -m tests.xla.examples`, or under torchrun, prints what each of them prints, after a line with its name.
"""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent.parent / "examples" / "xla"
SCRIPTS = sorted(file.name for file in FOLDER.glob("*_*.py") if file.name.startswith(("fsdp_", "spmd_")))


def run(name: str) -> str:
    """What a script prints."""
    said = io.StringIO()
    sys.path.insert(0, str(FOLDER))  # as if it were started by its name
    try:
        with contextlib.redirect_stdout(said):
            runpy.run_path(str(FOLDER / name), run_name="__main__")
    finally:
        sys.path.remove(str(FOLDER))
    return said.getvalue()


def values(said: str) -> dict[str, list[float]]:
    """The numbers of each line that `results.show` printed, by the name and shape before them."""
    found = {}
    for line in said.splitlines():
        label, _, numbers = line.partition(") ")
        with contextlib.suppress(ValueError):
            found[f"{label})"] = [float(number) for number in numbers.split()]
    return {label: numbers for label, numbers in found.items() if numbers}


if __name__ == "__main__":
    for script in SCRIPTS:
        text = run(script)
        if text:  # process 0
            print(f"=== {script}\n{text}", end="", flush=True)
