"""The model that an adapter belongs to: how it is written down, found again, and told from other models.

`adapter_config.json` is PEFT's and names the base. Beside it lies `adapter_base.json`, with the fingerprint of the
files that the adapter was trained on. Adapters that others wrote have none: then the base that they name is looked at,
if it is here, else names are compared. Shapes are compared when an adapter's values are read (`adapter_files.py`).
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from fullshard.errors import WeightsError
from fullshard.lora.adapter_config import CONFIG, read_config
from fullshard.paths import looks_local, replace_text

RECORD = "adapter_base.json"
_IN_CACHE = re.compile(r"models--(.+?)--(.+)")
_PACKED = re.compile(r"[-_.](unsloth[-_])?(bnb[-_])?(4bit|nf4|fp4)$")
"""What names of 4-bit copies end in."""


# --- names ----------------------------------------------------------------------------------------------------------


def lasting_name(base: str | Path) -> str:
    """A base by a name that works from any folder: a model of the hub by its name there, a folder by its whole path."""
    path = Path(base).expanduser()
    if not path.exists():
        return str(base)
    whole = os.path.abspath(path)
    return _name_on_the_hub(whole) or whole


def _name_on_the_hub(path: str) -> str | None:
    for part, below in zip(Path(path).parts, Path(path).parts[1:], strict=False):
        if below == "snapshots" and (found := _IN_CACHE.fullmatch(part)):
            return f"{found[1]}/{found[2]}"
    return None


def find_base(adapter: str | Path, stored: str) -> str:
    """A base as an adapter's files name it. A relative path that leads nowhere from here is looked for from the folders
    above the adapter: it was relative to the one where the adapter was trained."""
    path = Path(stored).expanduser()
    if path.exists() or path.is_absolute():
        return stored
    above = (folder / path for folder in Path(adapter).expanduser().resolve().parents)
    return next((str(place) for place in above if (place / "config.json").is_file()), stored)


def _last_name(base: str) -> str:
    """What a model is called wherever it lies."""
    name = (_name_on_the_hub(base) or base).rstrip("/").rsplit("/", 1)[-1].lower()
    return _PACKED.sub("", name)


# --- records --------------------------------------------------------------------------------------------------------


def stored_in_4_bits(folder: str | Path) -> bool:
    """Whether a model's files hold 4-bit weights."""
    try:
        config = json.loads((Path(folder).expanduser() / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return bool(config.get("quantization_config"))


def write_record(adapter: Path, base: str | Path, files: tuple[str, str] | None = None) -> None:
    """Write down beside an adapter's files what it was trained on, and name the base there so that it lasts. `files`
    are the base's: where they lie, and their fingerprint; None if that is not known."""
    config = read_config(adapter)
    config["base_model_name_or_path"] = name = lasting_name(base)
    replace_text(adapter / CONFIG, json.dumps(config, indent=2, sort_keys=True) + "\n")
    if files is not None:
        record = {"base": name, "fingerprint": files[1], "stored_in_4_bits": stored_in_4_bits(files[0])}
        replace_text(adapter / RECORD, json.dumps(record, indent=2) + "\n")


def read_record(adapter: str | Path) -> dict[str, Any]:
    """What is known of the base; empty for adapters that others wrote."""
    try:
        found = json.loads((Path(adapter).expanduser() / RECORD).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and isinstance(found.get("fingerprint"), str) else {}


# --- comparing ------------------------------------------------------------------------------------------------------


def check_base(adapter: str | Path, base: str | Path, given: str | Path | None = None) -> None:
    """Refuse a base that an adapter was not trained on. `base` is its folder here, `given` what the user calls it."""
    stored = read_config(adapter).get("base_model_name_or_path")
    record, called = read_record(adapter), str(given if given is not None else base)
    if not record and not stored:
        return  # nobody knows
    trained_on = str(stored or record["base"])
    here = Path(base).expanduser()
    known = find_base(adapter, trained_on)
    packed = record.get("stored_in_4_bits", False) if record else stored_in_4_bits(known)
    if not here.exists() or not (record or (Path(known).expanduser() / "config.json").is_file()):
        _compare_names(adapter, trained_on, called)
        return
    if packed != stored_in_4_bits(here):
        return  # a 4-bit copy and its original: only shapes can be compared
    from fullshard.weights.source_files import fingerprint_of

    expected, found = record["fingerprint"] if record else fingerprint_of(known), fingerprint_of(here)
    if expected != found:
        way_out = f"remove {RECORD} from its folder" if record else f"name the new one in its {CONFIG}"
        raise WeightsError(
            f"the adapter {adapter} was trained on {trained_on} (fingerprint {expected}), and {called} is another "
            f"model, or has been changed since (fingerprint {found}). Name the one that it was trained on; if the "
            f"difference is meant, {way_out}"
        )


def _compare_names(adapter: str | Path, trained_on: str, called: str) -> None:
    """Where files cannot be compared. A model of the hub keeps its name; a folder may get another when it is moved."""
    if _last_name(trained_on) == _last_name(called):
        return
    if not looks_local(_name_on_the_hub(trained_on) or trained_on):
        raise WeightsError(
            f"the adapter {adapter} was trained on {trained_on}, and {called} is called otherwise: another model, for "
            f"all that can be told. Name the one that it was trained on; if this is the same under another name, write "
            f"that into {CONFIG} (base_model_name_or_path)"
        )
    from fullshard import runtime

    runtime.warn_once(
        f"base {adapter} {called}",
        f"the adapter {adapter} was trained on {trained_on}, which is not here: whether {called} is the same model is "
        f"not known, only that shapes must fit",
    )
