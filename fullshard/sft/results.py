"""The results of a run: the model or adapter for transformers and PEFT, model card, report, and the closing table."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from fullshard.config.errors import WeightsError
from fullshard.config.paths import replaced_files, save_tokenizer
from fullshard.distributed import runtime
from fullshard.distributed.ranks import on_rank_0
from fullshard.distributed.terminal_text import print_text
from fullshard.lora.adapter_config import CONFIG, FIRST, WEIGHTS, read_config
from fullshard.lora.plain_lora import make_plain
from fullshard.lora.virtual_tokens import encoders, export_tensors, is_prompt
from fullshard.models.causal_lm import get_causal_lm
from fullshard.report.html_report import write_report
from fullshard.report.loggers import attempt
from fullshard.report.records import METRICS_FILE, REPORT_FILE
from fullshard.report.run_summary import write_card
from fullshard.sft.base_model import local_folder
from fullshard.sft.output_dir import CHECKPOINTS, output_path
from fullshard.sft.sft_config import SFTConfig
from fullshard.sft.training_state import Progress
from fullshard.version import library_versions
from fullshard.weights.adapter_base import lasting_name, write_record
from fullshard.weights.adapter_files import names_in_files
from fullshard.weights.export import save_pretrained
from fullshard.weights.source_files import base_of
from fullshard.weights.wrapped import whole_value, wrapped


class ResultWriter:
    """Writes the trained model, or the adapter, of one run."""

    def __init__(
        self, config: SFTConfig, model: Any, tokenizer: Any, tables: bool, from_weights: bool, first: Path | None
    ) -> None:
        self.config, self.model, self.tokenizer = config, model, tokenizer
        self.tables = tables
        """Whether embedding and output head are written with the adapter, because those of its base differ."""
        self.from_weights = from_weights
        """Whether the adapter was initialized from the base weights (PiSSA, OLoRA)."""
        self.first = first
        """The folder of such an adapter's initial values; None until they are written."""

    def export(self, place: Path) -> None:
        """Write the model or the adapter, and the tokenizer. All ranks must call it."""
        model, config = self.model, self.config
        dtype = None if config.save_dtype == "auto" else getattr(torch, config.save_dtype)
        if hasattr(model, "peft_config"):
            self.keep_first()
            export_adapter(model, place, dtype, self.tables, self.first)
            on_rank_0(lambda: save_tokenizer(self.tokenizer, place), "export")
        else:
            dtype = dtype or getattr(model.config, "dtype", None)
            save_pretrained(model, place, dtype=dtype, tokenizer=self.tokenizer, progress=False)

    def keep_first(self) -> None:
        """Write the initial values of an adapter that was initialized from the base weights. All ranks must call it,
        before the adapter trains."""
        if self.from_weights and self.first is None:
            place = output_path(self.config) / FIRST
            export_adapter(self.model, place)
            self.first = place


def export_adapter(
    model: Any, place: Path, dtype: torch.dtype | None = None, tables: bool = False, first: Path | None = None
) -> None:
    """Write the adapter as PEFT does, gathering nothing else, and read it back before it replaces an older one.

    With `tables`, embedding and head are written with it, whole. An adapter whose initial values, taken from the base
    weights, are in `first` is written as a plain LoRA.
    """
    names = set(model.peft_config)
    whole_tables = {n for a in names for n in names_in_files(model, a)[1].values()} if tables else set()
    values: dict[str, torch.Tensor] = {}
    engine_model = wrapped(model)
    assert engine_model is not None
    for p in engine_model.parameters:
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
            for card in part.rglob("README.md"):  # PEFT's; `report/run_summary.py` writes the run's
                card.unlink()

    on_rank_0(write, "export")


def _name_base(folder: Path, model: Any) -> None:
    """Record the base in an adapter's files, so that it is located from any folder and distinguished from others."""
    name, base = read_config(folder).get("base_model_name_or_path"), base_of(model)
    if base is not None:
        write_record(folder, name or base.path, (base.path, base.identity))
    elif name:
        write_record(folder, name)


def _write_prompt(model: Any, folder: Path, values: dict[str, torch.Tensor]) -> None:
    """Write a prompt's files: the output of its encoder, not the encoder."""
    for adapter, encoder in encoders(model).items():
        start, config = f"prompt_encoder.{adapter}.", model.peft_config[adapter]
        own = {name.removeprefix(start): value.float() for name, value in values.items() if name.startswith(start)}
        dtype = values[f"{start}embedding.weight"].dtype
        table = {name: value.to(dtype) for name, value in export_tensors(encoder, own).items()}
        save_file(table, folder / WEIGHTS, metadata={"format": "pt"})
        config.base_model_name_or_path = config.base_model_name_or_path or local_folder(get_causal_lm(model))
        written = copy.copy(config)
        written.inference_mode = True
        written.save_pretrained(folder)
        assert (folder / CONFIG).is_file()


def _check_adapter(files: list[Path], values: dict[str, torch.Tensor]) -> None:
    """Refuse files that do not hold every gathered value unchanged."""
    saved = [tensor for file in files for tensor in load_file(file).values()]
    for name, value in values.items():
        if not any(t.shape == value.shape and t.dtype == value.dtype and torch.equal(t, value) for t in saved):
            raise WeightsError(f"the adapter's files do not hold {name} as it was gathered; nothing was kept.")


# --- model card, report and closing table ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """The outcome of a run, from which card, report and closing table are written."""

    config: SFTConfig
    progress: Progress
    logged_steps: int
    """The number of steps that the last logged loss is the mean of."""
    history: Sequence[dict[str, Any]]
    """The records of metrics.jsonl."""
    base: Path | str | None
    """The base model's folder or name."""
    adapter: bool
    """Whether the result is an adapter."""

    def metrics(self) -> dict[str, float]:
        """The mean loss of all steps, and the last value of each metric that was logged."""
        wanted = (
            "loss", "mean_token_accuracy", "eval_loss", "eval_mean_token_accuracy", "tokens_per_second", "memory_gib"
        )  # fmt: skip
        progress = self.progress
        metrics: dict[str, float] = {"train_loss": progress.mean_loss} if progress.loss_steps else {}
        for record in self.history:
            metrics |= {name: record[name] for name in wanted if record.get(name) is not None}
        return metrics


def write_card_and_report(
    summary: Summary, place: Path, name: str | None = None, data: str | None = None, tags: Sequence[str] = ()
) -> None:
    """Write the model card and the report; for the first rank alone. `name`, `data` and `tags` are for the card."""
    config, progress, metrics, versions = summary.config, summary.progress, summary.metrics(), library_versions()
    facts = {
        "base": lasting_name(summary.base) if summary.base else None,
        "adapter": summary.adapter,
        "data": data or config.dataset_name or "user-provided data",
        "tags": list(tags),
        "steps": progress.step,
        "ranks": runtime.global_device_count(),
        "metrics": metrics,
        "versions": versions,
    }
    write_card(place, name or config.run_name, config.changed(), facts)
    write_run_report(config, place)


def write_run_report(config: SFTConfig, place: Path) -> None:
    """Write the report from the files of the run. A fault in it is a warning: it must not hide or undo what the run
    has come to."""
    attempt(REPORT_FILE, lambda: write_report(output_path(config), place / REPORT_FILE))


def _final_rows(summary: Summary) -> dict[str, str]:
    """The last metrics as text, each with the steps it is the mean of."""
    progress, metrics, logged = summary.progress, summary.metrics(), summary.logged_steps
    evaluated = [record["step"] for record in summary.history if "eval_loss" in record]
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
        metrics.pop("loss", None)  # the same as the line above
    return {name: f"{form.format(metrics[key])}  {what}" for key, (name, form, what) in rows.items() if key in metrics}


def show_results(summary: Summary) -> None:
    """Print the closing table, with the paths of all results, on the first rank."""
    if not runtime.is_main():
        return
    place, progress = output_path(summary.config), summary.progress
    rows = {
        "steps": f"{progress.step:,}" + (f" ({progress.skipped} skipped)" if progress.skipped else ""),
        "tokens": f"{progress.tokens:,}",
        **_final_rows(summary),
        f"{'adapter' if summary.adapter else 'model'}, tokenizer, card": str(place),
        **({"checkpoints": str(place / CHECKPOINTS)} if (place / CHECKPOINTS).is_dir() else {}),
        "metrics": str(place / METRICS_FILE),
        "report": str(place / REPORT_FILE),
        "talk to it": f"fullshard chat {place}",
    }
    width = max(map(len, rows))
    for name, value in rows.items():  # plain lines: a path must not be cut to the width of a terminal
        print_text(f"{name:<{width}}  {value}")
