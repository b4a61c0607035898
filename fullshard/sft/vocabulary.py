"""Tokenizer and model fitted to each other before weights are read: the chat template, a row for every token that it
needs, data that the model can take.
"""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import Any, NamedTuple

from fullshard.config.errors import ConfigError, one_line
from fullshard.data.chat_template import Prepared, prepare_tokenizer
from fullshard.data.token_table import TokenTable
from fullshard.distributed.ranks import run_on_all_ranks
from fullshard.lora import virtual_tokens
from fullshard.models.causal_lm import embedding_rows, get_causal_lm
from fullshard.models.rope_scaling import longest_document
from fullshard.sft import adapter
from fullshard.sft.adapter import Say
from fullshard.sft.base_model import ModelFolders
from fullshard.sft.checked_run import CheckedRun
from fullshard.sft.run_data import dataset_templates, template_markers
from fullshard.sft.sft_config import SFTConfig
from fullshard.weights.adapter_files import stored_rows
from fullshard.weights.transforms import grow_in_memory


def load_tokenizer(run: CheckedRun, folders: ModelFolders) -> Any:
    """The run's tokenizer: the script's, or the one that the settings choose. All ranks must call it."""
    if run.tokenizer is not None:
        return run.tokenizer
    return run_on_all_ranks(lambda: read_tokenizer(run.config, folders.origin, folders.adapter), "tokenizer")


def read_tokenizer(config: SFTConfig, place: Path | str | None, adapter_dir: Path | None = None) -> Any:
    """The tokenizer in the settings; else that of the adapter to resume, if it has one; else the model's."""
    from transformers import AutoTokenizer

    beside = adapter_dir is not None and (adapter_dir / "tokenizer_config.json").is_file()
    source = config.tokenizer_name_or_path or (adapter_dir if beside else place)
    if source is None:
        raise ConfigError("there is no tokenizer: give processing_class= (or tokenizer=), or tokenizer_name_or_path.")
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # damaged files raise errors of many kinds
        raise ConfigError(f"no tokenizer could be read from {str(source)!r}: {one_line(error)}") from None


def prepared_tokenizer(config: SFTConfig, tokenizer: Any) -> Prepared:
    """The tokenizer with the run's chat template, and the tokens that its and the data sets' templates need."""
    more = template_markers(dataset_templates(config))
    return prepare_tokenizer(
        tokenizer, config.chat_template_format, config.chat_template_path, more, config.eos_token, config.pad_token
    )


class Vocabulary(NamedTuple):
    """The outcome of fitting model, tokenizer and adapter to each other."""

    peft_config: Any
    """PEFT's configuration of the adapter to add, new tokens included; None if there is none to add."""
    adapter_config: Any
    """The same, or that of the adapter that the model has already; None for full fine-tuning."""
    grown: bool
    """Whether the model has more token rows than its files."""


def prepare_vocabulary(
    config: SFTConfig, model: Any, tokenizer: Any, peft_config: Any, adapter_dir: Path | None, say: Say
) -> Vocabulary:
    """Choose the chat template, add the tokens it needs to tokenizer and model, and make them trainable. All ranks must
    call it; `adapter_dir` is the folder of the adapter to resume."""
    fit = functools.partial(_fit_vocabulary, config, model, tokenizer, peft_config, adapter_dir, say)
    return run_on_all_ranks(fit, "vocabulary")


def _fit_vocabulary(
    config: SFTConfig, model: Any, tokenizer: Any, peft_config: Any, adapter_dir: Path | None, say: Say
) -> Vocabulary:
    own = model.peft_config[model.active_adapters[0]] if hasattr(model, "peft_config") else None
    prepared = prepared_tokenizer(config, tokenizer)
    for note in prepared.notes:
        say(note)
    rows = embedding_rows(model)
    new = add_token_rows(
        model, tokenizer, prepared.added, say, stored_rows(adapter_dir) if adapter_dir is not None else 0
    )
    if prepared.added or config.eos_token is not None:
        add_end_token(model, tokenizer)
    if adapter_dir is not None:
        peft_config = adapter.resumed_config(config, adapter_dir, say)
        if lost := adapter.untrained_tokens(peft_config, model, new):
            raise ConfigError(
                f"the adapter {adapter_dir} was trained without {' '.join(tokenizer.convert_ids_to_tokens(lost))}, "
                f"which the template needs as tokens: resume with the template and tokenizer it was trained with, or "
                f"start a new adapter."
            )
    elif peft_config is not None:
        chosen = adapter.trainable_token_ids(config, tokenizer, embedding_rows(model))
        peft_config = adapter.train_tokens(peft_config, model, sorted({*new, *chosen}))
    elif own is not None and adapter.untrained_tokens(own, get_causal_lm(model), new):
        say("the new tokens are not trained: the model has its own adapter; name them in trainable_token_indices.")
    return Vocabulary(peft_config, peft_config if own is None else own, embedding_rows(model) > rows)


def add_token_rows(model: Any, tokenizer: Any, added: list[str], say: Say, least: int = 0) -> list[int]:
    """Add rows to the model's embedding and head so that every token has one; returns the tokens new to the model.

    New rows start at the mean of the others: here in a model in memory, else when the weights are read.
    """
    rows = embedding_rows(model)
    spare = spare_tokens(tokenizer) - {*added}
    vocabulary = {token: i for token, i in tokenizer.get_vocab().items() if i < rows or token not in spare}
    size = max(least, *(i + 1 for i in vocabulary.values()))
    beyond = {token: i for token, i in vocabulary.items() if i >= rows}
    if foreign := set(beyond) - set(tokenizer.get_added_vocab()):
        raise ConfigError(
            f"the tokenizer has {len(tokenizer)} tokens, the model's embedding {rows} rows ({len(foreign)} of its "
            f"tokens have none): they do not belong together. Give the model's own tokenizer."
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
    """Tokens that the tokenizer's class adds by itself and that no text contains: Qwen2's adds <|endoftext|> as the
    unknown token to any vocabulary. They need no row."""
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


def add_end_token(model: Any, tokenizer: Any) -> None:
    """Add the tokenizer's end-of-text token to those that end the model's generation."""
    settings = getattr(get_causal_lm(model), "generation_config", None)
    if settings is None or tokenizer.eos_token_id is None:
        return
    eos = settings.eos_token_id
    ends = list(eos) if isinstance(eos, list | tuple) else [] if eos is None else [eos]
    if tokenizer.eos_token_id not in ends:
        settings.eos_token_id = [*ends, tokenizer.eos_token_id] if ends else tokenizer.eos_token_id


def beyond_training(model: Any, tokenizer: Any, table: TokenTable) -> str:
    """A line about rows that are longer than what the tokenizer or the model was made for; empty if there are none.
    (`check_rows_fit` refuses those that the model has no positions for.)"""
    longest, text = int(table.facts["lengths"]["max"]), get_causal_lm(model).config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    target = rope.get("full_attention", rope)
    before, kind = target.get("original_max_position_embeddings"), target.get("rope_type", "default")
    limits = []
    if isinstance(before, int) and longest > before:
        limits.append(f"{before:,} positions before rope scaling ({kind})")
    most = getattr(tokenizer, "model_max_length", None)
    if isinstance(most, int) and longest > most:
        limits.append(f"{most:,} tokens that the tokenizer names (model_max_length), which cuts nothing here")
    return f"rows have up to {longest:,} tokens; the model was made for {' and '.join(limits)}." if limits else ""


def check_rows_fit(model: Any, table: TokenTable) -> None:
    """Refuse rows that are longer than the model's positions, or have tokens without an embedding row."""
    inner = get_causal_lm(model)
    longest = int(table.facts["lengths"]["max"])
    positions, before = longest_document(inner.config), virtual_tokens.count_virtual_tokens(model)
    if positions is not None and longest + before > positions:
        prompt = f" and {before} virtual ones before them" if before else ""
        raise ConfigError(
            f"the data has documents of {longest} tokens{prompt}, {type(inner).__name__} has {positions} positions; "
            f"set max_length to {positions - before} or less, or rope_scaling where the model has rotary positions."
        )
    top = int(table.facts["largest_token"])
    if top >= embedding_rows(model):
        raise ConfigError(
            f"the data has token {top}, the model's embedding {embedding_rows(model)} rows: the data was tokenized for "
            f"another model."
        )
