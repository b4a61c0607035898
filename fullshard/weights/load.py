"""`load_pretrained`: loads a directory or a Hub model as a fully sharded model.

The model is built on the meta device, quantized and adapted there, and wrapped; then its shards are loaded from the
files (`fill.py`). No rank ever holds the whole model.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from fullshard.config.errors import WeightsError, one_line
from fullshard.device.torch_private import parameters_of
from fullshard.distributed import engines, runtime
from fullshard.distributed.ranks import agree, host_group, run_on_all_ranks
from fullshard.fsdp import FSDPv2, transformer_auto_wrap_policy
from fullshard.fsdp.shard import broadcast
from fullshard.fsdp.strategy import ShardingStrategy
from fullshard.lora.language_model import train_language_model, whole_class
from fullshard.lora.model_size import dense_line
from fullshard.lora.peft_model import get_peft_model_on_meta
from fullshard.lora.trainable_tokens import keep_tables_whole
from fullshard.quant.config import check_quantization
from fullshard.quant.quantize import quantize_model
from fullshard.spmd.mesh import Mesh, get_global_mesh
from fullshard.weights import export as export  # makes model.save_pretrained of wrapped models stream
from fullshard.weights.adapter_base import check_base, lasting_name
from fullshard.weights.adapter_files import stored_rows
from fullshard.weights.config_limits import check_config
from fullshard.weights.dtypes import choose_dtype, dtypes_kept
from fullshard.weights.fill import fill
from fullshard.weights.key_mapping import find_readers, plain_model, plain_name
from fullshard.weights.locate import open_source, resolve
from fullshard.weights.safetensors_files import SafetensorsFiles
from fullshard.weights.transforms import Transform

UNSET: Any = object()


def load_pretrained(
    path: str | Path,
    mesh: Mesh | None = None,
    *,
    torch_dtype: torch.dtype | str | None = None,
    dtype: torch.dtype | str | None = None,
    model_class: Any = None,
    config: Any = None,
    quantization_config: Any = None,
    dequantize: bool = False,
    adapter: str | Path | None = None,
    adapt: Callable[[nn.Module], nn.Module | None] | None = None,
    annotate: Callable[[nn.Module, Mesh], Any] | None = None,
    transform: Transform | None = None,
    resize_vocab: int | None = None,
    strict: bool = True,
    seed: int = 0,
    progress: bool = True,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    token: str | bool | None = None,
    key_mapping: dict[str, str] | None = None,
    trust_remote_code: bool = False,
    text_only: bool = False,
    auto_wrap_policy: Any = UNSET,
    **options: Any,
) -> Any:
    """Load a directory or a Hub model as a fully sharded model. All ranks must call it.

    - `mesh`: by default the global mesh, else all ranks along `fsdp`.
    - `torch_dtype` (or `dtype`): a dtype, its name, or "auto" (the default): that of the config, else of the files.
    - `model_class`: a transformers class or its name; by default the one in the config.
    - `config`: a config to use instead of the one in the files, or a dict of settings to override.
    - `quantization_config`: a `BitsAndBytesConfig(load_in_4bit=True, …)`; linear layers are quantized during loading.
      Not needed for files with weights in few bits (bitsandbytes' 4 bits, MXFP4, fp8 blocks, compressed-tensors), which
      are loaded as they are.
    - `dequantize`: unpack such weights while loading, except bitsandbytes'.
    - `adapter`: a folder with PEFT's files; the adapter is added to the model and loaded, with resized embeddings.
    - `adapt(model)`: changes the model on the meta device before it is wrapped: adapters, replaced modules.
    - `annotate(model, mesh)`: marks parameters (`mark_sharding`) for tensor parallelism.
    - `resize_vocab`: the vocabulary size, if larger than in the files.
    - `text_only`: leave out the parts of a model for images and sound that text does not use.
    - `transform`, `strict`, `seed`, `key_mapping`, `progress`: as in `fill`.
    - all other arguments are options of `FSDPv2`. `auto_wrap_policy` is `transformer_auto_wrap_policy` by default.
    """
    runtime.use_spmd()
    mesh = mesh or get_global_mesh() or _mesh_for(options.get("strategy", ShardingStrategy.FULL_SHARD))
    where = resolve(path, revision=revision, cache_dir=cache_dir, token=token)
    opened: list[SafetensorsFiles] = []
    if adapter is not None:
        adapt = adapt or functools.partial(_with_adapter, folder=adapter)

    def build() -> PreTrainedModel:
        if adapter is not None:
            check_base(adapter, where, path)
        opened.append(open_source(where))
        settings = read_config(where, config, trust_remote_code)
        rows = resize_vocab or (stored_rows(adapter) if adapter is not None else 0)
        if resize_vocab is not None or rows > getattr(settings.get_text_config(), "vocab_size", rows):
            settings.get_text_config().vocab_size = rows
        chosen_dtype = choose_dtype(torch_dtype if torch_dtype is not None else dtype, settings, opened[0])
        settings.name_or_path = lasting_name(path)
        model = on_meta(class_of(model_class, settings), settings, chosen_dtype, where, trust_remote_code)
        if text_only and (line := train_language_model(model.eval())):
            runtime.get_logger().info("%s", line)
        return model

    with contextlib.ExitStack() as stack:
        model: Any = run_on_all_ranks(build, "build", error=WeightsError)
        stack.callback(opened[0].close)
        untie_what_differs(model, opened[0], key_mapping)
        model.eval()
        packed = quantization_config or getattr(model.config, "quantization_config", None)
        if packed is not None:
            quantize_model(model, packed, opened[0].entries, dequantize)
            if (line := dense_line(model)) is not None:
                runtime.get_logger().info("%s", line)
        before = set(model.state_dict())
        prefix = ""
        if adapt is not None:
            model = _adapted(model, adapt)
            prefix, _ = plain_model(model)
        if annotate is not None:
            annotate(model, mesh)
        new = {n for n, _ in model.named_parameters() if plain_name(n, prefix) not in before}
        _share_values(model, mesh)
        policy = transformer_auto_wrap_policy if auto_wrap_policy is UNSET else auto_wrap_policy
        wrap: Any = FSDPv2
        model = wrap(model, mesh, auto_wrap_policy=policy, **options)
        fill(
            model, opened[0], transform=transform, strict=strict, new=new, adapter=adapter, key_mapping=key_mapping,
            resize_vocab=resize_vocab is not None or adapter is not None, seed=seed, progress=progress,
        )  # fmt: skip
    return model


def _mesh_for(strategy: Any) -> Mesh:
    devices = runtime.global_runtime_device_count()
    if ShardingStrategy.of(strategy).hybrid:
        inside = runtime.local_device_count()
        return Mesh(np.arange(devices), (devices // inside, inside), ("replica", "fsdp"))
    return Mesh(np.arange(devices), (devices,), ("fsdp",))


# --- building ---------------------------------------------------------------------------------------------------------


def read_config(where: Path, user_config: Any, trust_remote_code: bool) -> Any:
    """The model's config: the given one, or that of the files with the given settings."""
    directory = where if where.is_dir() else where.parent
    if user_config is not None and not isinstance(user_config, dict):
        return copy.deepcopy(user_config)
    check_config(directory, user_config)
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code, **(user_config or {}))
    except Exception as error:  # damaged files raise errors of many kinds
        raise WeightsError(f"{directory} has no usable config.json: {one_line(error)}") from error
    if (packed := getattr(config, "quantization_config", None)) is not None:
        check_quantization(packed)
    return config


def class_of(model_class: Any, config: Any) -> Any:
    """The model class: the given one, else the one in the config, else that of the kind of config."""
    if isinstance(model_class, str):
        named = getattr(transformers, model_class, None)
        if named is None:
            raise WeightsError(f"model_class={model_class!r}: transformers has no class of that name")
        return named
    if model_class is not None:
        return model_class
    for name in config.architectures or ():
        if isinstance(named := getattr(transformers, name, None), type):
            return named
    return text_class(config)


def text_class(config: Any) -> Any:
    """The class of a model that is trained on text: that of the whole model where it takes images or sound too."""
    return whole_class(config) or AutoModelForCausalLM


def on_meta(model_class: Any, config: Any, dtype: torch.dtype, where: Path, trust_remote_code: bool) -> Any:
    """Build the model on the meta device, with the dtypes and generation config that `from_pretrained` gives it."""
    config.dtype = dtype
    for sub in getattr(config, "sub_configs", ()):
        if getattr(config, sub, None) is not None:
            getattr(config, sub).dtype = dtype
    extra = {"trust_remote_code": True} if trust_remote_code else {}
    with torch.device("meta"):
        if hasattr(model_class, "from_config"):  # an Auto class
            model = model_class.from_config(config, dtype=dtype, **extra)
        else:
            model = model_class._from_config(config, dtype=dtype)
    for name, kept in dtypes_kept(model, dtype, dict(model.named_parameters())).items():
        module, _, key = name.rpartition(".")
        parameters = parameters_of(model.get_submodule(module))
        parameters[key] = nn.Parameter(parameters[key].to(kept), requires_grad=parameters[key].requires_grad)
    if model.can_generate():
        with contextlib.suppress(OSError):
            model.generation_config = GenerationConfig.from_pretrained(where if where.is_dir() else where.parent)
    return model


# --- before wrapping --------------------------------------------------------------------------------------------------


def _with_adapter(model: nn.Module, folder: str | Path) -> nn.Module:
    from peft import PeftConfig

    config = PeftConfig.from_pretrained(str(folder))
    config.base_model_name_or_path = getattr(model, "name_or_path", None)  # its current location
    peft_model = get_peft_model_on_meta(model, config)
    keep_tables_whole(peft_model)
    return peft_model


def _adapted(model: nn.Module, adapt: Callable[[nn.Module], nn.Module | None]) -> nn.Module:
    with torch.device("meta"), warnings.catch_warnings():
        warnings.filterwarnings("error", message="for .*: copying from a non-meta parameter")
        try:
            return adapt(model) or model
        except UserWarning as lost:
            raise WeightsError(
                "adapt() loads values into a model on the meta device, where they would be lost. Only add the "
                "adapter's layers there (get_peft_model), and pass the folder with its values as adapter="
            ) from lost


def untie_what_differs(model: PreTrainedModel, source: SafetensorsFiles, key_mapping: Any) -> None:
    """Untie parameters that the config ties but that have different values in the files, as transformers does."""
    ties = dict(getattr(model, "all_tied_weights_keys", None) or {})
    if not ties:
        return
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}

    def differing() -> list[str]:
        readers = find_readers(model, shapes, source, key_mapping).readers
        both = [(a, b) for a, b in ties.items() if a in readers and b in readers and readers[a] is not readers[b]]
        return [a for a, b in both if not _equal(readers[a], readers[b])]

    reports = agree(differing, "compare tied weights", error=WeightsError)
    for name in sorted({name for names in reports for name in names}):
        runtime.get_logger().warning(
            "the config ties %s to %s, but the files contain different values for them; they are not tied",
            name,
            ties[name],
        )
        module, _, key = name.rpartition(".")
        old: Any = parameters_of(model.get_submodule(module))[key]
        parameters_of(model.get_submodule(module))[key] = nn.Parameter(torch.empty_like(old), old.requires_grad)
        model.all_tied_weights_keys.pop(name)


def _equal(a: Any, b: Any) -> bool:
    """Whether two tensors are equal in the rows that this rank compares."""
    if a.shape != b.shape:
        return False
    step = max(1, 2**22 // max(1, int(np.prod(a.shape[1:]))))
    starts = range(0, a.shape[0], step)
    mine = starts[runtime.rank() :: runtime.world_size()]
    return all(torch.equal(a[i : i + step], b[i : i + step]) for i in mine)


def _share_values(model: nn.Module, mesh: Mesh) -> None:
    """Broadcast parameters that `adapt` gave values, so that they are equal on all ranks."""
    on_host = engines.current().host_shards is not None  # FSDPv2 moves them to the devices
    for p in model.parameters():
        if p.is_meta:
            continue
        if not on_host:
            p.data = broadcast(p.data.to(runtime.device()).contiguous(), mesh)
        elif runtime.world_size() > 1:
            dist.broadcast(p.data, 0, group=host_group())
