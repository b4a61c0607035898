"""Finds what a path contains: a model, an adapter and its base model, or a training checkpoint.

Only file names and small JSON files are read, without torch, so that a wrong path is reported at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from fullshard.checkpoint.manifest import MANIFEST, published_steps, read_manifest, step_name
from fullshard.config.errors import ConfigError, WeightsError
from fullshard.config.options import counting_number
from fullshard.config.paths import list_contents
from fullshard.lora.adapter_config import WEIGHTS, is_adapter, read_config
from fullshard.sft.output_dir import CHECKPOINTS, SETTINGS, read_settings
from fullshard.weights.adapter_base import find_base, stored_in_4_bits
from fullshard.weights.config_limits import check_config

TOKENIZER = "tokenizer_config.json"


@dataclass(frozen=True)
class Result:
    """A model or an adapter, and where its files are."""

    kind: Literal["model", "adapter"]
    folder: str
    """A folder with its files, a name on the Hub, or a training checkpoint."""
    base: str | None = None
    """The base model of an adapter."""
    checkpoint: bool = False
    """Whether the folder is a training checkpoint, which other programs cannot read."""
    run: Path | None = None
    """The folder of the run, with settings and tokenizer, if there is one."""
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def tokenizer(self) -> str:
        """The folder of the tokenizer: that of the result if it has one, because it may have added tokens."""
        for folder in (self.run, Path(self.folder)):
            if folder is not None and (folder / TOKENIZER).is_file():
                return str(folder)
        return self.base or self.folder

    @property
    def trained_in_4_bits(self) -> bool:
        """Whether the run quantized its base model to 4 bits."""
        return bool(self.settings.get("use_4bit_quantization"))

    @property
    def stored_in_4_bits(self) -> bool:
        """Whether the files of the model (or of the adapter's base) contain 4-bit weights."""
        return stored_in_4_bits(self.base or self.folder)


def find_result(name: str, base: str | None = None, checkpoint: str | None = None) -> Result:
    """The result at a path. `checkpoint` (a step, or latest) selects a checkpoint of a run instead of its result."""
    path = Path(name).expanduser()
    if not path.exists():
        if checkpoint is None and _may_be_on_the_hub(name):
            return Result("model", name)
        raise ConfigError(f"{name} does not exist; expected a run's folder, a model, an adapter or a checkpoint.")
    if not path.is_dir():
        raise ConfigError(f"{name} is a file; expected a folder with a run, a model, an adapter or a checkpoint.")
    if checkpoint is not None:
        path = _checkpoint_of(path, checkpoint)
    if (path / MANIFEST).is_file():
        result = _from_checkpoint(path)
    else:
        result = _from_files(path)
    if result.kind == "model":
        if base is not None:
            raise ConfigError(f"--base sets the base model of an adapter, but {name} contains a full model.")
        return result
    return _with_base(result, base)


def _from_files(path: Path) -> Result:
    run = path if (path / SETTINGS).is_file() else None
    settings = (read_settings(path) if run is not None else None) or {}
    if is_adapter(path) and (path / WEIGHTS).is_file():
        stored = read_config(path).get("base_model_name_or_path")
        return Result("adapter", str(path), find_base(path, stored) if stored else None, False, run, settings)
    check_config(path)
    if (path / "config.json").is_file() and any(path.glob("*.safetensors")):
        return Result("model", str(path), None, False, run, settings)
    steps = published_steps(path / CHECKPOINTS) or published_steps(path)
    if steps:
        raise ConfigError(
            f"{path} is a run without a result yet; its newest checkpoint is step {steps[-1]}: use --checkpoint latest."
        )
    if run is not None:
        raise ConfigError(f"{path} is a run without a result or a checkpoint yet.")
    raise ConfigError(
        f"{path} contains no model (config.json and safetensors files), adapter (adapter_config.json and {WEIGHTS}) or "
        f"checkpoint; it contains {list_contents(path)}."
    )


def _checkpoint_of(path: Path, choice: str) -> Path:
    folder = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    steps = published_steps(folder)
    if not steps:
        raise ConfigError(f"--checkpoint {choice}: {path} contains no checkpoints.")
    if choice == "latest":
        return folder / step_name(steps[-1])
    text = choice.removeprefix("step-")
    step = counting_number(text)
    if step is None or step not in steps:
        present = ", ".join(map(str, steps))
        raise ConfigError(f"--checkpoint {choice}: expected latest, or one of the steps {present} in {folder}.")
    return folder / step_name(step)


def _from_checkpoint(path: Path) -> Result:
    models = [entry for entry in read_manifest(path).states.values() if entry["kind"] == "model"]
    if len(models) != 1:
        raise ConfigError(f"the checkpoint {path} contains {len(models)} models; expected one.")
    above = path.absolute().parent
    run = next((folder for folder in (above.parent, above) if (folder / SETTINGS).is_file()), None)
    settings = (read_settings(run) if run is not None else None) or {}
    base = (models[0].get("base") or {}).get("path")
    if not models[0].get("adapters"):
        return Result("model", str(path), None, True, run, settings)
    return Result("adapter", str(path), base or settings.get("model_name_or_path"), True, run, settings)


def _with_base(result: Result, base: str | None) -> Result:
    """The adapter with its base model: `base` if given, else the one that its files name."""
    path = base or result.base
    if not path:
        raise ConfigError(f"the adapter in {result.folder} does not name its base model; set it with --base.")
    if not Path(path).expanduser().exists() and not _may_be_on_the_hub(path):
        source = "--base" if base else f"the base of the adapter in {result.folder}"
        raise ConfigError(f"{source}: {path} does not exist; set the folder of the base model with --base.")
    return replace(result, base=path)


def fetched(result: Result, base: str | None = None) -> Result:
    """The same result with all files on this machine: names on the Hub are downloaded. Needs torch."""
    from fullshard.weights.locate import resolve

    if result.kind == "model":
        local = result.checkpoint or Path(result.folder).expanduser().exists()
        return result if local else find_result(str(resolve(result.folder)), base)
    try:
        return replace(result, base=str(resolve(str(result.base))))
    except WeightsError as error:
        raise ConfigError(
            f"the base of the adapter in {result.folder}: {error} Set the folder of the base model with --base."
        ) from None


def _may_be_on_the_hub(name: str) -> bool:
    path = Path(name)
    return not path.is_absolute() and not name.startswith((".", "~")) and 1 <= len(path.parts) <= 2
