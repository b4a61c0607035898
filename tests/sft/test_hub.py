"""Uploads: what each strategy sends and when, and that nothing about the hub stops a run."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from fullshard.distributed import runtime
from fullshard.sft.hub import Hub
from fullshard.sft.trainer import SFTTrainer
from tests.data.tiny import make_tokenizer, text_rows
from tests.pool import ranks
from tests.sft.runs import settings
from tests.sft.tiny import make_model

LORA = {"use_peft_lora": True, "lora_r": 2, "lora_target_modules": "q_proj"}


class Api:
    """The hub's programming interface, without a hub."""

    calls: list[Any] = []  # noqa: RUF012 - the same one for all
    fails = ""
    gate: threading.Event | None = None
    there: list[str] = []  # noqa: RUF012

    def __init__(self, token: str | None = None) -> None:
        self.token = token

    def create_branch(self, name: str, **options: Any) -> None:
        Api.calls.append(("branch", name, options["branch"], self.token))

    def create_repo(self, name: str, **options: Any) -> Any:
        if self.fails == "create":
            raise ConnectionError("no route to the hub\nmore of it")
        Api.calls.append(("create", name, options["private"]))
        return type("Url", (), {"repo_id": f"me/{name}"})()

    def upload_folder(self, **options: Any) -> None:
        if self.gate is not None and not options["commit_message"].endswith("the end of training"):
            assert self.gate.wait(60)
        if self.fails == "upload":
            raise OSError("413 too large")
        files = {p.name for p in Path(options["folder_path"]).iterdir()}
        Api.calls.append((options["commit_message"], options.get("path_in_repo"), files, options))

    def list_repo_files(self, name: str, revision: str | None = None) -> list[str]:
        return self.there


def train(folder: Path, patch: pytest.MonkeyPatch, **changes: Any) -> tuple[list[Any], list[str]]:
    """A run of four steps with a checkpoint after every other; what was sent, and what was warned of."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    Api.calls = []
    patch.setattr(huggingface_hub, "HfApi", Api)
    patch.setattr(huggingface_hub, "get_token", lambda: changes.get("token", "hf_x"))
    patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", changes.get("offline", False))
    own = {k: v for k, v in changes.items() if k not in ("token", "offline")}
    values = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 2, **LORA}
    config = settings(folder, **{**values, "push_to_hub": True, **own})
    runtime.get_logger().addHandler(handler)
    try:
        trainer = SFTTrainer(model=make_model(), args=config, train_dataset=text_rows(8), tokenizer=make_tokenizer())
        trainer.train()
        if Api.gate is not None:
            Api.gate.set()
        trainer.save_model()
    finally:
        runtime.get_logger().removeHandler(handler)
    assert (folder / "out" / "adapter_model.safetensors").exists(), "whatever the hub does"
    return Api.calls, said


@ranks(1)
def test_what_each_strategy_sends(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        last, end = "fullshard: checkpoint at step 4", "fullshard: the end of training"
        own = {"hub_revision": "v1", "hub_token": "hf_own", "token": None}
        calls, said = train(
            tmp_path / "end", patch, hub_strategy="end", hub_model_id="it", hub_private_repo=True, **own
        )
        assert calls[0] == ("create", "it", True) and calls.pop(1) == ("branch", "me/it", "v1", "hf_own")
        assert [c[0] for c in calls[1:]] == [end] and calls[1][3]["revision"] == "v1" and not said
        written = [file for file in (tmp_path / "end" / "out").rglob("*") if file.is_file()]
        assert {"settings.json", "README.md", "report.html"} <= {file.name for file in written}
        assert not [file for file in written if b"hf_own" in file.read_bytes()], "a token is never written"
        assert {"adapter_model.safetensors", "tokenizer.json", "README.md"} <= calls[1][2]
        assert calls[1][3]["repo_id"] == "me/it" and "checkpoints/**" in calls[1][3]["ignore_patterns"]
        calls, _ = train(tmp_path / "each", patch, hub_strategy="every_save")
        assert calls[0] == ("create", "out", None) and calls[-1][0] == end and len(calls) > 2
        assert {"adapter_model.safetensors", "tokenizer.json"} <= calls[1][2], "the model as it was then"
        growing = ["metrics.jsonl" in calls[i][3]["ignore_patterns"] for i in (1, -1)]
        assert growing == [True, False], "a file that grows is sent when it has ended"
        calls, _ = train(tmp_path / "checkpoint", patch, hub_strategy="checkpoint")
        sent = [(c[0], c[1]) for c in calls[1:]]
        assert sent[-2:] == [(end, None), (last, "last-checkpoint")] and calls[-1][3]["delete_patterns"] == ["*"]
        assert "manifest.json" in calls[-1][2]
        calls, _ = train(tmp_path / "all", patch, hub_strategy="all_checkpoints")
        whole = [c for c in calls[1:] if c[1] is not None]
        assert [c[1] for c in whole] == ["checkpoints/step-2", "checkpoints/step-4"], "each once"
        assert all(c[3]["delete_patterns"] is None for c in whole)


@ranks(2)
def test_one_upload_at_a_time_on_several_ranks(tmp_path: Path) -> None:
    """While one is on its way the next save sends nothing; the end waits for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Api, "gate", threading.Event())
        calls, _ = train(tmp_path, patch, hub_strategy="every_save", save_steps=1)
        if runtime.is_main():
            assert len([c for c in calls if c[0].startswith("fullshard: step")]) == 1
            assert calls[-1][0] == "fullshard: the end of training"
        else:
            assert calls == []
    runtime.barrier()


@ranks(1)
@pytest.mark.parametrize("background", [pytest.param(False, marks=pytest.mark.slow), True])
def test_what_is_saved_during_an_upload_is_sent_too(background: bool, tmp_path: Path) -> None:
    """The first upload ends after the last save; by then `save_total_limit` would have removed what waits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Api, "gate", threading.Event())
        options = {"hub_strategy": "all_checkpoints", "save_steps": 1, "save_total_limit": 1, "async_save": background}
        calls, said = train(tmp_path, patch, **options)
    sent = [(place, sorted(files)) for _, place, files, _ in calls[1:] if place is not None]
    assert [place for place, _ in sent] == [f"checkpoints/step-{n}" for n in (1, 2, 3, 4)] and not said
    (left,) = (tmp_path / "out" / "checkpoints").iterdir()
    assert left.name == "step-4", "then the limit counts again"
    assert all(files == sorted(p.name for p in left.iterdir()) for _, files in sent), "whole"


@pytest.mark.slow
@ranks(1)
def test_uploads_that_fail_hold_no_checkpoints(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Api, "fails", "create")
        train(tmp_path, patch, hub_strategy="all_checkpoints", save_steps=1, save_total_limit=2, max_steps=6)
    left = sorted(p.name for p in (tmp_path / "out" / "checkpoints").iterdir())
    assert left == ["step-5", "step-6"]


@pytest.mark.slow
@ranks(1)
def test_a_resumed_run_sends_the_checkpoints_that_the_hub_lacks(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        train(tmp_path, patch, push_to_hub=False, save_steps=1, max_steps=2)
        patch.setattr(Api, "there", ["checkpoints/step-1/manifest.json", "checkpoints/step-3/manifest.json"])
        calls, _ = train(tmp_path, patch, hub_strategy="all_checkpoints", save_steps=1, max_steps=3, resume=True)
    sent = [place for _, place, *_ in calls[1:] if place is not None]
    assert sorted(sent) == ["checkpoints/step-2", "checkpoints/step-3"], "step 3 of this run is another one"


@ranks(1)
def test_no_token_no_network_no_luck(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, changes, fails, reason in (
            ("token", {"token": None}, "", "there is no token; log in with `hf auth login`, or set HF_TOKEN"),
            ("offline", {"offline": True}, "", "the hub is disabled (HF_HUB_OFFLINE is set)"),
            ("network", {}, "create", "no route to the hub"),
            ("upload", {"hub_strategy": "end"}, "upload", "413 too large"),
        ):
            patch.setattr(Api, "fails", fails)
            calls, said = train(tmp_path / name, patch, **{"hub_model_id": "me/it", **changes})
            place = tmp_path / name / "out"
            command = f"hf upload me/it {place} . --exclude 'checkpoints/**' --exclude 'runs/**' --exclude 'wandb/**'"
            expected = f"not uploaded to me/it: {reason}. The run continues, and its result stays in {place}; upload it later with: {command}"  # noqa: E501
            at_once = changes.get("hub_strategy") != "end"
            assert set(said) == {expected} and len(said) == 1 + at_once, "when training begins, and at the end"
            assert fails or not calls, "nothing is tried that cannot work"


def test_the_name_of_the_folder_is_the_name_on_the_hub(tmp_path: Path) -> None:
    writer: Any = None
    assert Hub(settings(tmp_path), writer, print)._name == "out"
