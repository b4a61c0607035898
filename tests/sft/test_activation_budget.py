"""`gradient_checkpointing` by budget: how it is given, what is chosen, and that losses do not depend on it.

A CPU does not count the memory of tensors, so these runs pretend to.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainingArguments

from fullshard.activations.layer_memory import DeviceMemory, LayerMeter
from fullshard.activations.levels import Level, LevelChoice, full_checkpointing, peak_of
from fullshard.config.byte_size import parse_size
from fullshard.config.errors import ConfigError
from fullshard.data.loader import Collator
from fullshard.distributed import runtime
from fullshard.distributed.ranks import exchange
from fullshard.fsdp.compile import VARIANT
from fullshard.parallel.settings import EngineSettings
from fullshard.planner import activation_budget, host_memory
from fullshard.planner.batch import BatchShape, largest_in_data
from fullshard.sft.checked_run import sharding_settings
from fullshard.sft.cli_args import config_of, parse
from fullshard.sft.sft_config import SFTConfig
from fullshard.sft.trainer import SFTTrainer
from tests.data.tiny import make_tokenizer, text_rows
from tests.pool import ranks
from tests.sft.runs import global_batch, losses, settings, train
from tests.sft.test_qlora import FOUR_BITS
from tests.sft.tiny import make_model

# --- how it is given ------------------------------------------------------------------------------------------------

GIVEN = {
    "true": True, "on": True, "yes": True, "false": False, "off": False, "auto": "auto", "Auto": "auto",
    "40GiB": "40GiB", "512 MB": "512 MB",
}  # fmt: skip


def test_flags_files_and_values_of_scripts(tmp_path: Path) -> None:
    words = ["--model_name_or_path", "m", "--dataset_name", "d"]
    for text, meant in GIVEN.items():
        assert parse([*words, "--gradient_checkpointing", text]).config.gradient_checkpointing == meant
        assert SFTConfig(gradient_checkpointing=text).gradient_checkpointing == meant
        (tmp_path / "run.yaml").write_text(f"gradient_checkpointing: {text}\n")
        assert parse([str(tmp_path / "run.yaml"), *words]).config.gradient_checkpointing == meant
        arguments = TrainingArguments(output_dir=str(tmp_path), gradient_checkpointing=text, use_cpu=True)
        assert config_of(arguments)[0].gradient_checkpointing == meant
    for flags, meant in (
        (["--gradient_checkpointing"], True), (["--gradient_checkpointing", "--bf16"], True),
        (["--gradient-checkpointing=auto"], "auto"), (["--no_gradient_checkpointing"], False), ([], False),
    ):  # fmt: skip
        assert parse([*words, *flags]).config.gradient_checkpointing == meant
    for value, budget in ((True, None), (False, None), ("auto", "auto"), ("1.5GiB", 3 * 2**29), ("512MB", 512 * 10**6)):
        assert SFTConfig(gradient_checkpointing=value).activation_budget == budget


@pytest.mark.parametrize("wrong", ["40", "40G", "GiB", "-1GiB", "0GiB", "most", 40])
def test_what_is_no_size(wrong: Any) -> None:
    with pytest.raises(
        ConfigError, match="gradient_checkpointing: expected true, false, auto, or a size such as 40GiB"
    ):
        SFTConfig(gradient_checkpointing=wrong)
    with pytest.raises(ConfigError, match="--gradient_checkpointing: expected true, false, auto, or a size"):
        parse(
            ["--gradient_checkpointing", str(wrong)] if str(wrong)[0] != "-" else [f"--gradient_checkpointing={wrong}"]
        )


def test_sizes() -> None:
    for text, meant in (("1B", 1), ("2 kB", 2000), ("2KiB", 2048), ("1.5mib", 3 * 2**19), ("3 TB", 3 * 10**12)):
        assert parse_size(text) == meant
    for text in ("", "7", "7 GiBs", "1e3GB", "1,5GB", "GB"):
        with pytest.raises(ValueError, match="no size with its unit"):
            parse_size(text)


def test_the_launcher_s_activation_checkpointing_excludes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    launched, fsdp = EngineSettings(activation_checkpointing=True), {"activation_checkpointing": True}
    for value in (True, "auto", "4GiB"):
        with pytest.raises(ConfigError, match=f"gradient_checkpointing is {value}, and activation_checkpointing is on"):
            sharding_settings(SFTConfig(gradient_checkpointing=value), launched, [])
        config = SFTConfig(gradient_checkpointing=value, fsdp="full_shard", fsdp_config=fsdp)
        with pytest.raises(ConfigError, match="Keep one of them"):
            sharding_settings(config, None, [])
    assert sharding_settings(SFTConfig(gradient_checkpointing=False), launched, []).activation_checkpointing
    for name, value in launched.to_environment().items():  # as `accelerate launch` passes its file on
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="Keep one of them"):
        sharding_settings(SFTConfig(gradient_checkpointing="auto"), None, [])


# --- runs with memory that is pretended -----------------------------------------------------------------------------

REST, BESIDES = 100_000, 20_000
KEPT = {Level.KEEP_ALL: 54_000, Level.RECOMPUTE_MLP: 34_000, Level.RECOMPUTE: 4_000, Level.OFFLOAD: 0}


class Pretended(DeviceMemory):
    """As much memory as a test says. A step takes what layers keep, all of one layer, and something besides."""

    total_bytes = 10**9
    more: Any = staticmethod(lambda budget: 0)
    """What else a step takes."""
    budget: Any = None

    def in_use(self) -> int:
        return REST

    def mark(self) -> None:
        pass

    def peak(self) -> int:
        taken = peak_of({0: KEPT}, [0] * len(self.budget.levels), self.budget.levels)
        return REST + BESIDES + int(taken) + self.more(self.budget)

    def total(self) -> int:
        return self.total_bytes

    def limit(self) -> int:
        return self.total_bytes


class PretendedMeter(LayerMeter):
    """Measures what a layer keeps, and reports what `Pretended` takes for it."""

    def stop(self) -> None:
        super().stop()
        assert self.kept >= self.input > 0
        self.kept, self.input = KEPT[vars(self.layer)[VARIANT]], KEPT[Level.RECOMPUTE]


def pretend(patch: pytest.MonkeyPatch) -> None:
    begin = activation_budget.ActivationBudget.__init__

    def with_memory(self: Any, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        self.memory.budget = self

    patch.setattr(activation_budget, "DeviceMemory", Pretended)
    patch.setattr(activation_budget, "LayerMeter", PretendedMeter)
    patch.setattr(activation_budget.ActivationBudget, "__init__", with_memory)


def run(folder: Path, name: Any, model: Any = None, **changes: Any) -> Any:
    """A run of a few steps with dropout, whose layers keep what `name` says."""
    given = {
        "max_steps": 6,
        "max_length": 16,
        "use_peft_lora": True,
        "lora_dropout": 0.2,
        "lora_target_modules": "all-linear",
    }
    config = settings(folder / str(name), gradient_checkpointing=name, **{**given, **changes})
    return train(model if model is not None else make_model(num_hidden_layers=4), config)


@ranks(1, 2, slow=[1])
def test_numbers_do_not_depend_on_what_is_kept(world_size: int, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        pretend(patch)
        batch: dict[str, Any] = {**global_batch(world_size, 4), "max_steps": 5}
        plain = losses(run(tmp_path, False, **batch))
        for name in ("auto", "250kB"):
            trainer = run(tmp_path, name, **batch)
            assert losses(trainer) == plain, name
            found = trainer.loop.activations
            assert found.chosen and found.predicted == found.memory.peak()
            assert found.levels.count(Level.KEEP_ALL) == (4 if name == "auto" else 2)


KINDS = {
    "packed": {"packing": True, "max_seq_len": 32},
    "reentrant": {"use_reentrant": True},
    "full": {"use_peft_lora": False},
    "accumulated": {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2, "sync_each_batch": False},
    "offloaded": {"activation_offloading": True},
    "parameters on the host": {"fsdp": "full_shard offload"},
    "one unit": {"fsdp_config": {"auto_wrap_policy": "NO_WRAP"}, "fsdp": "full_shard"},
    "eager attention": {"attn_implementation": "eager"},
}


@pytest.mark.slow
@ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_run(kind: str, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        pretend(patch)
        of = {}
        for name in (True, "250kB", "auto"):
            of[name] = run(tmp_path, name, **KINDS[kind])
        assert losses(of[True]) == losses(of["250kB"]) == losses(of["auto"])
        assert set(of["auto"].loop.activations.levels) == {Level.KEEP_ALL}


@pytest.mark.slow
@ranks(2)
def test_four_bits(tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128}
    with pytest.MonkeyPatch.context() as patch:
        pretend(patch)
        found = [losses(run(tmp_path, name, make_model(**shape), **FOUR_BITS)) for name in (True, "250kB", "auto")]
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
@ranks(2)
def test_ranks_choose_alike_by_the_one_with_the_least_memory(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        pretend(patch)
        patch.setattr(Pretended, "total_bytes", 330_000 if runtime.rank() else 10**9)
        patch.setattr(host_memory, "MARGIN", 0.0)
        levels = run(tmp_path, "auto", max_steps=4).loop.activations.levels
    assert Level.KEEP_ALL in levels and levels[0] != Level.KEEP_ALL
    assert exchange(levels, "levels")[0] == levels


@pytest.mark.slow
@ranks(1)
def test_a_choice_is_corrected_by_the_peak_that_it_leads_to(tmp_path: Path) -> None:
    """First more memory is taken than was measured, then less: steps in which layers are compiled take more."""
    with pytest.MonkeyPatch.context() as patch:
        pretend(patch)
        patch.setattr(
            Pretended, "more", staticmethod(lambda budget: 30_000 * (budget.levels.count(Level.KEEP_ALL) > 1))
        )
        found = run(tmp_path, "250kB", max_steps=8).loop.activations
        assert found.levels == [Level.RECOMPUTE] * 2 + [Level.RECOMPUTE_MLP, Level.KEEP_ALL]
        assert found.memory.peak() <= found.predicted <= 250_000
        patch.setattr(Pretended, "more", staticmethod(lambda budget: 50_000 * (not budget.chosen)))
        found = run(tmp_path, "260kB", max_steps=8).loop.activations
        assert found.levels.count(Level.KEEP_ALL) == 2 and found.predicted == found.memory.peak()


def planned(limit: float, besides: int = BESIDES, rest: int = REST) -> LevelChoice[int]:
    """What a plan would say of `Pretended`."""
    sizes = {0: {level: float(size) for level, size in KEPT.items() if level < Level.OFFLOAD}}
    costs = {0: {Level.KEEP_ALL: 0.0, Level.RECOMPUTE_MLP: 4.0, Level.RECOMPUTE: 6.0}}
    return LevelChoice(
        [0] * 4, sizes, costs, full_checkpointing(4, False),
        lambda levels: rest + besides + peak_of(sizes, [0] * 4, levels), limit, rest,
    )  # fmt: skip


def begin_with(patch: pytest.MonkeyPatch, choice: LevelChoice[int], counts: bool = True) -> list[list[Level]]:
    """Let runs begin with a plan; returns the levels that are set, first to last."""
    pretend(patch)
    begin, set_levels = activation_budget.ActivationBudget.__init__, activation_budget.ActivationBudget._set
    seen: list[list[Level]] = []

    def with_plan(self: Any, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        seen.clear()
        self.begin(choice if runtime.rank() == 0 else None)

    def noted(self: Any, levels: Any) -> list[Level]:
        seen.append(list(levels))
        return set_levels(self, levels)

    patch.setattr(activation_budget.ActivationBudget, "_set", noted)
    patch.setattr(activation_budget.ActivationBudget, "__init__", with_plan)
    patch.setattr(Pretended, "counts_tensors", counts)
    return seen


KEEP, MLP, LAYER = Level.KEEP_ALL, Level.RECOMPUTE_MLP, Level.RECOMPUTE


@ranks(1, 2, slow=(2,))
def test_a_plan_that_is_right_is_kept(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        seen = begin_with(patch, planned(REST + BESIDES + 120_000))
        found = run(tmp_path, "auto").loop.activations
    assert seen == [[LAYER, LAYER, KEEP, KEEP]] and found.is_settled
    assert found.predicted == found.memory.peak() == REST + BESIDES + 116_000


@ranks(1, 2, slow=(2,))
@pytest.mark.parametrize("wrong", [60_000, pytest.param(-60_000, marks=pytest.mark.slow)])
def test_a_plan_that_is_wrong_is_corrected_by_the_peak(wrong: int, tmp_path: Path) -> None:
    """Too much: after the first step, before the next one could run out of memory. Too little: once that is checked."""
    limit = REST + BESIDES + 200_000
    with pytest.MonkeyPatch.context() as patch:
        seen = begin_with(patch, planned(limit, besides=BESIDES - wrong))
        found = run(tmp_path, "auto", max_steps=8).loop.activations
    assert seen == [[KEEP] * 4 if wrong > 0 else [LAYER, LAYER, KEEP, KEEP], [MLP, KEEP, KEEP, KEEP]]
    assert found.levels == seen[-1] and found.is_settled
    assert found.predicted == found.memory.peak() <= limit


@ranks(1)
def test_memory_of_the_process_says_nothing_about_a_plan(tmp_path: Path) -> None:
    """On CPUs torch does not count its memory: the plan holds."""
    with pytest.MonkeyPatch.context() as patch:
        seen = begin_with(patch, planned(REST + BESIDES + 120_000, besides=BESIDES - 9_000), counts=False)
        found = run(tmp_path, "auto", max_steps=4).loop.activations
    assert len(seen) == 1 and found.is_settled


@ranks(1)
def test_a_choice_is_resumed_rather_than_a_plan(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 4}
    with pytest.MonkeyPatch.context() as patch:
        begin_with(patch, planned(REST + BESIDES + 200_000, besides=BESIDES - 60_000))
        first = run(tmp_path, "auto", max_steps=4, **saving).loop.activations
        seen = begin_with(patch, planned(REST + BESIDES + 200_000, besides=BESIDES - 60_000))
        second = run(tmp_path, "auto", max_steps=6, resume=True, overwrite=False, **saving).loop.activations
    assert first.levels == second.levels == seen[-1] and first.predicted == second.predicted and second.is_settled


# --- resuming -------------------------------------------------------------------------------------------------------


@ranks(1)
def test_the_prediction_counts_the_copies_that_are_kept(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        pretend(patch)
        plain, casting = (run(tmp_path / str(bf16), "auto", bf16=bf16).loop.activations for bf16 in (False, True))
    copies = casting.model.meter.live
    assert copies > 0 and casting.predicted == plain.predicted + copies


@ranks(1)
def test_a_resumed_run_keeps_the_copies_too(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        pretend(patch)
        saving = {"bf16": True, "save_strategy": "steps"}
        first = run(tmp_path, "auto", max_steps=8, save_steps=8, **saving).loop.activations
        second = run(tmp_path, "auto", max_steps=10, save_steps=10, resume=True, overwrite=False, **saving)
    found = second.loop.activations
    assert not found.measured.kept and found.copies == first.copies == second.model.meter.live > 0


@ranks(1)
def test_the_choice_is_resumed(tmp_path: Path) -> None:
    said: list[str] = []

    def part(steps: int, **changes: Any) -> Any:
        config = settings(
            tmp_path, gradient_checkpointing="250kB", max_steps=steps, save_strategy="steps", save_steps=4, seed=3,
            **changes,
        )  # fmt: skip
        made = make_model(num_hidden_layers=4)
        trainer = SFTTrainer(model=made, args=config, train_dataset=text_rows(60), tokenizer=make_tokenizer())
        say = trainer.reporter.say if hasattr(trainer, "reporter") else None
        trainer.train()
        return trainer, say

    with pytest.MonkeyPatch.context() as patch:
        pretend(patch)
        begin = activation_budget.ActivationBudget.__init__

        def listening(self: Any, layers: Any, budget: Any, largest: Any, model: Any, say: Any, **options: Any) -> None:
            begin(self, layers, budget, largest, model, said.append, **options)

        patch.setattr(activation_budget.ActivationBudget, "__init__", listening)
        first, _ = part(4)
        chosen = first.loop.activations
        assert chosen.chosen and said == [f"activations: {chosen.describe()}."]
        said.clear()
        second, _ = part(6, resume=True)
        assert second.loop.activations.levels == chosen.levels and not second.loop.activations.measured.kept
        assert said == [f"activations: as before: {chosen.describe()}."]
        said.clear()
        part(10, resume=True, per_device_train_batch_size=4)
        assert said[0].startswith("activations: chosen anew") and len(said) == 2


# --- memory that runs out -------------------------------------------------------------------------------------------


@ranks(1)
@pytest.mark.parametrize("sync", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("where", [pytest.param("forward", marks=pytest.mark.slow), "backward"])
def test_a_step_that_runs_out_of_memory_is_repeated(where: str, sync: bool, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        pretend(patch)
        batch = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "sync_each_batch": sync}
        plain = losses(run(tmp_path, False, **batch))
        made, calls = make_model(num_hidden_layers=4), []

        def fails(*_: Any) -> None:
            calls.append(1)
            if len(calls) == 8:  # the second micro-batch of the fourth step
                raise torch.OutOfMemoryError("as on a GPU")

        layer = made.model.layers[1]
        if where == "forward":
            layer.register_forward_hook(fails)
        else:
            layer.register_forward_hook(
                lambda m, i, o: (o[0] if isinstance(o, tuple) else o).register_hook(fails) and None
            )
        trainer = run(tmp_path, "auto", made, **batch)
        assert losses(trainer) == plain and len(calls) > 8
        assert trainer.loop.activations.levels == full_checkpointing(4, False)


@pytest.mark.slow
@ranks(1)
def test_memory_that_runs_out_with_everything_recomputed_is_an_error(tmp_path: Path) -> None:
    made = make_model()
    made.model.layers[1].register_forward_hook(lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("as on a GPU")))
    with pytest.raises(torch.OutOfMemoryError):
        run(tmp_path, "auto", made)


# --- the largest batch ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@ranks(1)
def test_the_largest_batch_of_the_data(tmp_path: Path) -> None:
    def largest(**changes: Any) -> BatchShape | None:
        trainer = SFTTrainer(
            model=make_model(), args=settings(tmp_path, per_device_train_batch_size=3, **changes),
            train_dataset=text_rows(40), tokenizer=make_tokenizer(),
        )  # fmt: skip
        steps = trainer._step.train_steps()
        found = largest_in_data(trainer.args, steps)
        shapes = [b["input_ids"].shape for step in steps.steps(0, 2 * steps.steps_per_epoch) for b in step.batches]
        assert found is not None and max(rows * length for rows, length in shapes) <= found.tokens
        assert changes.get("padding_free") or max(rows * length for rows, length in shapes) == found.tokens
        return found

    padded = largest()
    assert padded is not None and padded.tokens == 3 * padded.length and padded.length % 8 == 0
    assert largest(packing=True) == BatchShape(3, 48, packed=True)
    assert largest(pad_to_multiple_of=16).length % 16 == 0
    step = dataclasses.make_dataclass("Step", ["batches"])([{"input_ids": torch.zeros(2, 8)}])
    assert BatchShape(2, 32).scale(step) == 4 and BatchShape(2, 32).scale(step, quadratic=True) == 16
    assert BatchShape(1, 8).scale(step) == 1


@pytest.mark.slow
@ranks(1)
def test_batches_of_unknown_length_are_recomputed(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        pretend(patch)
        rows = [{"input_ids": [3, 4, 5]}] * 8
        config = settings(tmp_path, gradient_checkpointing="auto", max_steps=2)

        def collate(given: Any) -> Any:
            ids = torch.tensor([row["input_ids"] for row in given])
            return {"input_ids": ids, "labels": ids.clone()}

        trainer = train(make_model(), config, rows, data_collator=collate)
    assert trainer.loop.activations.levels == [Level.RECOMPUTE] * 2
    assert Collator(0).padded(9) == 16 and np.isfinite(losses(trainer)).all()
