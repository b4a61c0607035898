"""Locates a model's files: a directory, a file, or a Hub name; with helpful errors if they are not found."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fullshard.config.errors import WeightsError
from fullshard.distributed import runtime
from fullshard.distributed.ranks import agree
from fullshard.lora.adapter_config import CONFIG
from fullshard.weights.download import download
from fullshard.weights.safetensors_files import SafetensorsFiles

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""Suffixes of pickle files, which can run arbitrary code when loaded."""


def open_source(path: str | Path) -> SafetensorsFiles:
    """Open the safetensors files at a path: a directory, one file, or an index."""
    return SafetensorsFiles(path, weight_files(Path(path)))


def weight_files(path: Path) -> list[Path]:
    """The weight files at a path, in order."""
    if path.is_file():
        if path.name.endswith(".index.json"):
            return _indexed(path)
        if path.suffix == ".safetensors":
            return [path]
        if path.suffix in PICKLES:
            raise WeightsError(_refuse_pickle(path, path.parent, [path]))
        raise WeightsError(f"{path} is not a safetensors file; expected one, or a directory with safetensors files")
    if not path.is_dir():
        raise WeightsError(f"{path} does not exist.{_suggest(path)}")
    if (path / INDEX).exists():
        return _indexed(path / INDEX)
    if (path / SINGLE).exists():
        return [inside(path / SINGLE, path)]
    indexes = sorted(path.glob("*.safetensors.index.json"))
    files = sorted(path.glob("*.safetensors"))
    if len(indexes) == 1:
        return _indexed(indexes[0])
    if files and not (path / CONFIG).exists() and not (path / "manifest.json").exists():
        return [inside(file, path) for file in files]
    raise WeightsError(_nothing_here(path))


def inside(file: Path, folder: Path) -> Path:
    """A file of a model folder; refuses one that is elsewhere, by its name or as a link.

    Links of the Hub's cache are allowed: those of a snapshot lead to the blobs of the same repository.
    """
    place, home = file.resolve(), folder.resolve()
    blobs = [home.parent.parent / "blobs"] if home.parent.name == "snapshots" else []
    if not any(place.is_relative_to(allowed) for allowed in (home, *blobs)):
        raise WeightsError(
            f"{file} is outside of the model's folder ({place}): a model from elsewhere could name any file of this "
            f"machine. If it belongs to the model, copy it into {folder}"
        )
    return file


def has_weights(path: Path) -> bool:
    """Whether there are safetensors files at a path, all that its index lists."""
    try:
        return bool(weight_files(path))
    except WeightsError:
        return False


def _indexed(index: Path) -> list[Path]:
    try:
        listed = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        files = [inside(index.parent / name, index.parent) for name in listed]
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise WeightsError(f"{index} is not a safetensors index ({type(error).__name__}: {error})") from error
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise WeightsError(
            f"{index} lists {len(files)} files, but {len(absent)} are missing: {', '.join(absent[:5])}. Download or "
            f"copy them again"
        )
    return files


# --- error messages ---------------------------------------------------------------------------------------------------


def _nothing_here(path: Path) -> str:
    if (path / "manifest.json").exists():
        return (
            f"{path} is a training checkpoint, not a model. Resume from it with fullshard.load_state or "
            f"CheckpointManager.restore, or convert it to a model: fullshard merge-weights {path} OUT"
        )
    if (path / CONFIG).exists():
        try:
            base = json.loads((path / CONFIG).read_text()).get("base_model_name_or_path")
        except (OSError, ValueError):
            base = None
        return (
            f"{path} contains an adapter, not a model. Load its base model{f' ({base})' if base else ''} with it: "
            f"load_pretrained(base, adapter={str(path)!r})"
        )
    pickles = [file for file in sorted(path.iterdir()) if file.suffix in PICKLES]
    if pickles:
        return _refuse_pickle(path, path, pickles)
    return f"{path} contains no safetensors files.{_suggest(path)}"


def _refuse_pickle(path: Path, directory: Path, files: list[Path]) -> str:
    names = ", ".join(file.name for file in files[:3]) + (", …" if len(files) > 3 else "")
    if (directory / "config.json").exists():
        command = (
            f'python -c "import transformers as t; p = {str(directory)!r}; c = t.AutoConfig.from_pretrained(p); '
            f"m = getattr(t, c.architectures[0]).from_pretrained(p); m.save_pretrained(p + '-safetensors')\""
        )
    else:
        out = files[0].with_suffix(".safetensors")
        command = (
            f'python -c "import torch; from safetensors.torch import save_file; s = torch.load({str(files[0])!r}, '
            f"map_location='cpu', weights_only=True); "
            f'save_file({{k: v.clone().contiguous() for k, v in s.items()}}, {str(out)!r})"'
        )
    return (
        f"{path} contains pickle files ({names}), which can run arbitrary code when loaded; fullshard reads only "
        f"safetensors. If you trust the files, convert them once:\n  {command}"
    )


def _suggest(path: Path) -> str:
    """A sentence with model directories near the given path; empty if there are none."""
    above = path
    while not above.is_dir() and above != above.parent:
        above = above.parent
    good = [d for d in _below(above if above.is_dir() else Path("."), 2) if _is_model(d)]
    # Most similar names first.
    good.sort(key=lambda d: -difflib.SequenceMatcher(None, str(d), str(path)).ratio())
    if good:
        return " Directories with weights nearby: " + ", ".join(map(str, good[:5]))
    checkpoints = [d for d in _below(above, 2) if (d / "manifest.json").exists()]
    if checkpoints:
        return (
            f" Training checkpoints nearby: {', '.join(map(str, checkpoints[:3]))}; resume from one with "
            f"fullshard.load_state, or convert it to a model with fullshard merge-weights"
        )
    return ""


def _is_model(directory: Path) -> bool:
    return (directory / "config.json").exists() and any(directory.glob("*.safetensors"))


def _below(directory: Path, depth: int) -> Iterable[Path]:
    try:
        children = sorted(c for c in directory.iterdir() if c.is_dir() and not c.name.startswith("."))[:200]
    except OSError:
        return
    for child in children:
        yield child
        if depth > 1:
            yield from _below(child, depth - 1)


# --- the Hub ----------------------------------------------------------------------------------------------------------


def resolve(name: str | Path, **options: Any) -> Path:
    """The local directory (or file) of a model, downloaded from the Hub if needed. All ranks must call it.

    One rank per node downloads while the others wait; a cached model is not downloaded again.
    """
    path = Path(name).expanduser()
    on_disk = path.exists() or path.is_absolute() or str(name).startswith((".", "~")) or len(path.parts) > 2
    if any(
        agree(lambda: on_disk, "resolve", error=WeightsError)
    ):  # a rank that does not see the path raises an error later
        return path

    def fetch() -> Path:
        try:
            return download(str(name), **options)
        except WeightsError as error:
            raise WeightsError(f"{error}{_suggest(path)}") from error

    first = runtime.local_rank() == 0
    folders = agree(lambda: str(fetch()) if first else "", "download", error=WeightsError)
    return Path(folders[runtime.rank() - runtime.local_rank()])
