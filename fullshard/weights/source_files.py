"""The files a model was loaded from: what identifies them, and which parameters they still provide.

A checkpoint omits frozen parameters that can be loaded from the base files again. That is allowed only for parameters
that were loaded unchanged and not written to since; `SourceFiles` records this on the model.

Files are identified twice. The checksums cover every byte and are computed while the files are read. The fingerprint
only samples them, so that a wrong model is refused before gigabytes are read; records of fullshard 0.1 have no more.
What `config.json` says of the model's computation belongs to its identity too.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from fullshard.config.errors import WeightsError
from fullshard.distributed import runtime
from fullshard.distributed.ranks import agree, host_group, run_on_all_ranks
from fullshard.fsdp.parameter import piece_of, writes_of
from fullshard.weights.block_checksums import UNKNOWN, remembered
from fullshard.weights.config_limits import check_limits
from fullshard.weights.locate import weight_files
from fullshard.weights.safetensors_files import SafetensorsFiles, file_names

ATTRIBUTE = "_fullshard_base"
"""The attribute of a loaded model with its `SourceFiles`."""
SAMPLES = 64
"""Samples per file in a fingerprint, besides its header and size."""
SAMPLE_BYTES = 4096


WriteCount = tuple["weakref.ref[torch.Tensor]", tuple[int, int]]
"""A shard, and the write counts of it and of its sharded tensor."""


@dataclass
class SourceFiles:
    """The files that a model's parameters were loaded from."""

    path: str
    """The directory (or file)."""
    fingerprint: str
    """`fingerprint_of(path)` at load."""
    checksums: dict[str, str] = field(default_factory=dict)
    """The checksum of every byte of each file, by its name in the directory."""
    config: dict[str, Any] = field(default_factory=dict)
    """`config_of(path)` at load."""
    loaded: dict[str, WriteCount] = field(default_factory=dict, repr=False)
    """By parameter name, the write counts of this rank's shard after loading."""
    left_out: tuple[str, ...] = ()
    """The tensors in the files that belong to parts left out of the model; they are copied when it is saved."""

    @property
    def identity(self) -> Identity:
        """What identifies the files, for records."""
        return {"fingerprint": self.fingerprint, "checksums": self.checksums, "config": self.config}

    def record(self, names: Iterable[str], shard: torch.Tensor) -> None:
        """Record that the files provide this parameter, under all its names."""
        self.loaded.update(dict.fromkeys(names, (weakref.ref(piece_of(shard)), writes_of(shard))))

    def provides(self, name: str, shard: torch.Tensor) -> bool:
        """Whether the files contain this parameter's current value.

        False after any write to it, even of the same value. Writes through `.data` are not detected, because torch does
        not count them.
        """
        if name not in self.loaded:
            return False
        loaded, writes = self.loaded[name]
        return loaded() is piece_of(shard) and writes_of(shard) == writes


def base_of(model: nn.Module) -> SourceFiles | None:
    """The files that a model was loaded from; None if it was not loaded from files."""
    return getattr(model, ATTRIBUTE, None)


Identity = dict[str, Any]
"""`fingerprint`; `checksums` by file name, and `config`, which old records do not have."""


def identity_of(path: str | Path) -> Identity:
    """What identifies the weight files at `path`. Files that did not change since this process read them whole are not
    read again."""
    files = weight_files(Path(path))
    checksums = dict(zip(file_names(files), map(remembered, files), strict=True))
    if not all(checksums.values()):
        with SafetensorsFiles(path, files) as source:
            checksums = dict(source.checksums())
    return {**quick_identity(path), "checksums": checksums}


def quick_identity(path: str | Path) -> Identity:
    """What identifies the files at `path` without reading all of them."""
    return {"fingerprint": fingerprint_of(path), "config": config_of(path)}


def difference(saved: Identity, here: Identity) -> str:
    """How files differ from those of a record; empty if they are the same. Fingerprints are compared where one of the
    two has no checksums, and `config.json` where both have it."""
    expected, there = saved.get("checksums"), here.get("checksums")
    if not expected or not there:
        expected, there = {"fingerprint": saved["fingerprint"]}, {"fingerprint": here["fingerprint"]}
    wrong = [name for name in sorted({*expected, *there}) if expected.get(name) != there.get(name)]
    shown = [f"{name} is {there.get(name, 'missing')}, expected {expected.get(name, 'no such file')}" for name in wrong]
    settings = config_differences(saved.get("config") or {}, here.get("config") or {})
    shown += [f"config.json: {setting}" for setting in settings]
    return "; ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")


# --- config.json ----------------------------------------------------------------------------------------------------

NO_COMPUTATION = re.compile(
    r"^_|name_or_path$|^transformers_version$|^architectures$|dtype$|^use_cache$|_token_id$|^output_|"
    r"^(id2label|label2id|problem_type)$|^return_dict|(attn|experts)_implementation$|^auto_map$|^task_specific_params$|^initializer_range$"
)
"""Settings in a `config.json` that do not change what the model computes from tokens, or that a run chooses itself."""


def config_of(path: str | Path) -> dict[str, Any]:
    """The settings in the `config.json` at `path` that decide what the model computes; empty without the file."""
    folder = Path(path)
    try:
        values = json.loads(((folder if folder.is_dir() else folder.parent) / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return that_compute(values) if isinstance(values, dict) else {}


def that_compute(value: Any) -> Any:
    """A configuration, or a part of one, without settings that do not change what the model computes."""
    if not isinstance(value, dict):
        return value
    return {name: that_compute(inner) for name, inner in value.items() if not NO_COMPUTATION.search(name)}


def config_differences(saved: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """What two configurations set differently. Defaults count as set, so a file that was written again is the same."""
    if not saved or not here or saved == here:
        return []
    return list(_differing(_with_defaults(saved), _with_defaults(here), ""))


def _with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    from transformers import AutoConfig

    try:
        check_limits(config, "config.json")
        whole = AutoConfig.for_model(**copy.deepcopy(config)).to_dict()
    except Exception:  # a class of its own, or values that its class refuses
        return config
    return that_compute(json.loads(json.dumps(whole, default=str)))


def _differing(saved: Any, here: Any, name: str) -> Iterator[str]:
    if isinstance(saved, dict) and isinstance(here, dict):
        for key in sorted(saved.keys() & here.keys()):
            yield from _differing(saved[key], here[key], f"{name}.{key}" if name else key)
    elif saved != here and json.dumps(saved) != json.dumps(here):  # NaN is not equal to itself
        yield f"{name} is {_shown(here)}, expected {_shown(saved)}"


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# --- checksums ------------------------------------------------------------------------------------------------------


def shared_checksums(source: SafetensorsFiles) -> dict[str, str]:
    """The checksums of files that all ranks have read. All ranks must call it.

    Blocks that no rank has read whole are divided among the ranks. A block that two ranks have read must be the same on
    both: each node may have its own copy of the files.
    """
    headers = agree(lambda: (file_names(source.files), source.headers), "checksums", error=WeightsError)
    if odd := [rank for rank, theirs in enumerate(headers) if theirs != headers[0]]:
        raise WeightsError(
            f"{source.path} has other files on rank {odd[0]} than on rank 0; give all nodes the same copy"
        )
    _combine(source)
    missing = source.blocks.missing()
    mine = np.array_split(missing, runtime.world_size())[runtime.rank()]
    run_on_all_ranks(lambda: source.read_blocks(mine), "checksums", error=WeightsError)
    if len(missing):
        _combine(source)
    return source.checksums()


def _combine(source: SafetensorsFiles) -> None:
    """Give every rank the checksums of the blocks that any rank has read."""
    mine = source.blocks.values
    shared = torch.from_numpy(mine.copy())
    if runtime.world_size() > 1:
        dist.all_reduce(shared, dist.ReduceOp.MAX, group=host_group())  # unknown ones are less than all others

    def compare() -> None:
        odd = np.flatnonzero((mine != UNKNOWN) & (mine != shared.numpy()))
        if len(odd):
            raise WeightsError(
                f"{source.file_of_block(odd[0])} does not have the same bytes on all ranks: a copy on one of the nodes "
                f"is damaged or of another version; copy the model to all nodes again"
            )

    agree(compare, "checksums", error=WeightsError)
    mine[:] = shared.numpy()


def fingerprint_of(path: str | Path) -> str:
    """A hash of the weight files at `path`: of their names, sizes and headers, and of evenly spaced samples.

    It is cheap for any model size. It distinguishes models and versions of a model; equal fingerprints do not prove
    equal files.
    """
    files = weight_files(Path(path))
    digest = hashlib.blake2b(digest_size=16)
    try:
        for file in files:
            _add_file(digest, file)
    except OSError as error:
        raise WeightsError(f"{error.filename or path} cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()


def _add_file(digest: Any, file: Path) -> None:
    size = file.stat().st_size
    digest.update(f"{file.name}\0{size}\0".encode())
    with open(file, "rb", buffering=0) as stream:
        head = 8 + min(int.from_bytes(stream.read(8), "little"), max(size - 8, 0))  # a damaged length reads less
        stream.seek(0)
        digest.update(_read(stream, head))
        room = max(size - head - SAMPLE_BYTES, 0)
        for i in range(SAMPLES):
            stream.seek(head + room * i // max(SAMPLES - 1, 1))
            digest.update(_read(stream, SAMPLE_BYTES))


def _read(stream: Any, length: int) -> bytes:
    parts = []
    while length > 0 and (part := stream.read(length)):
        parts.append(part)
        length -= len(part)
    return b"".join(parts)
