"""Models of the Hub: which files come, how often, and what is said where something is wrong.

The server is a small one on this machine; the client is the Hub's own library.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants, snapshot_download
from safetensors.torch import save_file

from fullshard.config.errors import WeightsError
from fullshard.weights.download import download, needed_files
from fullshard.weights.locate import has_weights
from tests.sft.tiny import make_model
from tests.weights.hub_server import Hub, Repository, serve

NAME = "someone/model"


def model_files(tmp_path: Path) -> dict[str, bytes]:
    """A model in two shards, and what repositories have beside it."""
    folder = tmp_path / "source"
    make_model().save_pretrained(folder, max_shard_size="40KB")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert sum(name.endswith(".safetensors") for name in files) > 1
    save_file({"w": torch.zeros(4)}, folder / "consolidated.safetensors")
    copy = (folder / "consolidated.safetensors").read_bytes()
    return files | {
        "README.md": b"# A model", "consolidated.safetensors": copy, "original/model.safetensors": copy,
        "pytorch_model.bin": b"pickle", "tokenizer_config.json": b"{}", "onnx/config.json": b"{}",
    }  # fmt: skip


def needed(files: dict[str, bytes]) -> set[str]:
    listed = set(json.loads(files["model.safetensors.index.json"])["weight_map"].values())
    return listed | {"config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer_config.json"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serve({NAME: Repository(model_files(tmp_path))}) as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.endpoint)
        template = served.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(variable, raising=False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        yield served


def test_only_the_files_that_are_read_and_each_once(hub: Hub, tmp_path: Path) -> None:
    cache, files = tmp_path / "cache", hub.repositories[NAME].files
    folder = download(NAME, cache_dir=cache)
    assert {path.name for path in folder.iterdir()} == needed(files)
    assert all((folder / name).read_bytes() == files[name] for name in needed(files))
    assert has_weights(folder)
    assert sorted(hub.sent) == [(name, 0) for name in sorted(needed(files))]
    assert download(NAME, cache_dir=cache) == folder and len(hub.sent) == len(needed(files))


def test_the_cache_answers_without_a_connection(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    folder = download(NAME, cache_dir=cache)
    assert Path(snapshot_download(NAME, cache_dir=cache, local_files_only=True)) == folder
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert download(NAME, cache_dir=cache) == folder
    with pytest.raises(WeightsError, match="'someone/other' is neither a local directory nor a model that can be"):
        download("someone/other", cache_dir=cache)


def test_what_broke_off_is_resumed(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1024)
    cache, repository = tmp_path / "cache", hub.repositories[NAME]
    shard = max((name for name in needed(repository.files)), key=lambda name: len(repository.files[name]))
    repository.cut[shard] = 10_000
    with contextlib.suppress(WeightsError):  # unless the library has tried again itself
        download(NAME, cache_dir=cache)
    folder = download(NAME, cache_dir=cache)
    assert (folder / shard).read_bytes() == repository.files[shard]
    assert [start > 0 for name, start in hub.sent if name == shard] == [False, True], hub.sent


@pytest.mark.parametrize("kind", ["weights", "configuration"])
def test_what_was_damaged_on_the_way_is_removed(hub: Hub, tmp_path: Path, kind: str) -> None:
    cache, repository = tmp_path / "cache", hub.repositories[NAME]
    listed = sorted(name for name in needed(repository.files) if name.endswith(".safetensors"))
    name = listed[-1] if kind == "weights" else "config.json"
    repository.damaged = frozenset({name})
    with pytest.raises(WeightsError, match=f"{name} was damaged on the way .* start again"):
        download(NAME, cache_dir=cache)
    repository.damaged = frozenset()
    assert (download(NAME, cache_dir=cache) / name).read_bytes() == repository.files[name]


def test_private_and_gated_models_get_one_line(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = hub.repositories[NAME]
    repository.token = "hf_secret"
    with pytest.raises(
        WeightsError, match=r"not on the Hub, or is private: check the name\. There is no token; set HF_TOKEN"
    ) as caught:
        download(NAME, cache_dir=tmp_path / "cache")
    assert "\n" not in str(caught.value)
    with pytest.raises(WeightsError, match=r"The token in use has no access") as caught:
        download(NAME, cache_dir=tmp_path / "cache", token="hf_other")
    assert "\n" not in str(caught.value) and "hf_other" not in str(caught.value)
    assert has_weights(download(NAME, cache_dir=tmp_path / "cache", token="hf_secret"))
    repository.gated = True
    with pytest.raises(WeightsError, match="gated: accept its conditions") as caught:
        download(NAME, cache_dir=tmp_path / "new", token="hf_secret")
    assert "\n" not in str(caught.value)


def test_a_full_disk_is_noticed_first(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage: Any = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(10**6, 10**6 - 1000, 1000))
    with pytest.raises(WeightsError, match=r"needs .* on the disk of .*, where 1000 B are free"):
        download(NAME, cache_dir=tmp_path / "cache")
    assert [name for name, _ in hub.sent] == ["model.safetensors.index.json"]


def test_repositories_in_other_forms() -> None:
    assert needed_files(["adapter_config.json", "adapter_model.safetensors", "optimizer.pt", "runs/a.json"]) == (
        ["adapter_config.json"], ["adapter_model.safetensors"],
    )  # fmt: skip
    assert needed_files(["config.json", "model.safetensors", "model.fp16.safetensors"]) == (
        ["config.json"], ["model.safetensors"],
    )  # fmt: skip
    assert needed_files(["config.json", "a.safetensors", "b.safetensors"])[1] == ["a.safetensors", "b.safetensors"]
    listed = ["model.safetensors.index.json", "consolidated.safetensors.index.json", "x.safetensors"]
    assert needed_files(listed) == ([], ["model.safetensors.index.json"])
    assert needed_files(["additional_chat_templates/tools.jinja", "chat_template.jinja", "x/y.jinja"])[0] == [
        "additional_chat_templates/tools.jinja", "chat_template.jinja",
    ]  # fmt: skip


def test_an_index_that_lists_what_is_not_there(hub: Hub, tmp_path: Path) -> None:
    files = hub.repositories[NAME].files
    del files[min(name for name in needed(files) if name.endswith(".safetensors"))]
    with pytest.raises(WeightsError, match=r"index\.json lists .*, which the Hub does not have"):
        download(NAME, cache_dir=tmp_path / "cache")
