"""`merge_adapter`: merges an adapter into its base weights, file to file, without loading the model.

PEFT's own layers merge, one at a time: each gets its base weight from the files, merges, is written and freed. Memory
holds only the adapter and one layer, and the result equals PEFT's `merge_and_unload` bit for bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.config.errors import QuantizationError, WeightsError, first_line
from fullshard.config.paths import check_new_folder
from fullshard.device.torch_private import buffers_of, parameters_of
from fullshard.distributed.progress import Bar
from fullshard.quant.config import Quantization
from fullshard.quant.quantize import quantize_model
from fullshard.quant.shipped import METHODS, Shipped, is_shipped
from fullshard.weights.adapter_base import check_base, find_base
from fullshard.weights.adapter_files import adapter_readers, open_adapter, stored_rows
from fullshard.weights.dtypes import choose_dtype, dtypes_kept
from fullshard.weights.key_mapping import ReverseMapping, find_readers
from fullshard.weights.load import class_of, on_meta, read_config
from fullshard.weights.locate import open_source
from fullshard.weights.merge_layers import CHANGE_BASE, MergedLayers, check_kind, kind_of, rounded_readers
from fullshard.weights.model_dir_writer import ModelDirWriter
from fullshard.weights.requantize import Requantizer, RoundingError
from fullshard.weights.safetensors_files import SafetensorsFiles, total_bytes
from fullshard.weights.slice_reader import TensorReader
from fullshard.weights.source_files import quick_identity
from fullshard.weights.transforms import grown_reader, may_grow


def merge_adapter(
    adapter: str | Path,
    out: str | Path,
    *,
    base: str | Path | None = None,
    dtype: torch.dtype | str | None = None,
    dequantized: Any = None,
    requantize: Callable[[list[RoundingError]], None] | None = None,
    stored_as: torch.dtype | str | None = None,
    max_shard_size: int | str = "10GB",
    verify: bool = True,
    progress: bool = True,
) -> Path:
    """Merge an adapter (PEFT's files) into its base model and write the result to `out`. Runs in one process.

    - `base`: the folder of the base model; by default the one that the adapter names.
    - `dtype`: of the result; None keeps the base's. Base weights are converted first, then the adapter is added.
    - `dequantized`: by default a QLoRA adapter is merged into the weights before quantization. With the quantization
      of the run (a `BitsAndBytesConfig` or a mapping with its fields; True if the base is stored in 4 bits) it is
      merged into the dequantized weights, converted to `dtype`: the weights it was trained with.
    - `requantize`: quantize the merged weights of a model that was shipped in few bits into its format again, and call
      this with the errors of that. By default they are written dense.
    - `stored_as`: the dtype of the weights when the run quantized them; None for the base's.
    - `max_shard_size`, `verify`, `progress`: as in `save_pretrained`.
    """
    from peft import PeftConfig

    folder, target = Path(adapter), Path(out)
    rows = stored_rows(folder)
    peft_config = PeftConfig.from_pretrained(str(folder))
    check_kind(peft_config)
    where = _locate_base(folder, base, peft_config.base_model_name_or_path)
    check_base(folder, where)
    check_new_folder(target)
    config, how, shipped = _read_base_config(where, dequantized)
    if requantize is not None and shipped is None:
        raise WeightsError(
            f"{where} is not stored in a format that weights can be quantized into again ({', '.join(METHODS)}); write "
            f"the merged model dense"
        )
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(open_source(where))
        stored_dtype = choose_dtype(stored_as, config, source)
        plain = on_meta(class_of(None, config), config, choose_dtype(dtype, config, source), where, False)
        if rows > plain.get_input_embeddings().weight.shape[0]:
            plain.resize_token_embeddings(rows, mean_resizing=False)
        if shipped is not None:
            quantize_model(plain, shipped, source.entries, unpack=True)
        form = _form(plain)
        readers = _base_readers(plain, source, form, how, stored_dtype)
        method = getattr(peft_config, "init_lora_weights", None)
        model = _with_adapter_layers(plain, peft_config)
        merged = MergedLayers(model, _read_adapter(model, folder), form, method)
        missing = [name for name in form if name not in readers and name not in merged.replaced]
        if missing:
            raise WeightsError(f"{where} lacks {len(missing)} of the model's weights: {', '.join(missing[:5])}")
        groups = ReverseMapping(plain).groups(form)
        written = {n: t for g in groups for n, t in g.convert({m: form[m] for m in g.members}).items()}
        written = {name: torch.empty_like(t) for name, t in written.items()}
        packing = Requantizer(plain, source, merged) if requantize is not None else None
        if packing is not None:
            written = packing.form(groups, form)
        writer = ModelDirWriter(target, written, max_shard_size, packing.packed if packing is not None else ())
        stack.callback(writer.clean_up)
        with Bar("merging", total_bytes(written), progress) as bar:
            done = 0
            for group in groups:
                if packing is not None and (copied := packing.unchanged(group, form)) is not None:
                    done += writer.write(copied)
                else:
                    values = {name: merged.value(name, readers) for name in group.members}
                    files = group.convert(values)
                    done += writer.write(files if packing is None else packing.pack(group, files))
                bar.at(done)
            if packing is not None:
                writer.write(packing.beside())
        identity = {**quick_identity(where), "checksums": source.checksums()}
        check_base(folder, where, identity=identity)  # what was merged, now that all of it is read
        if requantize is not None and packing is not None and shipped is not None:
            plain.config.quantization_config = dict(shipped.config)
            requantize(packing.errors)
        writer.finish(plain, _tokenizer(folder), verify)
    return target


def _locate_base(folder: Path, base: str | Path | None, stored: str | None) -> Path:
    """The folder of the base model: the given one, or the one that the adapter's files name (`stored`)."""
    where = Path(base if base is not None else find_base(folder, stored) if stored else "")
    if not where.exists() or not str(where):
        raise WeightsError(f"the adapter's base {str(where)!r} was not found; set its folder with base= (--base)")
    return where


def _read_base_config(where: Path, dequantized: Any) -> tuple[Any, Quantization | None, Shipped | None]:
    """The base's config without quantization, the quantization to round its weights with (None: do not round), and the
    formats of a model that was shipped in few bits."""
    config = read_config(where, None, False)
    packed: Any = getattr(config, "quantization_config", None)
    if is_shipped(packed):  # it was released with these values: there are no others to merge into
        del config.quantization_config
        return config, None, Shipped.of(packed)
    if packed is not None and not dequantized:
        raise QuantizationError(
            f"{where} contains 4-bit weights; rounding the merged weights to 4 bits would lose the adapter. Set the "
            f"folder of the model before quantization with base=, or merge into dequantized weights (dequantized=True, "
            f"--dequantized)"
        )
    if packed is None and dequantized is True:
        raise QuantizationError(f"{where} contains dense weights; set dequantized= to the quantization of the run")
    if packed is not None:
        del config.quantization_config
    return config, Quantization.of(packed if packed is not None else dequantized) if dequantized else None, None


def _base_readers(
    plain: Any,
    source: SafetensorsFiles,
    form: dict[str, torch.Tensor],
    how: Quantization | None,
    stored_dtype: torch.dtype,
) -> dict[str, TensorReader]:
    """Readers for the base's weights: rounded to 4 bits if `how` is given, embeddings with the rows of the result."""
    mapping = find_readers(plain, {name: tuple(t.shape) for name, t in plain.state_dict().items()}, source)
    plain._weight_conversions = mapping.conversions
    readers = mapping.readers
    if how is not None:
        readers |= rounded_readers(plain, source, readers, how, stored_dtype, plain.dtype)
    for name in may_grow(plain, {id(p): [n] for n, p in plain.named_parameters()}) & readers.keys():
        if readers[name].shape[0] < form[name].shape[0]:
            readers[name] = grown_reader(readers[name], form[name].shape[0], alone=True)
    return readers


def _with_adapter_layers(plain: Any, config: Any) -> Any:
    """The model with the adapter's layers, on the meta device."""
    from peft import get_peft_model

    if getattr(config, "init_lora_weights", None) in CHANGE_BASE:
        config.init_lora_weights = True  # there are no weights to compute it from yet
    try:
        with torch.device("meta"):
            return get_peft_model(plain, config)
    except (RuntimeError, NotImplementedError) as error:
        raise WeightsError(
            f"{kind_of(config)} adapters cannot be merged layer by layer ({first_line(error)}); merge it with PEFT "
            f"(merge_and_unload)"
        ) from error


def _read_adapter(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Load the adapter's tensors into the model and return them by name. (PEFT's loading would move them to meta.)"""
    loaded: dict[str, torch.Tensor] = {}
    with open_adapter(folder) as source:
        for name, reader in adapter_readers(model, source).items():
            path, _, own = name.rpartition(".")
            module = model.get_submodule(path)
            if own in buffers_of(module):
                loaded[name] = buffers_of(module)[own] = reader[()]
            else:
                loaded[name] = parameters_of(module)[own] = nn.Parameter(reader[()], requires_grad=False)
    return loaded


def _form(model: Any) -> dict[str, torch.Tensor]:
    """The tensors to write, on the meta device: tied ones once, with the dtypes that the model keeps."""
    kept = dtypes_kept(model, model.dtype, dict(model.named_parameters()))
    form: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen and name not in (model._keys_to_ignore_on_save or ()):
            form[name] = value.detach().to(kept.get(name, value.dtype))
        seen.add(id(value))
    return form


def _tokenizer(folder: Path) -> Any:
    """The tokenizer in the adapter's folder, which may have more tokens than the base's; None if there is none."""
    if not (folder / "tokenizer_config.json").exists():
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)
