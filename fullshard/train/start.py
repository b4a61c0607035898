"""What a run starts from: a model, or an adapter to go on with and the model it was trained on; a template of the
user's own. Only what paths can tell: no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fullshard.errors import ConfigError
from fullshard.lora.adapter_config import CONFIG, WEIGHTS, is_adapter, read_config
from fullshard.paths import held, looks_local
from fullshard.weights.adapter_base import find_base


def starting_point(model: Any, adapter: str | None) -> tuple[Any, str | None]:
    """The model (a name or folder, or one in memory; None where only the adapter's files can tell) and the adapter.

    A folder that is named as the model and holds an adapter is an adapter to go on with.
    """
    if isinstance(model, str | Path) and is_adapter(model):
        if adapter is not None:
            raise ConfigError(
                f"model_name_or_path: {model} holds an adapter, and adapter_name_or_path names another ({adapter}); "
                f"name the model they were trained on, or leave one out."
            )
        model, adapter = None, str(model)
    if adapter is None:
        return model, None
    if hasattr(model, "peft_config"):
        raise ConfigError(
            "adapter_name_or_path: the model has an adapter already; give the model without it, or leave the option "
            "out."
        )
    _check_adapter(adapter)
    return model if model is not None else base_of_adapter(adapter), adapter


def base_of_adapter(adapter: str | Path) -> str | None:
    """The model that an adapter in a folder here was trained on; None if it is not here yet."""
    if not Path(adapter).expanduser().is_dir():
        return None
    base = read_config(adapter).get("base_model_name_or_path")
    if not base or not isinstance(base, str):
        raise ConfigError(f"{adapter} does not say which model it was trained on; name it with model_name_or_path.")
    base = find_base(adapter, base)
    if looks_local(base) and not Path(base).expanduser().exists():
        raise ConfigError(
            f"{adapter} was trained on {base}, which is not here; name the model's folder with model_name_or_path."
        )
    return base


def _check_adapter(adapter: str) -> None:
    option, path = "adapter_name_or_path", Path(adapter).expanduser()
    if path.is_file():
        raise ConfigError(f"{option}: {path} is a file; expected the folder that holds {CONFIG}.")
    if path.is_dir():
        for needs in (CONFIG, WEIGHTS):
            if not (path / needs).is_file():
                raise ConfigError(f"{option}: {path} has no {needs}; it holds {held(path)}.")
    elif looks_local(adapter):
        raise ConfigError(f"{option}: {path} does not exist.")


def check_template_path(name: str) -> None:
    """Refuse a chat_template_path that cannot be one: a Jinja file, a folder with a tokenizer, a name on the hub."""
    path = Path(name).expanduser()
    known = ("chat_template.jinja", "tokenizer_config.json", "tokenizer.json")
    if path.is_dir() and not any((path / file).is_file() for file in known):
        raise ConfigError(f"chat_template_path: {path} has no {' or '.join(known[:2])}; it holds {held(path)}.")
    if (looks_local(name) or path.suffix in (".jinja", ".j2")) and not path.exists():
        raise ConfigError(f"chat_template_path: {path} does not exist; expected a Jinja file or a folder.")
