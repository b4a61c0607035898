"""Runs the tests in parts: `make test-all` (every part, or PART=...) and `make check` (the tests of tests/check.txt).

A part is a folder of `tests` or `rest`, the files beside the folders. Each part is a pytest run of its own; one that
fails does not keep the others from running. At the end every part has a line.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
CHECK = TESTS / "check.txt"
NOTHING_COLLECTED = 5


def parts() -> dict[str, list[str]]:
    """The names of the parts and what pytest is given for each."""
    folders = sorted({file.parent for file in TESTS.rglob("test_*.py")} - {TESTS})
    found = {folder.name: [str(folder.relative_to(ROOT))] for folder in folders}
    return found | {"rest": [str(file.relative_to(ROOT)) for file in sorted(TESTS.glob("test_*.py"))]}


def check_list() -> list[str]:
    """The tests of `make check`, as pytest names them."""
    lines = [line.strip() for line in CHECK.read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def run(name: str, targets: list[str], options: list[str]) -> tuple[bool, str]:
    """Run one part; whether it passed, and its line."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.xml"
        start = time.monotonic()
        command = [sys.executable, "-m", "pytest", *targets, f"--junitxml={file}", *options]
        code = subprocess.run(command, cwd=ROOT).returncode
        seconds = time.monotonic() - start
        counts = _counts(file)
    passed = code in (0, NOTHING_COLLECTED)
    how = "passed" if passed else f"FAILED (exit code {code})"
    return passed, f"{name:<10} {how:<22} {counts}, {seconds:.0f} s"


def _counts(file: Path) -> str:
    if not file.is_file():
        return "no results"
    suite = next(ET.parse(file).iter("testsuite"))
    number = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    passed = number["tests"] - number["failures"] - number["errors"] - number["skipped"]
    bad = number["failures"] + number["errors"]
    return f"{passed} passed, {bad} failed, {number['skipped']} skipped"


def main(words: list[str]) -> int:
    what, options = words[0], words[1:]
    if what == "check":
        wanted = {"check": check_list()}
    else:
        known = parts()
        names = what.replace(",", " ").split() or list(known)
        if unknown := [name for name in names if name not in known]:
            print(f"make test-all PART={what}: there is no part {', '.join(unknown)}; there are {', '.join(known)}")
            return 2
        wanted = {name: known[name] for name in names}
    results = [run(name, targets, options) for name, targets in wanted.items()]
    print("\n" + "\n".join(line for _, line in results))
    failed = [name for name, (passed, _) in zip(wanted, results, strict=True) if not passed]
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
