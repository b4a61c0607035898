"""The map of docs/architecture.md is true, a room imports only from rooms above it, and no imports form a cycle.

Imports count wherever they stand: at the top of a file, inside a function, or for types only.
"""

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAP = ROOT / "docs/architecture.md"
PACKAGE = "fullshard"

Graph = dict[str, dict[str, int]]  # importing module → imported module → line


def modules(package: Path) -> dict[str, Path]:
    """Every module of a package by its dotted name; a folder stands for its `__init__.py`."""
    found = {}
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports(module: str, file: Path, known: dict[str, Path]) -> Iterator[tuple[str, int]]:
    """The modules of the package that one file imports, with the line of each import."""
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            above = parts[: len(parts) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:
                name = f"{base}.{alias.name}"
                if (target := name if name in known else base) in known:
                    yield target, node.lineno


def import_graph(package: Path) -> Graph:
    known = modules(package)
    graph: Graph = defaultdict(dict)
    for module, file in known.items():
        for target, line in imports(module, file, known):
            if target != module:
                graph[module].setdefault(target, line)
    return graph


@functools.cache
def package_graph() -> Graph:
    """The imports of this package."""
    return import_graph(ROOT / PACKAGE)


def cycles(graph: Graph) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others."""
    reach: dict[str, set[str]] = {}
    for start in graph:
        seen, stack = set(), [start]
        while stack:
            for target in graph.get(stack.pop(), {}):
                if target not in seen:
                    seen.add(target)
                    stack.append(target)
        reach[start] = seen
    groups = {frozenset({a, *(b for b in reach[a] if a in reach.get(b, ()))}) for a in graph if a in reach[a]}
    return sorted(sorted(group) for group in groups)


def rooms() -> list[tuple[str, list[str]]]:
    """The map's rows: the room (empty for files of the root), and its files."""
    text = MAP.read_text()
    table = text[text.index("| room |") :].split("\n\n")[0]
    rows = []
    for line in table.splitlines()[2:]:
        room, _, files = (cell.strip() for cell in line.strip("|").split("|"))
        folder = re.search(r"`([\w/]+)/`", room)
        rows.append((folder[1].replace("/", ".") if folder else "", re.findall(r"`(\w+)`", files)))
    return rows


def order(rows: list[tuple[str, list[str]]]) -> dict[str, int]:
    """Module → number of its row in the map."""
    places = {}
    for number, (room, files) in enumerate(rows):
        prefix = f"{PACKAGE}.{room}" if room else PACKAGE
        if room:
            places[prefix] = number
        for file in files:
            places[prefix if file == "__init__" else f"{prefix}.{file}"] = number
    return places


def wrong_directions(graph: Graph, places: dict[str, int]) -> list[str]:
    return [
        f"{module}:{line} imports {target}, which is in a room below it"
        for module, targets in graph.items()
        for target, line in targets.items()
        if places[target] > places[module]
    ]


def test_the_map_lists_every_file_and_no_other():
    listed, there = set(order(rooms())), set(modules(ROOT / PACKAGE))
    folders = {name for name in there if (ROOT / name.replace(".", "/")).is_dir()}
    assert listed - there == set(), f"{MAP.name} names files that do not exist"
    assert there - listed - folders == set(), f"{MAP.name} does not name these files"


def test_rooms_import_only_from_rooms_above_them():
    assert wrong_directions(package_graph(), order(rooms())) == []


def test_no_imports_form_a_cycle():
    assert cycles(package_graph()) == []


@pytest.fixture
def small_package(tmp_path):
    """A package of two rooms; returns a function that writes one of its files."""

    def write(name: str, text: str) -> Path:
        file = tmp_path / "pkg" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return tmp_path / "pkg"

    for name in ("__init__.py", "up/__init__.py", "up/a.py", "up/b.py", "down/__init__.py", "down/c.py"):
        write(name, "")
    return write


PLACES = {"pkg": 2, "pkg.up": 0, "pkg.up.a": 0, "pkg.up.b": 0, "pkg.down": 1, "pkg.down.c": 1}


@pytest.mark.parametrize(
    "text",
    [
        "from pkg.down import c",
        "from pkg.down.c import x",
        "import pkg.down.c",
        "from ..down import c",
        "def f():\n    from pkg.down.c import x",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pkg.down.c import X",
    ],
)
def test_a_wrong_direction_is_found(small_package, text):
    assert wrong_directions(import_graph(small_package("up/a.py", text)), PLACES)


def test_a_cycle_is_found_through_lazy_imports(small_package):
    small_package("up/a.py", "from pkg.up import b")
    assert cycles(import_graph(small_package("down/c.py", "from pkg.up.a import x"))) == []
    package = small_package("up/b.py", "def f():\n    from pkg.up.a import x")
    assert cycles(import_graph(package)) == [["pkg.up.a", "pkg.up.b"]]
