"""What lies at a path that a user names: a model, an adapter and its base, or a checkpoint of a run that goes on.

Only looks at names and small JSON files, without torch, so that a wrong path is found at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from fullshard.checkpoint.manifest import MANIFEST, published_steps, read_manifest, step_name
from fullshard.errors import ConfigError, WeightsError
from fullshard.lora.adapter_config import WEIGHTS, is_adapter, read_config
from fullshard.paths import held
from fullshard.train.run_dir import CHECKPOINTS, SETTINGS, read_settings
from fullshard.weights.adapter_base import find_base, stored_in_4_bits

TOKENIZER = "tokenizer_config.json"


@dataclass(frozen=True)
class Place:
    """Where a result lies."""

    kind: Literal["model", "adapter"]
    folder: str
    """With its files; a name on the hub; or a training checkpoint."""
    base: str | None = None
    """The model that an adapter belongs to."""
    checkpoint: bool = False
    """Whether the folder is a training checkpoint, which others cannot read."""
    run: Path | None = None
    """The run's folder, with settings and tokenizer, where there is one."""
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def tokenizer(self) -> str:
        """Where the tokenizer lies: with the result if it is there, since it may know more than its base's."""
        for folder in (self.run, Path(self.folder)):
            if folder is not None and (folder / TOKENIZER).is_file():
                return str(folder)
        return self.base or self.folder

    @property
    def trained_in_4_bits(self) -> bool:
        return bool(self.settings.get("use_4bit_quantization"))

    @property
    def stored_in_4_bits(self) -> bool:
        """Whether the model's files (an adapter's base) hold 4-bit weights."""
        return stored_in_4_bits(self.base or self.folder)


def find(name: str, base: str | None = None, checkpoint: str | None = None) -> Place:
    """What is there. `checkpoint` (a step, or latest) takes one of a run's checkpoints instead of its result."""
    path = Path(name).expanduser()
    if not path.exists():
        if checkpoint is None and _may_be_on_the_hub(name):
            return Place("model", name)
        raise ConfigError(f"{name} does not exist; expected a run's folder, a model, an adapter or a checkpoint.")
    if not path.is_dir():
        raise ConfigError(f"{name} is a file; expected a folder with a run, a model, an adapter or a checkpoint.")
    if checkpoint is not None:
        path = _checkpoint_of(path, checkpoint)
    if (path / MANIFEST).is_file():
        found = _from_checkpoint(path)
    else:
        found = _from_files(path)
    if found.kind == "model":
        if base is not None:
            raise ConfigError(f"--base names the model that an adapter belongs to, but {name} holds a whole model.")
        return found
    return _with_base(found, base)


def _from_files(path: Path) -> Place:
    run = path if (path / SETTINGS).is_file() else None
    settings = (read_settings(path) if run is not None else None) or {}
    if is_adapter(path) and (path / WEIGHTS).is_file():
        stored = read_config(path).get("base_model_name_or_path")
        return Place("adapter", str(path), find_base(path, stored) if stored else None, False, run, settings)
    if (path / "config.json").is_file() and any(path.glob("*.safetensors")):
        return Place("model", str(path), None, False, run, settings)
    steps = published_steps(path / CHECKPOINTS) or published_steps(path)
    if steps:
        raise ConfigError(
            f"{path} is a run that has not written its result yet; its newest checkpoint is that of step {steps[-1]}: "
            f"--checkpoint latest takes it."
        )
    if run is not None:
        raise ConfigError(f"{path} is a run that has neither a result nor a checkpoint yet.")
    raise ConfigError(
        f"{path} holds neither a model (config.json and safetensors files) nor an adapter (adapter_config.json and "
        f"{WEIGHTS}) nor a checkpoint; it holds {held(path)}."
    )


def _checkpoint_of(path: Path, wanted: str) -> Path:
    home = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    steps = published_steps(home)
    if not steps:
        raise ConfigError(f"--checkpoint {wanted}: {path} holds no checkpoints.")
    if wanted == "latest":
        return home / step_name(steps[-1])
    text = wanted.removeprefix("step-")
    if not text.isdigit() or int(text) not in steps:
        there = ", ".join(map(str, steps))
        raise ConfigError(f"--checkpoint {wanted}: expected latest, or one of the steps {there} in {home}.")
    return home / step_name(int(text))


def _from_checkpoint(path: Path) -> Place:
    models = [entry for entry in read_manifest(path).states.values() if entry["kind"] == "model"]
    if len(models) != 1:
        raise ConfigError(f"the checkpoint {path} holds {len(models)} models; expected one.")
    above = path.absolute().parent
    run = next((folder for folder in (above.parent, above) if (folder / SETTINGS).is_file()), None)
    settings = (read_settings(run) if run is not None else None) or {}
    base = (models[0].get("base") or {}).get("path")
    if not models[0].get("adapters"):
        return Place("model", str(path), None, True, run, settings)
    return Place("adapter", str(path), base or settings.get("model_name_or_path"), True, run, settings)


def _with_base(found: Place, base: str | None) -> Place:
    """An adapter with the place of its base: what the user says, or what the adapter does."""
    where = base or found.base
    if not where:
        raise ConfigError(f"{found.folder} does not say which model its adapter belongs to; name it with --base.")
    if not Path(where).expanduser().exists() and not _may_be_on_the_hub(where):
        said = "--base" if base else f"the base of the adapter in {found.folder}"
        raise ConfigError(f"{said}: {where} does not exist; name the folder where the base model lies now with --base.")
    return replace(found, base=where)


def fetched(place: Place, base: str | None = None) -> Place:
    """The same with everything here: what lies on the hub is brought, or one line says why not. Needs torch."""
    from fullshard.weights.locate import resolve

    if place.kind == "model":
        here = place.checkpoint or Path(place.folder).expanduser().exists()
        return place if here else find(str(resolve(place.folder)), base)
    try:
        return replace(place, base=str(resolve(str(place.base))))
    except WeightsError as error:
        raise ConfigError(
            f"the base of the adapter in {place.folder}: {error} Name the folder where it lies with --base."
        ) from None


def _may_be_on_the_hub(name: str) -> bool:
    path = Path(name)
    return not path.is_absolute() and not name.startswith((".", "~")) and 1 <= len(path.parts) <= 2
