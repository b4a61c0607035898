"""Checks of paths that a user gave: whether a name is local, what a directory contains, whether it may be written to.

Every command that writes checks here first. Inputs are never written to or removed, however the path is spelled: links,
`..` and other mounts are resolved. A file is replaced by one rename: a link is replaced, not written through.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from fullshard.config.durable import sync
from fullshard.config.errors import ConfigError

Inputs = Mapping[str, Iterable[Path]]
"""The inputs of a command: the option that names them, and their directories and files."""

_CHECKPOINT = re.compile(r"step-\d+")


def looks_local(name: str) -> bool:
    """Whether a name can only be a path: names on the Hub have at most one slash."""
    return Path(name).expanduser().is_absolute() or name.startswith((".", "~")) or name.count("/") > 1


def list_contents(folder: Path) -> str:
    """The first few entries of a directory, for messages."""
    return ", ".join(sorted(p.name for p in folder.iterdir())[:6]) or "nothing"


# --- inputs and outputs ---------------------------------------------------------------------------------------------


def within(path: str | Path, folder: str | Path) -> bool:
    """Whether a path is a directory or is inside it, by its name, its link target, or another mount."""
    place = Path(folder).expanduser()
    return any(_same(above, place) for spelled in _spellings(path) for above in (spelled, *spelled.parents))


def _spellings(path: str | Path) -> Iterator[Path]:
    """A path as it was given, and each target of its links."""
    spelled = Path(os.path.abspath(Path(path).expanduser()))
    yield spelled
    seen: set[Path] = set()
    while (place := spelled.parent.resolve() / spelled.name) not in seen:
        yield place
        seen.add(place)
        if place.is_symlink():
            spelled = place.parent / os.readlink(place)
    yield Path(path).expanduser().resolve()


def _same(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:  # one of them does not exist yet
        return one == other.resolve()


def refuse_inputs(folder: Path, option: str, inputs: Inputs) -> None:
    """Refuse an output directory that is, or contains, an input."""
    for name, paths in inputs.items():
        for path in paths:
            if _same(path.expanduser(), folder):
                raise ConfigError(
                    f"{option}: {folder} is also {name} ({path}), and inputs are never written to or removed; choose "
                    f"another directory."
                )
            if within(path, folder):
                raise ConfigError(
                    f"{option}: {folder} contains {path}, which {name} names, and a directory with inputs is never "
                    f"written to or emptied; choose another directory."
                )


def check_new_folder(folder: str | Path) -> Path:
    """The resolved path of an output directory, which must be new or empty, and not inside a checkpoint: a run removes
    its checkpoints."""
    target = Path(folder).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists already and is not empty; choose another directory.")
    place = target.resolve()
    for above in (place, *place.parents):
        if _CHECKPOINT.fullmatch(above.name) and any(above.parent.glob("step-*/manifest.json")):
            raise ConfigError(
                f"{target} is inside the checkpoints in {above.parent}, which a run adds and removes; choose a "
                f"directory outside."
            )
    return place


# --- replacing files ------------------------------------------------------------------------------------------------


def replace_text(path: Path, text: str) -> None:
    """Replace a file atomically and durably; if the path is a link, its target is not changed."""
    with replaced_text(path) as file:
        file.write(text)


@contextmanager
def replaced_text(path: Path) -> Iterator[TextIO]:
    """A file to write to, which then replaces another as with `replace_text`."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            yield file
        sync(part)  # else a power failure could leave the new name with no content
        os.replace(part, path)
        sync(path.parent)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def replaced_files(folder: Path) -> Iterator[Path]:
    """A temporary directory whose files then replace those in `folder`, as with `replace_text`."""
    import tempfile

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".part-", dir=folder) as temporary:
        yield Path(temporary)
        give_usual_modes(Path(temporary))
        for file in sorted(p for p in Path(temporary).rglob("*") if p.is_file()):
            target = folder / file.relative_to(temporary)
            target.parent.mkdir(parents=True, exist_ok=True)
            sync(file)
            os.replace(file, target)
            sync(target.parent)


def give_usual_modes(folder: Path) -> None:
    """Give all files below a directory the mode that the umask gives new files: safetensors makes its own private."""
    probe = folder / f".{secrets.token_hex(4)}.mode"
    probe.touch()
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for file in folder.rglob("*"):
        if file.is_file() and not file.is_symlink():
            file.chmod(mode)


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer's files into a directory."""
    with replaced_files(folder) as part:
        tokenizer.save_pretrained(part)
