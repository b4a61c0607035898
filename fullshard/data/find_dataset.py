"""Finds the dataset that a name refers to: a file, a folder with files per split, a saved dataset, or a Hub dataset.

Checks that the data exists, that its format is supported and that the first row of each file can be parsed, without
importing torch. Hub datasets are loaded with `datasets`, which is imported only for them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fullshard.config.errors import DataError, first_line
from fullshard.data.file_formats import check_kind, kind_of, stem_of
from fullshard.data.raw_row import RawRow, RowPosition, names, short
from fullshard.data.row_formats import Reading, parse_row
from fullshard.data.sources import DataSource, file_source, row_source

Splits = tuple[DataSource, DataSource | None]
"""The training and the evaluation data of a dataset."""

_HUB = re.compile(r"[\w.-]+(/[\w.-]+)?")


def names_of(datasets: str) -> list[str]:
    """The names in a comma-separated list of datasets. A path that exists may contain commas."""
    if _exists(Path(datasets).expanduser()):
        return [datasets]
    return [name.strip() for name in datasets.split(",") if name.strip()]


def split_names(splits: str) -> list[str]:
    """The names of the training split and, if given, of the evaluation split ("train,test")."""
    names = [s.strip() for s in splits.split(",") if s.strip()]
    if not names:
        raise DataError("splits is empty; expected names such as 'train' or 'train,test'.")
    if len(names) > 2:
        raise DataError(f"splits={splits!r}: expected at most two names, training then evaluation.")
    return names


def find_data(
    name: str, splits: list[str], evaluates: bool = True, config: str | None = None, streaming: bool = False,
    sample_by: str = "line",
) -> Splits:  # fmt: skip
    """The dataset with this name.

    A file is training data. A folder holds files for each split, directly or in its subfolder `data`: `train.jsonl`,
    several files (`train-00000-of-00002.parquet`, `train_1.csv`), or a folder of them (`train/`); all in one format. If
    a dataset has several configurations in subfolders, `config` names the subfolder. A folder saved by `datasets` is
    one split (train), or holds several by name. Any other name is a Hub dataset, and `config` its configuration.
    """
    path = Path(name).expanduser()
    if _exists(path):
        with _os_errors_as_data_errors(path):
            if not path.is_dir():
                return file_source([_readable(path)], sample_by), None
            folder = path / config if config else path
            if not folder.is_dir():
                raise DataError(
                    f"dataset_config_name is {config!r}, but {path} has no such folder; it holds {_contents(path)}."
                )
            train, *evaluation = (_split_files(folder, split) for split in splits[: 1 + evaluates])
            if not train:
                raise DataError(
                    f"{folder}: no file for the split {splits[0]!r} (such as {splits[0]}.jsonl); the folder holds "
                    f"{_contents(folder)}."
                )
            held_out = evaluation[0] if evaluation else []
            return file_source(train, sample_by), file_source(held_out, sample_by) if held_out else None
    local = path.is_absolute() or name.startswith((".", "~")) or kind_of(path) or not _HUB.fullmatch(name)
    if local:
        raise DataError(
            f"the dataset {str(path)!r} does not exist. Give a file (such as {splits[0]}.jsonl), a folder with one per "
            f"split, or the name of a Hub dataset."
        )
    first, *second = (_hub_source(name, config, split, streaming) for split in splits[: 1 + evaluates])
    return first, second[0] if second else None


def check_first_rows(source: DataSource, reading: Reading) -> None:
    """Raise if the data has no rows or, unless bad rows are skipped, if the first row of a file cannot be parsed."""
    some = False
    for part in source.parts or (source,):
        raw = next(part.rows(None), None)
        some = some or raw is not None
        if raw is not None and reading.on_bad_row == "stop":
            parse_row(raw, reading)
    if not some:
        raise DataError(f"{source.name}: no rows; expected at least one.")


def source_of(data: Any, name: str, sample_by: str = "line", prepared: bool = False) -> DataSource:
    """A data source from user-provided data: a file, a split saved by `datasets`, a list of paths, or rows. `prepared`
    rows are used as they are (skip_prepare_dataset)."""
    if isinstance(data, DataSource):
        return data
    if isinstance(data, str | Path):
        path = Path(data).expanduser()
        if not _exists(path):
            raise DataError(f"{name}: {str(path)!r} does not exist.")
        with _os_errors_as_data_errors(path):
            return file_source(_saved_files(path) if _is_saved(path) else [_readable(path)], sample_by)
    if isinstance(data, list | tuple) and data and all(isinstance(item, Path) for item in data):
        return file_source([_readable(path) for path in data], sample_by)
    if isinstance(data, Mapping):
        raise DataError(f"{name} is a {type(data).__name__} ({names(data)}); give one of its splits.")
    if not isinstance(data, Iterable):
        raise DataError(f"{name} is {short(data)}; expected rows (a list of objects, a datasets.Dataset) or a file.")
    return row_source(_without_format(data, name, prepared), name)


def _without_format(data: Any, name: str, prepared: bool) -> Any:
    """A dataset of `datasets` whose rows are plain values; other rows unchanged."""
    if not hasattr(data, "with_format") or not isinstance(getattr(data, "format", None), Mapping):
        return data
    kind = data.format["type"]
    if kind == "custom" and not prepared:
        raise DataError(
            f"{name} uses Dataset.with_transform(), whose rows may differ each time they are read, and they are read "
            f"once; apply the transform with Dataset.map(). Or set skip_prepare_dataset and streaming, if it returns "
            f"trainer-ready rows (input_ids and labels): then they are read in every epoch."
        )
    return data if kind in (None, "custom") else data.with_format(None).select_columns(data.format["columns"])


def is_stream(data: Any) -> bool:
    """Whether this is an iterable dataset of `datasets`, whose length is unknown."""
    return hasattr(data, "skip") and hasattr(data, "take") and not hasattr(data, "__len__")


# --- files and folders ----------------------------------------------------------------------------------------------


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except PermissionError:
        return True  # as far as we can tell
    except (OSError, ValueError):  # too long, or with a null character: not a path
        return False


def _readable(path: Path) -> Path:
    if path.is_dir():
        raise DataError(f"{path} is a folder; expected a file, or a dataset that `datasets` saved.")
    check_kind(path)
    return path


def _contents(folder: Path) -> str:
    return names(sorted(p.name for p in folder.iterdir())).replace("none", "nothing")


@contextlib.contextmanager
def _os_errors_as_data_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"{error.filename or path} cannot be read: {error.strerror or error}.") from None


def _split_files(folder: Path, split: str) -> list[Path]:
    if (folder / "dataset_dict.json").is_file():
        return _saved_files(folder / split) if _is_saved(folder / split) else []
    if _is_saved(folder):
        return _saved_files(folder) if split == "train" else []
    for place in (folder, folder / "data"):
        if not place.is_dir():
            continue
        files = [p for p in _files(place) if _belongs(stem_of(p), split)]
        if not files and (place / split).is_dir():
            files = _files(place / split)
        kinds = sorted({str(kind_of(p)) for p in files})
        if len(kinds) > 1:
            raise DataError(
                f"{place}: files of several formats for the split {split!r} "
                f"({', '.join(p.name for p in files[:6])}); name one of them as the dataset, or move the others away."
            )
        if files:
            return files
    return []


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and kind_of(path))


def _belongs(stem: str, split: str) -> bool:
    return stem == split or stem.startswith((f"{split}-", f"{split}_", f"{split}."))


def _is_saved(folder: Path) -> bool:
    return (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()


def _saved_files(folder: Path) -> list[Path]:
    """The files of a split saved by `datasets`."""
    try:
        state = json.loads((folder / "state.json").read_bytes())
        files = [folder / Path(entry["filename"]).name for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{folder / 'state.json'} is not what `datasets` writes: {error!r:.100}.") from None
    missing = [path.name for path in files if not path.is_file()]
    if missing or not files:
        raise DataError(f"{folder}: state.json lists {', '.join(missing) or 'no files'}, but they do not exist.")
    return [_readable(path) for path in files]


# --- the Hub --------------------------------------------------------------------------------------------------------


def _hub_source(name: str, config: str | None, split: str, streaming: bool) -> DataSource:
    where = f"{name} ({', '.join(filter(None, (config, split)))})"

    def rows(start: RowPosition) -> Iterator[RawRow]:
        return row_source(_load(name, config, split, streaming), where).rows(start)

    def fingerprint() -> str:
        content = getattr(_load(name, config, split, streaming), "_fingerprint", None)
        return hashlib.sha256(f"{where} {content}".encode()).hexdigest()

    return DataSource(where, rows, fingerprint)


@functools.lru_cache(maxsize=16)
def _load(name: str, config: str | None, split: str, streaming: bool) -> Any:
    try:
        import datasets
    except ImportError:
        raise DataError(f"the dataset {name!r}: Hub datasets need `datasets`; pip install datasets.") from None
    offline = datasets.config.HF_HUB_OFFLINE
    unreachable = "HF_HUB_OFFLINE is set" if offline else _unreachable(name)
    try:
        # Offline, cached datasets still load, and nothing waits for a network that is not available.
        datasets.config.HF_HUB_OFFLINE = unreachable is not None
        return datasets.load_dataset(name, config, split=split, streaming=streaming)
    except Exception as error:  # many types of error, from the network to the dataset's configuration
        raise DataError(
            f"the dataset {name!r} is not a local file or folder, and its split {split!r} could not be loaded from the "
            f"Hub: {unreachable if unreachable and isinstance(error, ConnectionError) else _reason(error)}."
        ) from None
    finally:
        datasets.config.HF_HUB_OFFLINE = offline


def _unreachable(name: str) -> str | None:
    """Why the Hub cannot be reached; None if it answers, even if it has no such dataset."""
    from huggingface_hub import HfApi

    try:
        HfApi().dataset_info(name, timeout=10)
    except Exception as error:
        return f"it cannot be reached ({_reason(error)})" if getattr(error, "response", None) is None else None
    return None


def _reason(error: Exception) -> str:
    return first_line(error)[:200].rstrip(".")
