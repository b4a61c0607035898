"""A run whose settings, paths and data have been checked, ready for a trainer.

Every check runs once. `fullshard sft` checks in the launcher and hands the result to its ranks as JSON; they only look
for the paths on their own node. `python -m fullshard.sft` without a launcher of ours, and `SFTTrainer` in a script,
check for themselves. Nothing here imports torch. The output folder's own rules are in `output_dir.py`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fullshard.config.errors import ConfigError
from fullshard.config.options import as_list
from fullshard.config.paths import Inputs, list_contents, looks_local
from fullshard.data.sources import DataSource
from fullshard.distributed import engines
from fullshard.lora.adapter_config import CONFIG, WEIGHTS, is_adapter, read_config
from fullshard.parallel.fsdp_flags import settings_from_trainer_flags
from fullshard.parallel.settings import EngineSettings
from fullshard.report.loggers import check_report_to
from fullshard.sft import output_dir
from fullshard.sft.cli_args import Arguments, CommandConfig, config_of
from fullshard.sft.run_data import (
    RunData,
    dataset_configs,
    find_run_data,
    read_prompts,
    script_source,
    stream_if_iterable,
)
from fullshard.sft.sft_config import SFTConfig
from fullshard.weights.adapter_base import find_base
from fullshard.weights.config_limits import check_config

RUN_VARIABLE = "FULLSHARD_SFT_RUN"
"""The environment variable in which `fullshard sft` hands a checked run to its ranks, as JSON."""


@dataclass(frozen=True)
class CheckedRun:
    """Everything that a trainer needs to begin."""

    config: SFTConfig
    engine: EngineSettings
    """How the model is sharded: the launcher's settings, overridden by the run's own."""
    model: Any
    """A name or folder, or a model in memory; None where only the adapter's files on the hub name it."""
    adapter: str | None
    """The adapter to resume, by name or folder."""
    train: DataSource | None
    evaluation: DataSource | dict[str, DataSource] | None
    """Several sets by name, where a script gives a dict."""
    inputs: Inputs
    """The paths that the run reads, by option."""
    notes: tuple[str, ...] = ()
    """What was interpreted, for the user to read."""
    folder_checked: bool = False
    """Whether the contents of `output_dir` have been checked."""
    tokenizer: Any = field(default=None, repr=False)
    peft_config: Any = field(default=None, repr=False)

    def to_json(self) -> str:
        """The run of a command line for the processes that train it."""
        return json.dumps({
            "config": self.config.values(), "engine": dataclasses.asdict(self.engine), "model": self.model,
            "adapter": self.adapter, "notes": self.notes,
        })  # fmt: skip


# --- a command line -------------------------------------------------------------------------------------------------


def check_command(
    arguments: Arguments, launched: EngineSettings | None = None, *, check_folder: bool = False
) -> CheckedRun:
    """The run of a command line, checked. `launched` is how the launcher shards; the environment's settings if None."""
    config, notes = arguments.config, list(arguments.notes)
    model, adapter = check_paths(config)
    engine = sharding_settings(config, launched, notes)
    data = find_run_data(config, check_rows=True)
    if config.sample_by != "line" and data.train.files and not any(".txt" in one.suffixes for one in data.train.files):
        notes.append("no effect: sample_by: no file of the data is a .txt file")
    run = _run_of(config, engine, model, adapter, data, tuple(notes), check_folder)
    if check_folder:
        output_dir.check_output_dir(run.config, run.inputs)
    return run


def receive_run(text: str) -> CheckedRun:
    """The run that the launcher has checked, in one of its ranks. Only whether its paths exist on this node is left to
    check."""
    values = json.loads(text)
    config: SFTConfig = CommandConfig.from_checked(values["config"])
    fields = values["engine"].items()
    engine: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in fields}
    named = {"model_name_or_path": values["model"], "adapter_name_or_path": values["adapter"]}
    named |= {name: getattr(config, name) for name in ("tokenizer_name_or_path", "sample_prompts")}
    for option, name in named.items():
        if name is not None and looks_local(name) and not Path(name).expanduser().exists():
            raise ConfigError(f"{option}: {Path(name).expanduser()} does not exist.")
    return _run_of(
        config, EngineSettings(**engine), values["model"], values["adapter"], find_run_data(config),
        tuple(values["notes"]), True,
    )  # fmt: skip


def _run_of(
    config: SFTConfig, engine: EngineSettings, model: str | None, adapter: str | None, data: RunData,
    notes: tuple[str, ...], folder_checked: bool,
) -> CheckedRun:  # fmt: skip
    inputs = output_dir.input_paths(config, model, adapter, data)
    return CheckedRun(
        _with_adapter(config, adapter), engine, model, adapter, data.train, data.evaluation, inputs, notes,
        folder_checked,
    )  # fmt: skip


def sharding_settings(config: SFTConfig, launched: EngineSettings | None, notes: list[str]) -> EngineSettings:
    """How the model is sharded: the launcher's settings, overridden by the run's own."""
    engines.current().check_run(config)
    engine = settings_from_trainer_flags(config.fsdp, config.fsdp_config, notes=notes, base=launched)
    changes: dict[str, Any] = {"mixed_precision": config.precision} if config.precision else {}
    if config.use_cpu:
        changes["use_cpu"] = True
    if config.torch_compile_backend or (config.torch_compile and engine.backend.lower() == "no"):
        changes["backend"] = config.torch_compile_backend or "inductor"
    elif config.torch_compile is False:
        changes["backend"] = "no"
    if config.torch_compile_mode:
        changes["mode"] = config.torch_compile_mode
    if config.gradient_checkpointing and engine.activation_checkpointing:
        raise ConfigError(
            f"gradient_checkpointing is {config.gradient_checkpointing}, and activation_checkpointing is on in the "
            f"launcher's settings or in fsdp_config: both recompute activations. Keep one of them."
        )
    if (config.slices or 1) > 1 and changes.get("backend", engine.backend).lower() != "no":
        raise ConfigError(
            f"sequence_slices is {config.slices}, and torch_compile is on: compiled layers run whole. Leave one of "
            f"them out."
        )
    if (config.slices or 1) > 1 and max(engine.tp_size, engine.ep_size) > 1:
        raise ConfigError(
            f"sequence_slices is {config.slices}, tp_size {engine.tp_size} and ep_size {engine.ep_size}: layers that "
            f"are split over ranks exchange whole rows. Leave sequence_slices at auto, or tp_size and ep_size at 1."
        )
    return dataclasses.replace(engine, **changes)


def with_precision(config: SFTConfig, engine: EngineSettings) -> tuple[SFTConfig, EngineSettings]:
    """The precision and the dtype of weights that a script leaves open, chosen as TRL does: bf16 where the device
    computes in it (with `use_cpu` the CPU too), and weights in float32 where everything is computed in float32."""
    config = copy.copy(config)
    if config.bf16 is None:
        from fullshard.device.accelerator import computes_bf16

        open_to_choice = not config.fp16 and engine.mixed_precision == "no"
        config.bf16 = open_to_choice and (config.use_cpu or (computes_bf16() and not engine.use_cpu))
        engine = dataclasses.replace(engine, mixed_precision="bf16") if config.bf16 else engine
    if config.torch_dtype is None:
        config.torch_dtype = "float32" if engine.mixed_precision == "no" else "auto"
    return config, engine


def _with_adapter(config: SFTConfig, adapter: str | None) -> SFTConfig:
    """The settings with the adapter to resume, which may be named as the model."""
    config = copy.copy(config)
    config.adapter_name_or_path = adapter
    return config


# --- a script -------------------------------------------------------------------------------------------------------


def check_script(
    model: Any, args: Any, train_dataset: Any, eval_dataset: Any, tokenizer: Any, peft_config: Any,
    formatting_func: Callable[[Any], str] | None, more: dict[str, Any],
) -> CheckedRun:  # fmt: skip
    """The run of a script's `SFTTrainer`, checked; `more` are settings beside `args`.

    What `output_dir` holds is checked when training begins: only then is it known whether the run resumes.
    """
    config, notes = config_of(args, **more)
    config = stream_if_iterable(config, train_dataset, notes)
    check_report_to(config.report_to)
    model, adapter = starting_point(
        model if model is not None else config.model_name_or_path, config.adapter_name_or_path
    )
    config = _with_adapter(config, adapter)
    if model is None and adapter is None:
        raise ConfigError("there is no model: give model=, or model_name_or_path in args.")
    if isinstance(model, str | Path):
        check_model_folder(str(model))
    elif model is not None and config.model_init_kwargs:
        raise ConfigError(
            "model_init_kwargs are for a model that is given by name, and the model is in memory already; set them "
            "where you make it, or give its name."
        )
    elif model is not None and config.rope_scaling is not None:
        raise ConfigError(
            f"rope_scaling is {config.rope_scaling}, but the model is in memory already; set rope_parameters in "
            f"its configuration before you make it, or give its folder."
        )
    config, engine = with_precision(config, sharding_settings(config, None, notes))
    asks_adapter = peft_config is not None or (config.adapter_kind is not None and adapter is None)
    if asks_adapter and (hasattr(model, "peft_config") or adapter is not None):
        raise ConfigError("the model has an adapter already, and peft_config asks for another; leave one out.")
    read = functools.partial(script_source, config=config, formatting=formatting_func)
    train = None if train_dataset is None else read(train_dataset, "train_dataset")
    evaluation: DataSource | dict[str, DataSource] | None = None
    if isinstance(eval_dataset, dict):
        evaluation = {name: read(data, f"eval_dataset {name}") for name, data in eval_dataset.items()}
    elif eval_dataset is not None:
        evaluation = read(eval_dataset, "eval_dataset")
    if train is None and evaluation is None:
        raise ConfigError(
            "`train_dataset` is required (or `eval_dataset` alone, to evaluate only); give rows or files."
        )
    sources = (train, *(evaluation.values() if isinstance(evaluation, dict) else [evaluation]))
    inputs = output_dir.input_paths(config, model, adapter, sources, tokenizer)
    if train is not None:
        output_dir.check_output_path(config, inputs)
    if config.val_size and evaluation is not None:
        raise ConfigError(f"val_size is {config.val_size:g}, and there is an eval_dataset; choose one.")
    if config.eval_strategy != "no" and evaluation is None and not (config.val_size and train is not None):
        raise ConfigError(
            f"eval_strategy is {config.eval_strategy}, but there is no eval_dataset; give one, or hold out rows "
            f"with val_size."
        )
    return CheckedRun(
        config, engine, model, adapter, train, evaluation, inputs, tuple(notes), tokenizer=tokenizer,
        peft_config=peft_config,
    )  # fmt: skip


# --- paths ----------------------------------------------------------------------------------------------------------


def check_paths(config: SFTConfig) -> tuple[str | None, str | None]:
    """The model and the adapter that a command line names. Refuses paths that cannot be what they are named as."""
    model, adapter = starting_point(config.model_name_or_path, config.adapter_name_or_path)
    for name, value in (("model_name_or_path", model or adapter), ("dataset_name", config.dataset_name)):
        if value is None:
            raise ConfigError(f"{name} is missing; give --{name}.")
    if model is not None:
        check_model_folder(str(model))
    if config.tokenizer_name_or_path:
        check_model_folder(config.tokenizer_name_or_path, "tokenizer_name_or_path", "tokenizer_config.json")
    for each in (config, *dataset_configs(config)):
        if each.chat_template_path:
            check_template_path(each.chat_template_path)
    if config.sample_prompts:
        read_prompts(config.sample_prompts)
    check_report_to(config.report_to)
    return model, adapter


def starting_point(model: Any, adapter: str | None) -> tuple[Any, str | None]:
    """The model to start from and the adapter to resume.

    The model is a name or folder, or a model in memory; it is None where only the adapter's files on the hub name it. A
    folder that is named as the model and holds an adapter is an adapter to resume.
    """
    if isinstance(model, str | Path) and is_adapter(model):
        if adapter is not None:
            raise ConfigError(
                f"model_name_or_path: {model} holds an adapter, and adapter_name_or_path names another ({adapter}); "
                f"name the model they were trained on, or leave one out."
            )
        model, adapter = None, str(model)
    if isinstance(model, str | Path):
        refuse_encoder(str(model), _stated(Path(model).expanduser()))
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
    """The model that an adapter in a local folder was trained on; None if the adapter is not in a local folder."""
    if not Path(adapter).expanduser().is_dir():
        return None
    base = read_config(adapter).get("base_model_name_or_path")
    if not base or not isinstance(base, str):
        raise ConfigError(f"{adapter} does not name the model it was trained on; give it with model_name_or_path.")
    base = find_base(adapter, base)
    if looks_local(base) and not Path(base).expanduser().exists():
        raise ConfigError(
            f"{adapter} was trained on {base}, which does not exist here; give the model's folder with "
            f"model_name_or_path."
        )
    return base


def _check_adapter(adapter: str) -> None:
    option, path = "adapter_name_or_path", Path(adapter).expanduser()
    if path.is_file():
        raise ConfigError(f"{option}: {path} is a file; expected the folder that holds {CONFIG}.")
    if path.is_dir():
        for needs in (CONFIG, WEIGHTS):
            if not (path / needs).is_file():
                raise ConfigError(f"{option}: {path} has no {needs}; it holds {list_contents(path)}.")
    elif looks_local(adapter):
        raise ConfigError(f"{option}: {path} does not exist.")


def check_template_path(name: str) -> None:
    """Refuse a `chat_template_path` that is neither a Jinja file nor a tokenizer's folder nor a name on the hub."""
    path = Path(name).expanduser()
    names = ("chat_template.jinja", "tokenizer_config.json", "tokenizer.json")
    if path.is_dir() and not any((path / file).is_file() for file in names):
        raise ConfigError(
            f"chat_template_path: {path} has no {' or '.join(names[:2])}; it holds {list_contents(path)}."
        )
    if (looks_local(name) or path.suffix in (".jinja", ".j2")) and not path.exists():
        raise ConfigError(f"chat_template_path: {path} does not exist; expected a Jinja file or a folder.")


def refuse_encoder(name: str, stated: Mapping[str, Any]) -> None:
    """Refuse a model that its configuration states to be no causal language model: BERT and its kind, T5 and its."""
    kind = str(stated.get("model_type"))
    classes = [str(one) for one in as_list(stated.get("architectures") or ())]
    masked = [one for one in classes if one.endswith(("ForMaskedLM", "ForPreTraining", "ForNextSentencePrediction"))]
    encodes = "decoder" not in kind and not stated.get("is_decoder") and ("bert" in kind or bool(masked))
    if not encodes and not stated.get("is_encoder_decoder"):
        return
    what = "an encoder" if encodes else "an encoder-decoder"
    raise ConfigError(
        f"{name} is a {kind} model ({', '.join(classes) or 'its class is not stated'}), {what}; expected a causal "
        f"language model, such as Llama, Qwen or GPT-2. To train this one, run a script of your own, with "
        f"transformers' Trainer for example, under fullshard launch."
    )


def _stated(place: Path) -> dict[str, Any]:
    """What a model's config.json states; nothing if it cannot be read, which is reported where the model is read."""
    try:
        stated = json.loads((place if place.is_file() else place / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return stated if isinstance(stated, dict) else {}


def check_model_folder(name: str, option: str = "model_name_or_path", needs: str = "config.json") -> None:
    """Refuse a local path that is not a folder with the file that makes it a model's or a tokenizer's."""
    path = Path(name).expanduser()
    if path.is_dir():
        check_config(path)
    if path.is_dir() and not (path / needs).is_file():
        raise ConfigError(f"{option}: {path} has no {needs}; it holds {list_contents(path)}.")
    if path.is_file():
        raise ConfigError(f"{option}: {path} is a file; expected the folder that holds {needs}.")
    if looks_local(name) and not path.exists():
        raise ConfigError(f"{option}: {path} does not exist.")
