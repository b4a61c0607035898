"""What a run leaves behind: the model or adapter for transformers and peft, card, report, and the closing table."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from fullshard import runtime
from fullshard.errors import WeightsError
from fullshard.fsdp.state_dict import whole_value
from fullshard.lora.adapter_config import CONFIG, FIRST, WEIGHTS, read_config
from fullshard.lora.plain_lora import make_plain
from fullshard.lora.virtual_tokens import as_file, encoders, is_prompt
from fullshard.models.inner_model import causal
from fullshard.paths import replaced_files, save_tokenizer
from fullshard.ranks import on_rank_0
from fullshard.reporting.html_report import write_report
from fullshard.reporting.model_card import write_card
from fullshard.reporting.records import METRICS_FILE
from fullshard.train.config import SFTConfig
from fullshard.train.model import local_folder
from fullshard.train.run_dir import CHECKPOINTS, place_of
from fullshard.version import library_versions
from fullshard.weights.adapter_base import lasting_name, write_record
from fullshard.weights.adapter_files import names_in_files
from fullshard.weights.export import save_pretrained
from fullshard.weights.source_files import base_of

if TYPE_CHECKING:
    from fullshard.train.assemble import Parts
    from fullshard.train.trainer import SFTTrainer

REPORT = "report.html"


def export(model: Any, parts: Parts, config: SFTConfig, place: Path) -> None:
    """Write the model or the adapter, and the tokenizer. All ranks must call it."""
    dtype = None if config.save_dtype == "auto" else getattr(torch, config.save_dtype)
    if hasattr(model, "peft_config"):
        keep_first(model, parts, config)
        export_adapter(model, place, dtype, parts.tables, parts.first)
        on_rank_0(lambda: save_tokenizer(parts.tokenizer, place), "export")
    else:
        dtype = dtype or getattr(model.config, "dtype", None)
        save_pretrained(model, place, dtype=dtype, tokenizer=parts.tokenizer, progress=False)


def keep_first(model: Any, parts: Parts, config: SFTConfig) -> None:
    """Write down what an adapter begins with that was taken out of the weights. All ranks must call it, before the
    adapter trains."""
    if parts.takes_from_weights and parts.first is None:
        place = place_of(config) / FIRST
        export_adapter(model, place)
        parts.first = place


def export_adapter(
    model: Any, place: Path, dtype: torch.dtype | None = None, tables: bool = False, first: Path | None = None
) -> None:
    """Write the adapter as PEFT does, gathering nothing else; read it back before it takes its place.

    With `tables` embedding and head are written with it, whole. One that began as `first`, taken out of the weights, is
    written as plain LoRA.
    """
    names = set(model.peft_config)
    whole_tables = {n for a in names for n in names_in_files(model, a)[1].values()} if tables else set()
    values: dict[str, torch.Tensor] = {}
    for unit in model._fullshard_engine.units:
        for p in unit.parameters:
            if names & set(p.plan.name.split(".")) or whole_tables & set(p.plan.names):
                whole = whole_value(p)
                if runtime.is_main():
                    values[p.plan.name] = whole.detach().cpu().to(dtype or whole.dtype).clone()
    shared = dict(model.named_buffers(remove_duplicate=False))
    for name in {name for adapter in names for name in names_in_files(model, adapter)[0].values()} & shared.keys():
        values[name] = shared[name].cpu().to(dtype or shared[name].dtype).clone()

    def write() -> None:
        with replaced_files(place) as part:
            if is_prompt(model):
                _write_prompt(model, part, values)
            else:
                type(model)._fullshard_plain.save_pretrained(
                    model, str(part), state_dict=dict(values), save_embedding_layers=tables
                )
                _check_adapter(list(part.rglob("*.safetensors")), values)
            if first is not None:
                make_plain(part, first)
            for file in part.rglob(CONFIG):
                _name_base(file.parent, model)
            for card in part.rglob("README.md"):  # PEFT's; `reporting/model_card.py` writes the run's
                card.unlink()

    on_rank_0(write, "export")


def _name_base(folder: Path, model: Any) -> None:
    """Have an adapter's files name the base so that it is found from any folder, and known from others."""
    name, base = read_config(folder).get("base_model_name_or_path"), base_of(model)
    if base is not None:
        write_record(folder, name or base.path, (base.path, base.fingerprint))
    elif name:
        write_record(folder, name)


def _write_prompt(model: Any, folder: Path, values: dict[str, torch.Tensor]) -> None:
    """A prompt's files hold what its encoder gives, not the encoder."""
    for adapter, encoder in encoders(model).items():
        start, config = f"prompt_encoder.{adapter}.", model.peft_config[adapter]
        own = {name.removeprefix(start): value.float() for name, value in values.items() if name.startswith(start)}
        dtype = values[f"{start}embedding.weight"].dtype
        table = {name: value.to(dtype) for name, value in as_file(encoder, own).items()}
        save_file(table, folder / WEIGHTS, metadata={"format": "pt"})
        config.base_model_name_or_path = config.base_model_name_or_path or local_folder(causal(model))
        written = copy.copy(config)
        written.inference_mode = True
        written.save_pretrained(folder)
        assert (folder / CONFIG).is_file()


def _check_adapter(files: list[Path], values: dict[str, torch.Tensor]) -> None:
    """Every value that was gathered must be in the files, as it is."""
    there = [tensor for file in files for tensor in load_file(file).values()]
    for name, value in values.items():
        if not any(t.shape == value.shape and t.dtype == value.dtype and torch.equal(t, value) for t in there):
            raise WeightsError(f"the adapter's files do not hold {name} as it was gathered; nothing was kept.")


def describe(trainer: SFTTrainer, place: Path) -> None:
    """Write card and report, and upload if asked to; the first rank alone."""
    if not runtime.is_main():
        return
    config, progress = trainer.args, trainer.loop.progress
    metrics = final_metrics(trainer)
    base = trainer.parts.base or local_folder(causal(trainer.model))
    facts = {
        "base": lasting_name(base) if base else None,
        "adapter": hasattr(trainer.model, "peft_config"),
        "data": config.dataset_name or "data of the user's own",
        "steps": progress.step,
        "ranks": runtime.world_size(),
        "metrics": metrics,
        "versions": library_versions(),
    }
    write_card(place, config.run_name, config.changed(), facts)
    shown = {
        "steps": progress.step,
        "tokens": progress.tokens,
        "ranks": runtime.world_size(),
        **metrics,
        **library_versions(),
    }
    history, answers = trainer.state.log_history, trainer.loop.reporter.answers
    write_report(place / REPORT, config.run_name, config.changed(), history, shown, answers)
    if trainer.hub is not None:
        trainer.hub.push(place)


def final_metrics(trainer: SFTTrainer) -> dict[str, float]:
    """The mean loss of all steps, and the last value of each number that was logged."""
    wanted = ("loss", "mean_token_accuracy", "eval_loss", "eval_mean_token_accuracy", "tokens_per_second", "memory_gib")
    progress = trainer.loop.progress
    found: dict[str, float] = {"train_loss": progress.mean_loss} if progress.loss_steps else {}
    for record in trainer.state.log_history:
        found |= {name: record[name] for name in wanted if record.get(name) is not None}
    return found


def _final_rows(trainer: SFTTrainer) -> dict[str, str]:
    """The last numbers in words: of what each is the mean, and of which step."""
    progress, metrics, logged = trainer.loop.progress, final_metrics(trainer), trainer.loop.logged_steps
    evaluated = [record["step"] for record in trainer.state.log_history if "eval_loss" in record]
    every = f"all {progress.loss_steps:,}" if progress.loss_steps == progress.step else f"{progress.loss_steps:,}"
    last = "of the last step" if logged == 1 else f"mean of the last {logged:,} steps"
    evaluation = f"at step {evaluated[-1]:,}" if evaluated else ""
    rows = {
        "train_loss": ("training loss", "{:.4f}", f"mean of {every} steps"),
        "loss": ("", "{:.4f}", last),
        "mean_token_accuracy": ("token accuracy", "{:.4f}", last),
        "eval_loss": ("evaluation loss", "{:.4f}", evaluation),
        "eval_mean_token_accuracy": ("evaluation accuracy", "{:.4f}", evaluation),
        "tokens_per_second": ("tokens per second", "{:,.0f}", last),
        "memory_gib": ("memory", "{:.2f} GiB", "at most, on the first rank"),
    }
    if not logged:  # nothing was trained
        metrics = {name: value for name, value in metrics.items() if name.startswith("eval_")}
    elif logged == progress.loss_steps:
        metrics.pop("loss", None)  # the line above it says the same
    return {name: f"{form.format(metrics[key])}  {what}" for key, (name, form, what) in rows.items() if key in metrics}


def show(trainer: SFTTrainer) -> None:
    """The closing table, and where everything is."""
    reporter = trainer.loop.reporter
    if not runtime.is_main() or reporter.mode in ("quiet", "json"):
        return
    place, progress = place_of(trainer.args), trainer.loop.progress
    kind = "adapter" if hasattr(trainer.model, "peft_config") else "model"
    rows = {
        "steps": f"{progress.step:,}" + (f" ({progress.skipped} left out)" if progress.skipped else ""),
        "tokens": f"{progress.tokens:,}",
        **_final_rows(trainer),
        f"{kind}, tokenizer, card": str(place),
        **({"checkpoints": str(place / CHECKPOINTS)} if (place / CHECKPOINTS).is_dir() else {}),
        "metrics": str(place / METRICS_FILE),
        "report": str(place / REPORT),
        "talk to it": f"fullshard chat {place}",
    }
    width = max(map(len, rows))
    for name, value in rows.items():  # plain lines: a path must not be cut to the width of a terminal
        print(f"{name:<{width}}  {value}", flush=True)
