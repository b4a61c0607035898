"""Downloads a model from the Hub, file by file: only what is read, resumed where it broke off, and checksummed.

Needed are the configuration, the tokenizer and the safetensors files that the weight index lists: no pickles, and no
second copy of the weights in another form (`original/`, `consolidated.safetensors`). A file that is in the cache is
not downloaded again. Without a connection the cache answers.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import os
import shutil
from collections.abc import Collection, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from fullshard.config.byte_size import memory_size
from fullshard.config.errors import WeightsError, first_line
from fullshard.distributed import runtime
from fullshard.distributed.progress import Bar

CONFIGURATION = ("*.json", "*.txt", "*.model", "*.jinja", "additional_chat_templates/*.jinja")
"""Configuration and tokenizer; in folders only chat templates."""
INDEX = ".safetensors.index.json"
WEIGHTS = ("model.safetensors", "adapter_model.safetensors")
"""The weights of a model or an adapter in one file."""


def download(name: str, *, revision: str | None = None, token: Any = None, cache_dir: Any = None) -> Path:
    """The folder with the files of a model or an adapter on the Hub."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    where = {"revision": revision, "token": token, "cache_dir": cache_dir}
    try:
        info = HfApi(token=token).model_info(name, revision=revision, files_metadata=True)
    except GatedRepoError as error:
        raise WeightsError(f"{_gated(name)} {_login(token)}") from error
    except RepositoryNotFoundError as error:
        raise WeightsError(f"{name!r} is not on the Hub, or is private: check the name. {_login(token)}") from error
    except Exception as error:  # no connection, or no name of a model: the library's errors have no common class
        try:
            return Path(snapshot_download(name, local_files_only=True, **where))
        except (OSError, ValueError):
            reason = "HF_HUB_OFFLINE is set and the model is not in the cache" if _is_offline() else first_line(error)
            raise WeightsError(
                f"{name!r} is neither a local directory nor a model that can be downloaded: {reason}."
            ) from error
    files = {file.rfilename: file for file in info.siblings or ()}
    return _Download(name, files, info.sha or "main", where).run()


def _is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "0").lower() not in ("", "0", "false", "no")


def _gated(name: str) -> str:
    return f"{name!r} is gated: accept its conditions on its page on the Hub first."


def _login(token: Any) -> str:
    """What to do about access."""
    from huggingface_hub import get_token

    if token or get_token():
        return "The token in use has no access to it; check the name, or use another token (HF_TOKEN)."
    return "There is no token; set HF_TOKEN, or log in with `hf auth login`."


def needed_files(names: Collection[str]) -> tuple[list[str], list[str]]:
    """Of a repository's files, configuration and tokenizer, and the weights: either indexes, of which one is to be read
    for their names, or the files themselves."""
    small = [n for n in names if any(fnmatch(n, p) and n.count("/") == p.count("/") for p in CONFIGURATION)]
    indexes = [n for n in small if n.endswith(INDEX)]
    weights = [n for n in names if n.endswith(".safetensors") and "/" not in n]
    preferred = [n for n in weights if n in WEIGHTS]
    standard = f"model{INDEX}"
    if standard in indexes or (len(indexes) == 1 and not preferred):
        chosen = [standard if standard in indexes else indexes[0]]
    else:
        chosen = preferred or weights
    return sorted(n for n in small if n not in indexes), sorted(chosen)


class _Download:
    def __init__(self, name: str, files: dict[str, Any], commit: str, where: dict[str, Any]) -> None:
        self.name, self.files, self.commit, self.where = name, files, commit, where
        self._named = where["revision"]
        """The revision as it was asked for; the first download records which commit it is."""

    def run(self) -> Path:
        small, weights = needed_files(self.files)
        if weights and weights[0].endswith(INDEX):
            index = self._fetch(weights[0], None)
            weights = sorted(set(self._listed(index)))
        wanted = [*small, *weights]
        missing = [name for name in wanted if self._cached(name) is None]
        total = sum(self.files[name].size or 0 for name in missing)
        if missing:
            self._check_space(total)
            runtime.get_logger().info("downloading %s: %d files, %s", self.name, len(missing), memory_size(total))
        with Bar(f"downloading {self.name}", total) as bar:
            paths = [self._fetch(name, bar) for name in wanted]
        if not paths:
            raise WeightsError(
                f"{self.name!r} on the Hub has neither a configuration nor safetensors files; use another name."
            )
        return min(paths, key=lambda path: len(path.parts)).parent

    def _listed(self, index: Path) -> Iterator[str]:
        """The weight files of an index."""
        try:
            listed = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise WeightsError(f"{index} is not a safetensors index ({type(error).__name__}: {error})") from error
        absent = sorted(str(name) for name in listed if name not in self.files)
        if absent:
            raise WeightsError(
                f"{self.name!r}: {index.name} lists {', '.join(absent[:3])}, which the Hub does not have; use another "
                f"revision"
            )
        yield from listed

    def _cached(self, name: str) -> str | None:
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(self.name, name, cache_dir=self.where["cache_dir"], revision=self.commit)
        return path if isinstance(path, str) else None

    def _fetch(self, name: str, bar: Bar | None) -> Path:
        """A file in the cache; what is downloaded is compared with the Hub's checksum."""
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import GatedRepoError

        if (cached := self._cached(name)) is not None:
            return Path(cached)
        fetch: Any = hf_hub_download
        counts = "tqdm_class" in inspect.signature(fetch).parameters
        shown = {"tqdm_class": _counting(bar)} if counts and bar is not None else {}
        try:
            path = Path(fetch(self.name, name, **{**self.where, "revision": self._named}, **shown))
        except GatedRepoError as error:
            raise WeightsError(f"{_gated(self.name)} {_login(self.where['token'])}") from error
        except Exception as error:
            raise WeightsError(
                f"{self.name!r}: the download of {name} broke off: {first_line(error)}. Start again to continue where "
                f"it stopped"
            ) from error
        self._named = self.commit
        self._compare(name, path)
        return path

    def _compare(self, name: str, path: Path) -> None:
        file = self.files[name]
        expected = file.lfs.sha256 if file.lfs is not None else file.blob_id
        if expected is None:
            return
        with path.open("rb") as data:
            if file.lfs is not None:
                found = hashlib.file_digest(data, "sha256").hexdigest()
            else:  # as git names its blobs
                content = data.read()
                found = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
        if found != expected:
            path.resolve().unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            raise WeightsError(
                f"{self.name!r}: {name} was damaged on the way (its checksum is {found[:12]}…, expected "
                f"{expected[:12]}…) and has been removed; start again to download it"
            )

    def _check_space(self, total: int) -> None:
        from huggingface_hub import constants

        folder = Path(self.where["cache_dir"] or constants.HF_HUB_CACHE).expanduser()
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        free = shutil.disk_usage(folder).free
        if total > free:
            raise WeightsError(
                f"{self.name!r} needs {memory_size(total)} on the disk of {folder}, where {memory_size(free)} are "
                f"free; free some space, or set HF_HOME to another disk"
            )


def _counting(bar: Bar) -> type[Any]:
    """A class with the methods of tqdm that the Hub's library calls, which counts bytes on a bar of several files."""
    tqdm: Any = importlib.import_module("huggingface_hub.utils").tqdm

    class Counting(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})
            bar.advance(int(options.get("initial") or 0))

        def update(self, n: float | None = 1) -> None:
            bar.advance(int(n or 0))

    return Counting
