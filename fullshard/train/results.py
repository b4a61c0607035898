"""What a run leaves behind: the model or adapter for transformers and peft, card, report, and the closing table."""

from __future__ import annotations

import copy
import importlib.metadata
import platform
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from fullshard import __version__, runtime
from fullshard.adapters.virtual_tokens import as_file, encoders, is_prompt
from fullshard.data.once import agree
from fullshard.errors import WeightsError
from fullshard.fsdp.state import whole_value
from fullshard.train.card import write_card
from fullshard.train.config import SFTConfig
from fullshard.train.folder import CHECKPOINTS
from fullshard.train.loss import causal
from fullshard.train.metrics import FILE
from fullshard.train.model import local_folder
from fullshard.train.report import write_report
from fullshard.weights.adapter_config import CONFIG, FIRST, WEIGHTS
from fullshard.weights.adapter_files import brought_tables, names_in_files
from fullshard.weights.export import save_pretrained
from fullshard.weights.plain_lora import make_plain

if TYPE_CHECKING:
    from fullshard.train.assemble import Parts
    from fullshard.train.sft import SFTTrainer

REPORT = "report.html"


def export(model: Any, parts: Parts, config: SFTConfig, place: Path) -> None:
    """Write the model or the adapter, and the tokenizer. All ranks must call it."""
    dtype = None if config.save_dtype == "auto" else getattr(torch, config.save_dtype)
    if hasattr(model, "peft_config"):
        tables = parts.earlier is not None and bool(brought_tables(parts.earlier))
        keep_first(model, parts, config)
        export_adapter(model, place, dtype, tables, parts.first)
        agree(lambda: parts.tokenizer.save_pretrained(place) if runtime.is_main() else None)
    else:
        dtype = dtype or getattr(model.config, "dtype", None)
        save_pretrained(model, place, dtype=dtype, tokenizer=parts.tokenizer, progress=False)


def keep_first(model: Any, parts: Parts, config: SFTConfig) -> None:
    """Write down what an adapter begins with that was taken out of the weights. All ranks must call it, before the
    adapter trains."""
    if parts.takes_from_weights and parts.first is None:
        place = Path(config.output_dir).expanduser() / FIRST
        export_adapter(model, place)
        parts.first = place


def export_adapter(
    model: Any, place: Path, dtype: torch.dtype | None = None, tables: bool = False, first: Path | None = None
) -> None:
    """Write the adapter as PEFT does, gathering nothing else; read it back before it takes its place.

    With `tables` embedding and head are written with it, whole: an adapter that brought its own keeps them. One that
    began as `first`, taken out of the weights, is written as plain LoRA.
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
        if not runtime.is_main():
            return
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".adapter-", dir=place) as part:
            if is_prompt(model):
                _write_prompt(model, Path(part), values)
            else:
                type(model)._fullshard_plain.save_pretrained(
                    model, part, state_dict=dict(values), save_embedding_layers=tables
                )
                _check_adapter(list(Path(part).rglob("*.safetensors")), values)
            if first is not None:
                make_plain(Path(part), first)
            written = [f for f in Path(part).rglob("*") if f.is_file() and f.name != "README.md"]
            for file in written:
                target = place / file.relative_to(part)
                target.parent.mkdir(parents=True, exist_ok=True)
                file.replace(target)

    agree(write)


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


def versions() -> dict[str, str]:
    found = {"fullshard": __version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "peft", "safetensors", "tokenizers"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def describe(trainer: SFTTrainer, place: Path) -> None:
    """Write card and report, and upload if asked to; the first rank alone."""
    if not runtime.is_main():
        return
    config, progress = trainer.args, trainer.loop.progress
    metrics = final_metrics(trainer)
    facts = {
        "base": trainer.parts.base or local_folder(causal(trainer.model)),
        "adapter": hasattr(trainer.model, "peft_config"),
        "data": config.dataset_name or "data of the user's own",
        "steps": progress.step,
        "ranks": runtime.world_size(),
        "metrics": metrics,
        "versions": versions(),
    }
    write_card(place, config, facts)
    shown = {"steps": progress.step, "tokens": progress.tokens, "ranks": runtime.world_size(), **metrics, **versions()}
    write_report(place / REPORT, config, trainer.state.log_history, shown, trainer.loop.reporter.answers)
    if trainer.hub is not None:
        trainer.hub.push(place)


def final_metrics(trainer: SFTTrainer) -> dict[str, float]:
    """The last value of each number that was logged."""
    wanted = ("loss", "mean_token_accuracy", "eval_loss", "eval_mean_token_accuracy", "tokens_per_second", "memory_gib")
    found: dict[str, float] = {}
    for record in trainer.state.log_history:
        found |= {name: record[name] for name in wanted if record.get(name) is not None}
    return found


def show(trainer: SFTTrainer) -> None:
    """The closing table, and where everything is."""
    reporter = trainer.loop.reporter
    if not runtime.is_main() or reporter.mode in ("quiet", "json"):
        return
    place, progress = Path(trainer.args.output_dir).expanduser(), trainer.loop.progress
    kind = "adapter" if hasattr(trainer.model, "peft_config") else "model"
    rows = {
        "steps": f"{progress.step:,}" + (f" ({progress.skipped} left out)" if progress.skipped else ""),
        "tokens": f"{progress.tokens:,}",
        **{name.replace("_", " "): f"{value:,.4f}" for name, value in final_metrics(trainer).items()},
        f"{kind}, tokenizer, card": str(place),
        "checkpoints": str(place / CHECKPOINTS),
        "metrics": str(place / FILE),
        "report": str(place / REPORT),
        "talk to it": f"fullshard chat {place}",
    }
    width = max(map(len, rows))
    for name, value in rows.items():  # plain lines: a path must not be cut to the width of a terminal
        print(f"{name:<{width}}  {value}", flush=True)
