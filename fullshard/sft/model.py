"""Model, tokenizer and data of a run fitted to each other before weights are read: the chat template and the tokens it
needs, rows that the model can take, packing.

`read_model.py` makes the model; weights are read when the sharding plan is known (`assemble.py`).
"""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fullshard.config.errors import ConfigError, one_line
from fullshard.data.chat_template import Prepared, prepare_tokenizer
from fullshard.data.token_table import TokenTable
from fullshard.distributed import engines
from fullshard.distributed.ranks import agree, on_rank_0
from fullshard.fsdp.strategy import dtype_of
from fullshard.lora import virtual_tokens
from fullshard.models.attention import is_own
from fullshard.models.causal_lm import embedding_rows, get_causal_lm
from fullshard.models.experts import ExpertsVerdict, has_experts, try_experts, use_own_experts
from fullshard.models.packed_inputs import Packed, PackingMethod, takes_positions
from fullshard.models.packing_check import PackingVerdict, try_packing
from fullshard.models.rope_scaling import longest_document
from fullshard.sft import adapter
from fullshard.sft.adapter import Say
from fullshard.sft.checked_run import CheckedRun, base_of_adapter
from fullshard.sft.dataset_options import needed, templates_of
from fullshard.sft.read_model import uses_flash
from fullshard.sft.sft_config import SFTConfig
from fullshard.weights.adapter_base import check_base
from fullshard.weights.adapter_files import embedding_rows as adapter_rows
from fullshard.weights.adapter_files import other_rows, stored_rows
from fullshard.weights.config_limits import check_config
from fullshard.weights.locate import resolve
from fullshard.weights.transforms import grow_in_memory


class Folders(NamedTuple):
    """The local folders that a run starts from."""

    base: Path | None
    """The model's; None for a model in memory."""
    adapter: Path | None
    """That of the adapter to resume."""
    origin: Path | str | None
    """The model's folder, or the name that a model in memory was loaded from."""


def find_folders(run: CheckedRun) -> Folders:
    """Find the folders of model and adapter; names on the hub are downloaded. All ranks must call it."""
    adapter_folder = resolve(run.adapter) if run.adapter is not None else None
    model = run.model if run.model is not None or adapter_folder is None else base_of_adapter(adapter_folder)
    revision = {"revision": run.config.revision} if run.config.revision else {}
    base = resolve(model, **revision) if isinstance(model, str | Path) else None
    if base is not None:
        agree(lambda: check_config(base), "model configuration")
    origin = base or getattr(getattr(model, "config", None), "_name_or_path", None) or None
    if adapter_folder is not None and origin is not None:
        agree(lambda: check_base(adapter_folder, origin), "base of the adapter")
    return Folders(base, adapter_folder, origin)


def has_own_tables(model: Any, folders: Folders) -> bool:
    """Whether embedding and output head belong to the adapter, because those of its base differ."""
    if folders.adapter is not None:
        return bool(adapter_rows(folders.adapter))
    if folders.base is not None:
        return False
    inner = get_causal_lm(model)
    return other_rows(getattr(inner.config, "_name_or_path", None), inner.config)


def read_tokenizer(config: SFTConfig, place: Path | str | None, earlier: Path | None = None) -> Any:
    """The tokenizer in the settings; else that of the adapter to resume, if it has one; else the model's."""
    from transformers import AutoTokenizer

    beside = earlier is not None and (earlier / "tokenizer_config.json").is_file()
    source = config.tokenizer_name_or_path or (earlier if beside else place)
    if source is None:
        raise ConfigError("there is no tokenizer: give processing_class= (or tokenizer=), or tokenizer_name_or_path.")
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # damaged files raise errors of many kinds
        raise ConfigError(f"no tokenizer could be read from {str(source)!r}: {one_line(error)}") from None


def prepared_tokenizer(config: SFTConfig, tokenizer: Any) -> Prepared:
    """The tokenizer with the run's chat template, and the tokens that its and the data sets' templates need."""
    more = needed(templates_of(config))
    return prepare_tokenizer(
        tokenizer, config.chat_template_format, config.chat_template_path, more, config.eos_token, config.pad_token
    )


class Vocabulary(NamedTuple):
    """The outcome of fitting model, tokenizer and adapter to each other."""

    peft_config: Any
    """The adapter's configuration, new tokens included; None for full fine-tuning."""
    grown: bool
    """Whether the model has more token rows than its files."""


def prepare_vocabulary(
    config: SFTConfig, model: Any, tokenizer: Any, peft_config: Any, earlier: Path | None, say: Say
) -> Vocabulary:
    """Choose the chat template, add the tokens it needs to tokenizer and model, and make them trainable."""
    prepared = prepared_tokenizer(config, tokenizer)
    for note in prepared.notes:
        say(note)
    rows = embedding_rows(model)
    new = make_room(model, tokenizer, prepared.added, say, stored_rows(earlier) if earlier is not None else 0)
    if prepared.added or config.eos_token is not None:
        end_turns(model, tokenizer)
    if earlier is not None:
        peft_config = adapter.continued_config(config, earlier, say)
        if lost := adapter.missing_tokens(peft_config, model, new):
            raise ConfigError(
                f"the adapter {earlier} was trained without {' '.join(tokenizer.convert_ids_to_tokens(lost))}, which "
                f"the template needs as tokens: resume with the template and tokenizer it was trained with, or start a "
                f"new adapter."
            )
    elif peft_config is not None:
        chosen = adapter.chosen_tokens(config, tokenizer, embedding_rows(model))
        peft_config = adapter.with_tokens(peft_config, model, sorted({*new, *chosen}))
    elif hasattr(model, "peft_config"):
        held = model.peft_config[model.active_adapters[0]]
        if adapter.missing_tokens(held, get_causal_lm(model), new):
            say("the new tokens are not trained: the model has its own adapter; name them in trainable_token_indices.")
    return Vocabulary(peft_config, embedding_rows(model) > rows)


def make_room(model: Any, tokenizer: Any, added: list[str], say: Say, least: int = 0) -> list[int]:
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


def end_turns(model: Any, tokenizer: Any) -> None:
    """Add the tokenizer's end-of-text token to those that end the model's generation."""
    settings = getattr(get_causal_lm(model), "generation_config", None)
    if settings is None or tokenizer.eos_token_id is None:
        return
    known = settings.eos_token_id
    ends = list(known) if isinstance(known, list | tuple) else [] if known is None else [known]
    if tokenizer.eos_token_id not in ends:
        settings.eos_token_id = [*ends, tokenizer.eos_token_id] if ends else tokenizer.eos_token_id


def check_rows(model: Any, table: TokenTable) -> None:
    """Refuse rows that are longer than the model's positions, or have tokens without an embedding row."""
    inner = get_causal_lm(model)
    longest = int(table.facts["lengths"]["max"])
    positions, before = longest_document(inner.config), virtual_tokens.count(model)
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


def local_folder(model: Any) -> str | None:
    """The folder or name that a model was loaded from, for model cards and adapters."""
    name = getattr(model.config, "_name_or_path", None)
    return str(Path(name)) if name and Path(name).exists() else name or None


# --- experts and packing --------------------------------------------------------------------------------------------


def choose_experts(model: Any, say: Say, *, given: bool = False) -> None:
    """Let the experts of a mixture run our implementation, where a trial on the first rank shows that it is right. All
    ranks must call it. A model that was `given` in memory keeps an implementation that its script chose."""
    inner = get_causal_lm(model)
    chosen = getattr(inner.config.get_text_config(), "_experts_implementation", None)
    if not has_experts(inner) or engines.current().compiles_steps or (given and chosen not in (None, "grouped_mm")):
        return
    verdict: ExpertsVerdict = on_rank_0(functools.partial(try_experts, model), "experts check")
    if not (verdict.usable and use_own_experts(model)):
        say(f"experts: {type(inner).__name__} runs them by transformers' own code, because {verdict.reason}.")


def choose_packing(
    config: SFTConfig, model: Any, device: torch.device, say: Say, *, present: bool = True
) -> PackingMethod:
    """How this model receives packed rows, found by a trial on the first rank. All ranks must call it.

    Where the device is not in this machine (`present=False`), the trial runs on the CPU.
    """
    trial_device = device if present else torch.device("cpu")
    work = functools.partial(try_packing, model, trial_device, uses_flash(model))
    verdict: PackingVerdict = on_rank_0(work, "packing check")
    name = type(get_causal_lm(model)).__name__
    if verdict.way is not None:
        if verdict.way.alone or (verdict.way.masks and not is_own(get_causal_lm(model).config)):
            say(f"packing: documents are kept apart in {name} by {verdict.way}.")
        return verdict.way
    if verdict.tried:
        raise ConfigError(f"packing: {verdict.reason} in {name}, however they are given to it; leave packing out.")
    if not config.trust_packing:
        raise ConfigError(
            f"packing: whether {name} keeps documents in a row apart cannot be tried on a small model of its class "
            f"({verdict.reason}); leave packing out, or set trust_packing if you know that it does."
        )
    if not takes_positions(model):
        raise ConfigError(f"packing: {name} does not take position_ids, so documents would see each other.")
    say(f"packing: {name} is trusted to keep documents in a row apart; it could not be tried ({verdict.reason}).")
    return PackingMethod()


def packed_inputs(model: Any, method: PackingMethod | None, precision: str) -> Packed | None:
    """What isolates packed documents in a model that needs more than position ids, and lets our own attention know
    which rows are packed; None for other models."""
    method = method or PackingMethod()
    if method == PackingMethod() and not is_own(get_causal_lm(model).config):
        return None
    return Packed(model, method, dtype_of(precision) if precision != "no" else get_causal_lm(model).dtype)
