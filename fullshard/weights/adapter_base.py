"""The base model of an adapter: how it is recorded, located, and compared with a given model.

PEFT's `adapter_config.json` names the base. fullshard writes `adapter_base.json` beside it, with what identifies the
files that the adapter was trained on. For adapters without that file, the base they name is compared if it is
available; otherwise only names are. Shapes are checked when the adapter's values are loaded (`adapter_files.py`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fullshard.config.errors import WeightsError
from fullshard.config.paths import looks_local, replace_text
from fullshard.lora.adapter_config import CONFIG, read_config

RECORD = "adapter_base.json"
_IN_CACHE = re.compile(r"models--(.+?)--(.+)")
_PACKED = re.compile(r"[-_.](unsloth[-_])?(bnb[-_])?(4bit|nf4|fp4)$")
"""Suffixes in the names of 4-bit copies of a model."""


# --- names ----------------------------------------------------------------------------------------------------------


def lasting_name(base: str | Path) -> str:
    """A name for a base model that works from any directory: its Hub name, or the absolute path of its folder."""
    path = Path(base).expanduser()
    if not path.exists():
        return str(base)
    whole = os.path.abspath(path)
    return _name_on_the_hub(whole) or whole


def _name_on_the_hub(path: str) -> str | None:
    for part, below in zip(Path(path).parts, Path(path).parts[1:], strict=False):
        if below == "snapshots" and (match := _IN_CACHE.fullmatch(part)):
            return f"{match[1]}/{match[2]}"
    return None


def find_base(adapter: str | Path, stored: str) -> str:
    """Locate the base model that an adapter's files name.

    A relative path is relative to the directory in which the adapter was trained. If it does not exist from here, it is
    searched from the folders above the adapter.
    """
    path = Path(stored).expanduser()
    if path.exists() or path.is_absolute():
        return stored
    above = (folder / path for folder in Path(adapter).expanduser().resolve().parents)
    return next((str(model_dir) for model_dir in above if (model_dir / "config.json").is_file()), stored)


def _last_name(base: str) -> str:
    """The last part of a model's name or path, without suffixes for 4-bit copies."""
    name = (_name_on_the_hub(base) or base).rstrip("/").rsplit("/", 1)[-1].lower()
    return _PACKED.sub("", name)


# --- records --------------------------------------------------------------------------------------------------------


def stored_in_4_bits(folder: str | Path) -> bool:
    """Whether a model's files store quantized weights."""
    try:
        config = json.loads((Path(folder).expanduser() / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return bool(config.get("quantization_config"))


def write_record(adapter: Path, base: str | Path, files: tuple[str, Mapping[str, Any]] | None = None) -> None:
    """Record the base model in an adapter's folder, under a name that works from any directory.

    `files` is the folder of the base's files and what identifies them; None if it is not known.
    """
    config = read_config(adapter)
    config["base_model_name_or_path"] = name = lasting_name(base)
    replace_text(adapter / CONFIG, json.dumps(config, indent=2, sort_keys=True) + "\n")
    if files is not None:
        record = {"base": name, **files[1], "stored_in_4_bits": stored_in_4_bits(files[0])}
        replace_text(adapter / RECORD, json.dumps(record, indent=2) + "\n")


def read_record(adapter: str | Path) -> dict[str, Any]:
    """The contents of `adapter_base.json`; empty for adapters without it."""
    try:
        record = json.loads((Path(adapter).expanduser() / RECORD).read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(record, dict) or not isinstance(record.get("fingerprint"), str):
        return {}
    return {**record, **{name: {} for name in ("checksums", "config") if not isinstance(record.get(name), dict)}}


# --- comparing ------------------------------------------------------------------------------------------------------


def check_base(
    adapter: str | Path, base: str | Path, base_name: str | Path | None = None, identity: dict[str, Any] | None = None
) -> None:
    """Raise `WeightsError` if an adapter was not trained on `base`, a folder. `base_name` is the name used in messages.

    Before the files are read, only their fingerprint is compared; afterwards all of their bytes, if `identity` is what
    reading them gave.
    """
    stored = read_config(adapter).get("base_model_name_or_path")
    record, called = read_record(adapter), str(base_name if base_name is not None else base)
    if not record and not stored:
        return  # nothing to compare with
    trained_on = str(stored or record["base"])
    here = Path(base).expanduser()
    known = find_base(adapter, trained_on)
    packed = record.get("stored_in_4_bits", False) if record else stored_in_4_bits(known)
    if not here.exists() or not (record or (Path(known).expanduser() / "config.json").is_file()):
        if identity is None:
            _compare_names(adapter, trained_on, called)
        return
    if packed != stored_in_4_bits(here):
        return  # one is a 4-bit copy of the other: only shapes can be compared
    from fullshard.weights.source_files import difference, identity_of, quick_identity

    expected = record or (identity_of(known) if identity else quick_identity(known))
    if wrong := difference(expected, identity or quick_identity(here)):
        override = f"remove {RECORD} from its folder" if record else f"set the new base in its {CONFIG}"
        raise WeightsError(
            f"the adapter {adapter} was trained on {trained_on}, but {called} is a different model or has changed "
            f"since ({wrong}). Use the model that the adapter was trained on; to use this one anyway, {override}"
        )


def _compare_names(adapter: str | Path, trained_on: str, called: str) -> None:
    """Compare names only. A different Hub name is an error; a local folder may have been moved, so it is a warning."""
    if _last_name(trained_on) == _last_name(called):
        return
    if not looks_local(_name_on_the_hub(trained_on) or trained_on):
        raise WeightsError(
            f"the adapter {adapter} was trained on {trained_on}, and {called} appears to be a different model. Use the "
            f"model that the adapter was trained on; if this is the same model under another name, set that name in "
            f"{CONFIG} (base_model_name_or_path)"
        )
    from fullshard.distributed import runtime

    runtime.warn_once(
        f"base {adapter} {called}",
        f"the adapter {adapter} was trained on {trained_on}, which was not found. {called} cannot be compared with it; "
        f"only shapes are checked",
    )
