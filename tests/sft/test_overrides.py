"""Subclasses of the trainer: what they override is called, with transformers' arguments, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import Trainer, get_scheduler

from fullshard.config.errors import ConfigError
from fullshard.distributed import runtime
from fullshard.distributed.ranks import exchange
from fullshard.sft.overrides import METHODS, NOT_CALLED
from fullshard.sft.trainer import SFTTrainer
from tests.data.tiny import make_tokenizer, text_rows
from tests.pool import ranks
from tests.sft.runs import global_batch, losses, plain_losses, settings
from tests.sft.tiny import make_model

# --- names ----------------------------------------------------------------------------------------------------------


def check_names(names: list[str]) -> None:
    known = METHODS.keys() | NOT_CALLED.keys()
    assert not [name for name in names if name not in known], "neither called, nor offered, nor refused"
    for name in names:
        if name in NOT_CALLED and not hasattr(SFTTrainer, name):
            with pytest.raises(AttributeError, match=f"has no {name}, which transformers' trainer has: "):
                getattr(SFTTrainer.__new__(SFTTrainer), name)
        elif name != "_tag_names":
            assert hasattr(SFTTrainer, name), name


def test_every_name_of_transformers_trainer_is_served_or_refused() -> None:
    check_names([name for name in dir(Trainer) if not name.startswith("__")])


def test_every_name_of_trl_s_trainer_is_served_or_refused() -> None:
    import trl

    check_names([name for name in dir(trl.SFTTrainer) if not name.startswith("__")])


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("_inner_training_loop", "would have no effect; override training_step, evaluate or log, or use callbacks"),
        ("_prepare_dataset", "give rows with input_ids and labels"),
        ("_train", "fullshard's trainer uses this name itself; choose another"),
    ],
)
def test_what_would_not_be_called_is_refused_with_the_class(name: str, advice: str) -> None:
    with pytest.raises(ConfigError, match=rf"Mine\.{name}: .*{advice}"):
        type("Mine", (SFTTrainer,), {name: lambda self: None})


# --- what is called -------------------------------------------------------------------------------------------------


def run(folder: Path, kind: type[SFTTrainer] = SFTTrainer, rows: Any = None, **more: Any) -> Any:
    changes = more.pop("settings", {})
    config = settings(folder, **{"max_steps": 5, "eval_strategy": "steps", "eval_steps": 5, **changes})
    return kind(
        model=make_model(), args=config, train_dataset=rows or text_rows(30), eval_dataset=text_rows(7, seed=5),
        processing_class=make_tokenizer(), **more,
    )  # fmt: skip


@ranks(2)
def test_overridden_methods_are_called_and_inherit_the_engine_s_work(tmp_path: Path) -> None:
    """A class that overrides everything and calls what it inherits trains as one that overrides nothing."""
    called: set[str] = set()

    def calling(name: str) -> Any:
        def method(self: Any, *args: Any, **options: Any) -> Any:
            called.add(name)
            return getattr(super(Mine, self), name)(*args, **options)

        return method

    names = {name for name, method in METHODS.items() if method.called} - {
        "__init__",
        "_tag_names",
        "loss_is_scaled_for_ga",
        "call_model_init",
        "get_test_dataloader",
        "predict",
    }
    Mine = type("Mine", (SFTTrainer,), {name: calling(name) for name in names})
    changes = {"save_strategy": "steps", "save_steps": 5, "load_best_model_at_end": True, **global_batch(2)}
    usual, mine = run(tmp_path / "usual", settings=changes), run(tmp_path / "mine", Mine, settings=changes)
    for each in (usual, mine):
        each.train()
        each.save_model()
    assert called == names
    timed = ("_per_second", "runtime", "memory_gib", "total_flos")
    for record, other in zip(mine.state.log_history, usual.state.log_history, strict=True):
        kept = [name for name in record if not name.endswith(timed)]
        assert {n: record[n] for n in kept} == pytest.approx({n: other[n] for n in kept}, abs=1e-5)
    assert mine.state.total_flos <= usual.state.total_flos, "rows are not padded to a multiple of 8"


class OwnLoss(SFTTrainer):
    """A loss of its own, divided by the trained tokens of all ranks, as transformers' documentation has it."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        assert {"input_ids", "attention_mask", "labels"} == inputs.keys()
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        labels = inputs["labels"][:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels, reduction="sum")
        if num_items_in_batch is None:
            return (loss / (labels != -100).sum(), outputs) if return_outputs else loss / (labels != -100).sum()
        loss = loss / num_items_in_batch * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss


def loss_of_outputs(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    logits, labels = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    return loss / (num_items_in_batch if num_items_in_batch is not None else (labels != -100).sum())


@ranks(2)
@pytest.mark.parametrize("way", ["compute_loss", pytest.param("compute_loss_func", marks=pytest.mark.slow)])
def test_a_loss_of_the_script_s_own_trains_as_on_one_device(way: str, tmp_path: Path) -> None:
    """The last step of an epoch has two rows for four micro-batches: some are empty."""
    kind = OwnLoss if way == "compute_loss" else SFTTrainer
    more = {} if way == "compute_loss" else {"compute_loss_func": loss_of_outputs}
    changes = {"lr_scheduler_type": "constant", "weight_decay": 0.0, **global_batch(2)}
    made = run(tmp_path, kind, text_rows(18), settings=changes, **more)
    evaluated = made.evaluate()["eval_loss"]
    made.train()
    other = make_model()
    optimizer = torch.optim.AdamW(other.parameters(), lr=made.args.learning_rate, weight_decay=0.0)
    schedule = get_scheduler("constant", optimizer)
    order = made.loop.loader.sampler.order
    assert len(order.step(2)) == 2
    expected = plain_losses(other, optimizer, schedule, made.parts.train, order, made.args)
    assert losses(made) == pytest.approx(expected, abs=1e-5)
    assert evaluated == pytest.approx(run(tmp_path / "usual").evaluate()["eval_loss"], abs=1e-5)


@pytest.mark.slow
@ranks(2)
def test_optimizers_schedulers_and_loaders_of_the_script_s_own(tmp_path: Path) -> None:
    """The same run three times: by settings, with objects made before, and in overridden methods."""
    changes: dict[str, Any] = {
        "lr_scheduler_type": "cosine", "warmup_steps": 2, "optim": "adamw_torch", "weight_decay": 0.0,
        "train_sampling_strategy": "sequential", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
    }  # fmt: skip
    usual = run(tmp_path / "usual", settings=changes)
    usual.train()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    given = SFTTrainer(
        model=model, args=settings(tmp_path / "given", max_steps=5, **changes), train_dataset=text_rows(30),
        tokenizer=make_tokenizer(), optimizers=(optimizer, get_scheduler("cosine", optimizer, 2, 5)),
    )  # fmt: skip
    given.train()

    class Mine(SFTTrainer):
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-3, weight_decay=0.0)
            return self.optimizer

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            self.lr_scheduler = get_scheduler("cosine", self.optimizer, 2, num_training_steps)
            return self.lr_scheduler

        def get_train_dataloader(self) -> Any:
            rows = super().get_train_dataloader()
            return DataLoader(range(30), 2, collate_fn=lambda numbers: rows.collate_fn(rows.dataset, numbers))

    mine = run(tmp_path / "mine", Mine, settings=changes)
    mine.train()
    for each in (given, mine):
        assert losses(each) == pytest.approx(losses(usual), abs=1e-5)
        for name in ("learning_rate", "num_tokens", "epoch"):
            found, expected = ([r[name] for r in t.state.log_history if "loss" in r] for t in (each, usual))
            assert found == pytest.approx(expected), name
    assert mine.get_learning_rates() == [0.0] and mine.get_num_trainable_parameters() == make_model().num_parameters()


@pytest.mark.slow
@ranks(1)
def test_a_scheduler_is_resumed(tmp_path: Path) -> None:
    def made(name: str) -> SFTTrainer:
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        config = settings(tmp_path / name, max_steps=6, save_strategy="steps", save_steps=3)
        return SFTTrainer(
            model=model, args=config, train_dataset=text_rows(30), tokenizer=make_tokenizer(),
            optimizers=(optimizer, get_scheduler("linear", optimizer, 0, 6)),
        )  # fmt: skip

    whole, resumed = made("whole"), made("resumed")
    whole.train()
    resumed.train(str(tmp_path / "whole" / "out" / "checkpoints" / "step-3"))
    assert losses(resumed) == losses(whole)[3:]
    rates = [[r["learning_rate"] for r in t.state.log_history if "loss" in r] for t in (whole, resumed)]
    assert rates[0][3:] == rates[1] and rates[0][-1] == pytest.approx(5e-3 / 6)


@ranks(1)
def test_a_second_training_starts_again_with_the_trained_model(tmp_path: Path) -> None:
    made = run(tmp_path, settings={"save_strategy": "steps", "save_steps": 5})
    first = made.train()
    history = made.state.log_history
    second = made.train()
    assert (first.global_step, second.global_step) == (5, 5) and made.state.log_history is not history
    assert [r["step"] for r in made.state.log_history if "loss" in r] == [1, 2, 3, 4, 5]
    rates = [[r["learning_rate"] for r in each if "loss" in r] for each in (history, made.state.log_history)]
    assert rates[0] == rates[1] and second.training_loss < first.training_loss - 0.5
    assert exchange(made.loop.progress.step, "")[0] == 5 == made.state.global_step and runtime.is_main()
