"""The model and tokenizer of a run before they have values: read from their configuration, checked against the data.

Weights are read later, when the plan is known (`assemble.py`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from fullshard import accelerator, runtime
from fullshard.data.chat_template import Prepared, prepare_tokenizer
from fullshard.data.token_table import TokenTable
from fullshard.errors import ConfigError, first_line
from fullshard.lora import virtual_tokens
from fullshard.models.inner_model import causal, embedding_rows
from fullshard.models.rope_scaling import longest_document, scale_rope
from fullshard.quant.config import Quantization, dense_dtype
from fullshard.quant.quantize import quantize_model
from fullshard.train import adapter
from fullshard.train.adapter import Say
from fullshard.train.config import SFTConfig
from fullshard.train.dataset_options import needed, templates_of
from fullshard.weights import load as loading
from fullshard.weights.adapter_base import lasting_name
from fullshard.weights.adapter_files import other_rows, stored_rows
from fullshard.weights.dtypes import choose_dtype
from fullshard.weights.locate import open_source
from fullshard.weights.resize_vocab import grow_in_memory


def read_tokenizer(config: SFTConfig, place: Path | str | None, earlier: Path | None = None) -> Any:
    """The tokenizer that is named; else that of the adapter that is gone on with, if it has one; else the model's."""
    from transformers import AutoTokenizer

    beside = earlier is not None and (earlier / "tokenizer_config.json").is_file()
    source = config.tokenizer_name_or_path or (earlier if beside else place)
    if source is None:
        raise ConfigError("there is no tokenizer: give processing_class= (or tokenizer=), or tokenizer_name_or_path.")
    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no tokenizer could be read from {str(source)!r}: {first_line(error)[:200]}") from None


def empty_model(config: SFTConfig, folder: Path, say: Say) -> nn.Module:
    """The causal language model in `folder`, on the meta device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        shape = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no model configuration could be read from {folder}: {first_line(error)[:200]}") from None
    shape.name_or_path = lasting_name(folder)
    if config.rope_scaling is not None:
        scale_rope(shape, config.rope_scaling, config.max_seq_len, say)
    packed = getattr(shape, "quantization_config", None)
    if packed is not None and config.use_4bit_quantization:
        say(f"{folder} is stored in 4 bits already and is read as it is; the 4-bit options are not used.")
    four_bits = Quantization.of(packed) if packed is not None else adapter.quantization(config)
    shape._attn_implementation = attention(config, say)
    try:
        with contextlib.closing(open_source(folder)) as source:
            dtype = choose_dtype(config.torch_dtype, shape, source)
            if four_bits is not None and config.torch_dtype == "auto":
                dtype = dense_dtype(four_bits.scheme.storage) or dtype
            model = loading.on_meta(AutoModelForCausalLM, shape, dtype, folder, False)
            loading.untie_what_differs(model, source, None)
            if four_bits is not None:
                quantize_model(model, four_bits, {name: entry.shape for name, entry in source.entries.items()})
            return model
    except ValueError as error:
        if "Unrecognized configuration class" in str(error):
            raise ConfigError(f"{folder} holds a {shape.model_type} model; expected a causal language model.") from None
        raise


def attention(config: SFTConfig, say: Say) -> str | None:
    """The attention implementation asked for; None leaves it to transformers."""
    if config.attn_implementation:
        return config.attn_implementation
    if not config.use_flash_attn:
        return None
    if not accelerator.is_accelerator(runtime.device()):
        say("use_flash_attn: there is no GPU here; torch's own attention is used.")
    elif importlib.util.find_spec("flash_attn") is None:
        say("use_flash_attn: flash-attn is not installed; torch's own attention is used.")
    else:
        return "flash_attention_2"
    return None


def prepared_tokenizer(config: SFTConfig, tokenizer: Any) -> Prepared:
    """The tokenizer with the template of the run, and the tokens that this and those of its data sets need."""
    more = needed(templates_of(config))
    return prepare_tokenizer(tokenizer, config.chat_template_format, config.chat_template_path, more)


def resized(model: Any) -> bool:
    """Whether a model that was handed over has other token rows than the base it names."""
    inner = causal(model)
    return other_rows(getattr(inner.config, "_name_or_path", None), inner.config)


class Vocabulary(NamedTuple):
    """What became of model, tokenizer and adapter when they met."""

    peft_config: Any
    """The adapter's configuration, new tokens included; None for full fine-tuning."""
    grown: bool
    """Whether the model has more token rows than its files."""


def settle_vocabulary(
    config: SFTConfig, model: Any, tokenizer: Any, peft_config: Any, earlier: Path | None, say: Say
) -> Vocabulary:
    """Choose the chat template, give tokenizer and model the tokens it needs, and let those train."""
    prepared = prepared_tokenizer(config, tokenizer)
    for note in prepared.notes:
        say(note)
    rows = embedding_rows(model)
    new = make_room(model, tokenizer, prepared.added, say, stored_rows(earlier) if earlier is not None else 0)
    if prepared.added:
        end_turns(model, tokenizer)
    if earlier is not None:
        peft_config = adapter.continued_config(config, earlier, say)
        if lost := adapter.missing_tokens(peft_config, model, new):
            raise ConfigError(
                f"the adapter {earlier} was trained without {' '.join(tokenizer.convert_ids_to_tokens(lost))}, which "
                f"the template needs as tokens: go on with the template and tokenizer it was trained with, or start a "
                f"new adapter."
            )
    elif peft_config is not None:
        chosen = adapter.chosen_tokens(config, tokenizer, embedding_rows(model))
        peft_config = adapter.with_tokens(peft_config, model, sorted({*new, *chosen}))
    elif hasattr(model, "peft_config"):
        held = model.peft_config[model.active_adapters[0]]
        if adapter.missing_tokens(held, causal(model), new):
            say("the new tokens do not train: the adapter is your own; name them in its trainable_token_indices.")
    return Vocabulary(peft_config, embedding_rows(model) > rows)


def make_room(model: Any, tokenizer: Any, added: list[str], say: Say, least: int = 0) -> list[int]:
    """Give the model's embedding and head a row for every token; the tokens that are new to the model.

    Without values yet, new rows get theirs when the files are read; in a model in memory they start at the mean here.
    """
    rows = embedding_rows(model)
    spare = spare_tokens(tokenizer) - {*added}
    vocabulary = {token: i for token, i in tokenizer.get_vocab().items() if i < rows or token not in spare}
    size = max(least, *(i + 1 for i in vocabulary.values()))
    beyond = {token: i for token, i in vocabulary.items() if i >= rows}
    if foreign := set(beyond) - set(tokenizer.get_added_vocab()):
        raise ConfigError(
            f"the tokenizer has {len(tokenizer)} tokens, the model's embedding {rows} rows ({len(foreign)} of its "
            f"words have none): they do not belong together. Name the model's own tokenizer."
        )
    new = sorted({*beyond.values(), *(vocabulary[token] for token in added)})
    if size > rows:
        _resize(model, size)
    if new:
        named = " ".join(sorted((t for t in vocabulary if vocabulary[t] in new), key=vocabulary.__getitem__)[:8])
        grown = (
            f"grows from {rows:,} to {size:,} rows; new ones start at the mean" if size > rows else "has rows for them"
        )
        say(f"{len(new)} new token{'s' * (len(new) > 1)} ({named}): the model's embedding {grown}.")
    return new


def spare_tokens(tokenizer: Any) -> set[str]:
    """Tokens that the tokenizer's class brings along by itself and that nothing writes: Qwen2's adds <|endoftext|> for
    unknown words to any vocabulary. Without a row of their own they do no harm."""
    parameters = inspect.signature(type(tokenizer).__init__).parameters.values()
    brought = {str(p.default) for p in parameters if p.name.endswith("_token") and p.default}
    return brought - {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token}


def _resize(model: Any, size: int) -> None:
    from transformers import PreTrainedModel

    rows = embedding_rows(model)
    if not isinstance(model, PreTrainedModel) or hasattr(model, "peft_config") or hasattr(model, "_fullshard_engine"):
        raise ConfigError(
            f"the tokenizer needs {size} token rows, the {type(model).__name__} has {rows}, and it cannot be resized "
            f"as it is: call resize_token_embeddings({size}) on the plain model before adapters or shards are added."
        )
    model.resize_token_embeddings(size, mean_resizing=False)
    ends = [end for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None]
    for weight in {id(p): p for end in ends for p in end.parameters()}.values():
        if not weight.is_meta:
            grow_in_memory(weight, rows)


def end_turns(model: Any, tokenizer: Any) -> None:
    """Let the model's generation stop where the tokenizer says that a text ends."""
    settings = getattr(causal(model), "generation_config", None)
    if settings is None or tokenizer.eos_token_id is None:
        return
    known = settings.eos_token_id
    ends = list(known) if isinstance(known, list | tuple) else [] if known is None else [known]
    if tokenizer.eos_token_id not in ends:
        settings.eos_token_id = [*ends, tokenizer.eos_token_id] if ends else tokenizer.eos_token_id


def uses_flash(model: Any) -> bool:
    return "flash" in str(getattr(model.config, "_attn_implementation", None))


def check_rows(model: Any, table: TokenTable) -> None:
    """Refuse rows that the model cannot take."""
    inner = causal(model)
    longest = int((table.document_starts[1:] - table.document_starts[:-1]).max())
    positions, before = longest_document(inner.config), virtual_tokens.count(model)
    if positions is not None and longest + before > positions:
        prompt = f" and {before} virtual ones before them" if before else ""
        raise ConfigError(
            f"the data has documents of {longest} tokens{prompt}, {type(inner).__name__} has {positions} positions; "
            f"set max_seq_len to {positions - before} or less, or rope_scaling where the model has rotary positions."
        )
    top = int(table.tokens.max())
    if top >= embedding_rows(model):
        raise ConfigError(
            f"the data has token {top}, the model's embedding {embedding_rows(model)} rows: another model's tokens."
        )


def local_folder(model: Any) -> str | None:
    """Where a model's base lies, for cards and adapters."""
    name = getattr(model.config, "_name_or_path", None)
    return str(Path(name)) if name and Path(name).exists() else name or None
