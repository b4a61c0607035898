"""An adapter added to the weights it was trained on: whole weights that `from_pretrained` reads, without the model.

PEFT's own layers do the adding, one at a time: each gets its base weight from the files, merges, is written and let go
of. So memory holds the adapter and one layer, and the result is what PEFT's `merge_and_unload` gives, bit for bit.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.errors import QuantizationError, WeightsError, first_line
from fullshard.paths import check_new_folder
from fullshard.progress import Bar
from fullshard.quant.config import Quantization
from fullshard.weights.adapter_base import check_base, find_base
from fullshard.weights.adapter_files import adapter_readers, open_adapter, stored_rows
from fullshard.weights.dequantized import rounded_readers
from fullshard.weights.dtypes import dtypes_kept
from fullshard.weights.key_mapping import ReverseMapping, find_readers
from fullshard.weights.load import choose_dtype, class_of, on_meta, read_config
from fullshard.weights.locate import open_source
from fullshard.weights.merge_layers import CHANGE_BASE, MergedLayers, check_kind, kind_of
from fullshard.weights.model_dir_writer import ModelDirWriter
from fullshard.weights.resize_vocab import grown_reader, may_grow
from fullshard.weights.safetensors_writer import total_bytes


def merge_adapter(
    adapter: str | Path,
    out: str | Path,
    *,
    base: str | Path | None = None,
    dtype: torch.dtype | str | None = None,
    dequantized: Any = None,
    held_as: torch.dtype | str | None = None,
    max_shard_size: int | str = "10GB",
    verify: bool = True,
    progress: bool = True,
) -> Path:
    """Write the model that an adapter (PEFT's files) makes of its base. One process; no ranks.

    - `base`: the folder of the model it was trained on; by default the one that the adapter names.
    - `dtype`: of the result; None keeps the base's. Base weights are converted first, then the adapter is added.

    An adapter trained beside 4-bit weights is added to the weights as they were before quantisation, unless
    `dequantized` says how they were quantised (a `BitsAndBytesConfig` or a mapping with its fields; True where the base
    is stored in 4 bits): then to the weights as they come back from 4 bits, converted to `dtype`, which is what was
    trained. `held_as` is the dtype that they had when the run quantised them; None is the base's.
    """
    from peft import PeftConfig

    folder, target = Path(adapter), Path(out)
    rows = stored_rows(folder)
    given = PeftConfig.from_pretrained(str(folder))
    check_kind(given)
    stored = given.base_model_name_or_path
    where = Path(base if base is not None else find_base(folder, stored) if stored else "")
    if not where.exists() or not str(where):
        raise WeightsError(f"the adapter's base {str(where)!r} is not here; name its folder with base= (--base)")
    check_base(folder, where)
    check_new_folder(target)
    config = read_config(where, None, False)
    packed = getattr(config, "quantization_config", None)
    if packed is not None and not dequantized:
        raise QuantizationError(
            f"{where} holds 4-bit weights, and adding an adapter to those would round it away; name the folder of the "
            f"model before quantisation with base=, or add it to their dequantised values (dequantized=True, "
            f"--dequantized)"
        )
    if packed is None and dequantized is True:
        raise QuantizationError(f"{where} holds dense weights; say with dequantized= how the run quantised them")
    if packed is not None:
        del config.quantization_config
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(open_source(where))
        held = choose_dtype(held_as, config, source)
        plain = on_meta(class_of(None, config), config, choose_dtype(dtype, config, source), where, False)
        if rows > plain.get_input_embeddings().weight.shape[0]:
            plain.resize_token_embeddings(rows, mean_resizing=False)
        found = find_readers(plain, {name: tuple(t.shape) for name, t in plain.state_dict().items()}, source)
        plain._weight_conversions = found.conversions
        form = _form(plain)
        if dequantized:
            how = Quantization.of(packed if packed is not None else dequantized)
            found.readers |= rounded_readers(plain, source, found.readers, how, held, plain.dtype)
        for name in may_grow(plain, {id(p): [n] for n, p in plain.named_parameters()}) & found.readers.keys():
            if found.readers[name].shape[0] < form[name].shape[0]:
                found.readers[name] = grown_reader(found.readers[name], form[name].shape[0], alone=True)
        start = getattr(given, "init_lora_weights", None)
        model = _laid_out(plain, given)
        merged = MergedLayers(model, _read_adapter(model, folder), form, start)
        missing = [name for name in form if name not in found.readers and name not in merged.replaced]
        if missing:
            raise WeightsError(f"{where} does not hold {len(missing)} of the model's weights: {', '.join(missing[:5])}")
        groups = ReverseMapping(plain).groups(form)
        written = {n: t for g in groups for n, t in g.convert({m: form[m] for m in g.members}).items()}
        written = {name: torch.empty_like(t) for name, t in written.items()}
        outgoing = ModelDirWriter(target, written, max_shard_size)
        stack.callback(outgoing.clean_up)
        with Bar("merging", total_bytes(written), progress) as bar:
            done = 0
            for group in groups:
                values = {name: merged.value(name, found.readers) for name in group.members}
                done += outgoing.write(group.convert(values))
                bar.at(done)
        outgoing.finish(plain, _tokenizer(folder), verify)
    return target


def _laid_out(plain: Any, config: Any) -> Any:
    """The model with the adapter put into it, without values."""
    from peft import get_peft_model

    if getattr(config, "init_lora_weights", None) in CHANGE_BASE:
        config.init_lora_weights = True  # there are no weights to take anything off yet
    try:
        with torch.device("meta"):
            return get_peft_model(plain, config)
    except (RuntimeError, NotImplementedError) as error:
        raise WeightsError(
            f"a {kind_of(config)} adapter cannot be merged layer by layer ({first_line(error)}); merge it with PEFT "
            f"(merge_and_unload)"
        ) from error


def _read_adapter(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Give the adapter's tensors their values; those, by name. (PEFT's own loading would move them to meta.)"""
    brought: dict[str, torch.Tensor] = {}
    with open_adapter(folder) as source:
        for name, reader in adapter_readers(model, source).items():
            place, _, own = name.rpartition(".")
            module = model.get_submodule(place)
            if own in module._buffers:
                brought[name] = module._buffers[own] = reader[()]
            else:
                brought[name] = module._parameters[own] = nn.Parameter(reader[()], requires_grad=False)
    return brought


def _form(model: Any) -> dict[str, torch.Tensor]:
    """The tensors to write, on the meta device: tied ones once, and in the dtypes that the model keeps."""
    kept = dtypes_kept(model, model.dtype, dict(model.named_parameters()))
    form: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen and name not in (model._keys_to_ignore_on_save or ()):
            form[name] = value.detach().to(kept.get(name, value.dtype))
        seen.add(id(value))
    return form


def _tokenizer(folder: Path) -> Any:
    """The tokenizer beside the adapter, which may know more tokens than the base's."""
    if not (folder / "tokenizer_config.json").exists():
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)
