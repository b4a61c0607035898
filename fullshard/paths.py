"""What can be said of a path that a user named: whether it means a place here, what a folder holds, and whether a
folder may be written to.

Every command that writes asks here first. What is read is never written to or removed, under whatever spelling: links,
`..` and other mounts are followed. A file is replaced by one rename: a link is replaced, not written through.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fullshard.errors import ConfigError

Inputs = Mapping[str, Iterable[Path]]
"""What a command reads: the option that names it, and its folders and files."""

_CHECKPOINT = re.compile(r"step-\d+")


def looks_local(name: str) -> bool:
    """Whether a name can only be a path: on the hub names have at most one slash."""
    return Path(name).expanduser().is_absolute() or name.startswith((".", "~")) or name.count("/") > 1


def held(folder: Path) -> str:
    """The first few things in a folder, for messages."""
    return ", ".join(sorted(p.name for p in folder.iterdir())[:6]) or "nothing"


# --- what is read and what is written -------------------------------------------------------------------------------


def within(path: str | Path, folder: str | Path) -> bool:
    """Whether a path is a folder or lies in it: by its name, by its target if it is a link, or by both of a mount."""
    place = Path(folder).expanduser()
    return any(_same(above, place) for spelled in _spellings(path) for above in (spelled, *spelled.parents))


def _spellings(path: str | Path) -> Iterator[Path]:
    """A path as it was given, and each place that its links lead through."""
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
    """Refuse a folder to write to that is, or holds, something that is read."""
    for name, paths in inputs.items():
        for path in paths:
            if _same(path.expanduser(), folder):
                raise ConfigError(
                    f"{option}: {folder} is also {name} ({path}), and what is read is never written to or removed; "
                    f"choose another folder."
                )
            if within(path, folder):
                raise ConfigError(
                    f"{option}: {folder} holds {path}, which {name} names, and a folder with something that is read is "
                    f"never written to or emptied; choose another folder."
                )


def check_new_folder(folder: str | Path) -> Path:
    """The real path of a folder for a result, which must be new or empty, and not in a checkpoint: those are removed
    whole by the run that they belong to."""
    given = Path(folder).expanduser()
    if given.exists() and (not given.is_dir() or any(given.iterdir())):
        raise ConfigError(f"{given} exists already and is not empty; choose another folder.")
    place = given.resolve()
    for above in (place, *place.parents):
        if _CHECKPOINT.fullmatch(above.name) and any(above.parent.glob("step-*/manifest.json")):
            raise ConfigError(
                f"{given} lies among the checkpoints in {above.parent}, which their run adds to and removes; choose a "
                f"folder outside."
            )
    return place


# --- replacing files ------------------------------------------------------------------------------------------------


def replace_text(path: Path, text: str) -> None:
    """Write a file whole, in the place of what has its name; what a link there points to stays as it is."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def replaced_files(folder: Path) -> Iterator[Path]:
    """A folder to write files into that then take their places in `folder`, as with `replace_text`."""
    import tempfile

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".part-", dir=folder) as made:
        yield Path(made)
        for file in sorted(p for p in Path(made).rglob("*") if p.is_file()):
            target = folder / file.relative_to(made)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(file, target)


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer's files into a folder."""
    with replaced_files(folder) as part:
        tokenizer.save_pretrained(part)
