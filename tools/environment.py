"""Finds, or builds, the Python interpreter that `make` runs everything with, and prints its path.

Run by the active interpreter (`python` on the path), with the standard library alone:

1. It has all that `pyproject.toml` asks for, torch included: it is used as it is.
2. It has a torch that is new enough, but lacks other packages: `.venv` is layered over it. Its torch is used, what is
   missing goes into `.venv`, and the active interpreter is not touched. So a GPU machine keeps its build of torch.
3. It has no such torch: `.venv` gets everything, at the versions of `constraints.txt`.

`.venv` is built once, and brought up to date when `pyproject.toml` or `constraints.txt` changes.

With the argument `xla` it is `.venv-xla`, which always gets everything, at the versions of `constraints-xla.txt`: the
XLA engine needs another torch.

With the argument `docs` it is `.venv-docs`, with what builds the site of the documents and nothing else.

With the argument `gpu` an interpreter counts as complete without what the GPU tests do not need (data sets, linters,
oracles, charts): machines with GPUs are often closed to the outside.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import sysconfig
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOR_XLA = sys.argv[1:] == ["xla"]
FOR_DOCS = sys.argv[1:] == ["docs"]
VENV = ROOT / (".venv-xla" if FOR_XLA else ".venv-docs" if FOR_DOCS else ".venv")
CONSTRAINTS = ROOT / ("constraints-xla.txt" if FOR_XLA else "constraints.txt")
EXTRA = "xla" if FOR_XLA else "docs" if FOR_DOCS else "dev"
TORCH_ENGINE = (2, 11)  # pyproject.toml asks for the torch of the XLA engine, which is older
NOT_ON_GPUS = {
    "datasets", "hypothesis", "expecttest", "ruff", "mypy", "bitsandbytes", "vl-convert-python", "accelerate", "trl",
    "tensorboard", "triton", "pytest-xdist",
}  # fmt: skip
STAMP = VENV / "fullshard-stamp"  # two lines: what was installed, and over which interpreter


def main() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 - this is where an older one is told so
        sys.exit(
            f"fullshard needs Python 3.11 or newer, but {sys.executable} is {sys.version.split()[0]}. "
            "Put a newer one first on the path, or name it: make PYTHON=..."
        )
    python = VENV / "bin" / "python"
    stamped = STAMP.read_text().splitlines() if STAMP.is_file() else ["", ""]
    if Path(sys.prefix).resolve() == VENV.resolve():  # activated by the user
        base = stamped[1]
    elif FOR_XLA or FOR_DOCS:
        base = ""
    else:
        spared = NOT_ON_GPUS if sys.argv[1:] == ["gpu"] else set()
        missing = [name for name, least in wanted().items() if name not in spared and not fits(name, least)]
        if not missing:
            print(sys.executable)
            return
        base = "" if "torch" in missing else sys.prefix
    if stamped[1] != base or not python.exists():
        say(f"creating {VENV.name}{f' over {base}' if base else ''}")
        if subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], stdout=sys.stderr).returncode:
            sys.exit(f"fullshard: {VENV.name} could not be created; on Debian and Ubuntu install python3-venv first")
        stamped = ["", base]
    if stamped[0] != digest():
        install(python, layered=bool(base))
        STAMP.write_text(f"{digest()}\n{base}\n")
    print(python)


def project_table() -> dict[str, Any]:
    """The table `project` of `pyproject.toml`."""
    import tomllib

    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def wanted() -> dict[str, tuple[int, ...]]:
    """The packages that `pyproject.toml` asks for, `dev` included, with the least version of each."""
    project = project_table()
    requirements = project["dependencies"] + project["optional-dependencies"]["dev"]
    least = {name: numbers(version) for name, version in (requirement.split(">=") for requirement in requirements)}
    return least | {"torch": TORCH_ENGINE}


def fits(name: str, least: tuple[int, ...] = ()) -> bool:
    """Whether this interpreter has the package, new enough."""
    try:
        return numbers(metadata.version(name)) >= least
    except metadata.PackageNotFoundError:
        return False


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def install(python: Path, layered: bool) -> None:
    constraints = CONSTRAINTS.read_text().splitlines()
    if layered:
        site = Path(sysconfig.get_path("purelib", vars={"base": str(VENV)}))
        paths = {sysconfig.get_path(kind) for kind in ("purelib", "platlib")} - {str(site)}
        if paths:
            (site / "fullshard-base.pth").write_text("\n".join(sorted(paths)) + "\n")
        constraints = [line for line in constraints if not fits(line.split("==")[0])]
    packages = project_table()["optional-dependencies"]["docs"] if FOR_DOCS else ["-e", f"{ROOT}[{EXTRA}]"]
    say(f"installing {'what builds the documents' if FOR_DOCS else 'fullshard and what it needs'} into {VENV.name}")
    with tempfile.TemporaryDirectory() as folder:
        pins = Path(folder) / "constraints.txt"
        pins.write_text("\n".join(constraints) + "\n")
        command = [str(python), "-m", "pip", "install", "--quiet", "-c", str(pins), *packages]
        if subprocess.run(command, stdout=sys.stderr).returncode:
            sys.exit("fullshard: the installation failed; see pip's message above")


def digest() -> str:
    files = [ROOT / "pyproject.toml", CONSTRAINTS]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def say(text: str) -> None:
    print(f"fullshard: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
