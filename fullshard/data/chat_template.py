"""Which chat template a run uses, and what its tokenizer needs for it: the template's own marks as single tokens.

Some are built in (`built_in_templates.py`); a file or another tokenizer's folder can be named; otherwise it is the
tokenizer's own. A template is checked when it is chosen, before any conversation is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.data.built_in_templates import BUILT_IN
from fullshard.errors import ConfigError

IN_FILES = re.compile("<[|\uff5c][^<>|\uff5c\\s]{1,40}[|\uff5c]>|<(?:start|end)_of_turn>")
"""What is taken for a mark in a template of the user's own."""
GIVEN = {
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token",
    "unk_token", "sep_token", "pad_token", "cls_token", "mask_token", "additional_special_tokens",
}  # fmt: skip
"""What a template may count on, besides transformers' own functions."""


@dataclass(frozen=True)
class Template:
    """A template of the user's choice."""

    name: str
    text: str
    markers: tuple[str, ...] = ()
    """What should be single tokens."""
    end: str | None = None
    """The mark that ends a turn, where it is known."""


@dataclass(frozen=True)
class Prepared:
    """What was done to a tokenizer."""

    notes: list[str]
    added: list[str]
    """Tokens that it lacked."""


def template_of(tokenizer: Any) -> str | None:
    """The Jinja text of the tokenizer's template, if it has one."""
    own = getattr(tokenizer, "chat_template", None)
    return own.get("default") if isinstance(own, dict) else own


def prepare_tokenizer(
    tokenizer: Any, chat_template_format: str = "none", path: str | None = None, more: Sequence[str] = ()
) -> Prepared:
    """Give the tokenizer the chosen template, the tokens that it (and `more`) needs, and something to pad with."""
    notes: list[str] = []
    chosen = choose(chat_template_format, path)
    if chosen is not None:
        if path and chat_template_format != "none":
            notes.append(f"chat_template_format {chat_template_format} is not used: chat_template_path overrules it.")
        tokenizer.chat_template = chosen.text
    vocabulary = tokenizer.get_vocab()
    wanted = dict.fromkeys((*(chosen.markers if chosen is not None else ()), *more))
    added = [mark for mark in wanted if mark not in vocabulary]
    if added:
        tokenizer.add_special_tokens({"additional_special_tokens": added}, replace_extra_special_tokens=False)
    if chosen is not None and chosen.end in added:  # whoever generates with this tokenizer should stop there
        tokenizer.eos_token = chosen.end
    if tokenizer.pad_token_id is None:
        held = {tokenizer.eos_token_id: tokenizer.eos_token, tokenizer.unk_token_id: tokenizer.unk_token}
        held.pop(None, None)
        if held:
            tokenizer.pad_token = next(iter(held.values()))
            pad = repr(tokenizer.pad_token)
            notes.append(f"the tokenizer has no padding token; {pad} is used (padding is never learnt).")
        else:
            added += ["<pad>"] if "<pad>" not in tokenizer.get_vocab() else []
            tokenizer.add_special_tokens({"pad_token": "<pad>"})
    return Prepared(notes, added)


def choose(chat_template_format: str, path: str | None) -> Template | None:
    """The template that the settings name; None for the tokenizer's own."""
    if path is not None:
        return read_template(path)
    if chat_template_format in BUILT_IN:
        return Template(chat_template_format, *BUILT_IN[chat_template_format])
    return None


def read_template(path: str) -> Template:
    """A template from a Jinja file, or from a folder (or hub name) with a tokenizer, whose special tokens it needs."""
    place = Path(path).expanduser()
    option = f"chat_template_path: {place}"
    if place.is_file():
        try:
            text = place.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{option} cannot be read: {error}.") from None
        check(text, str(place))
        return Template(str(place), text, tuple(dict.fromkeys(IN_FILES.findall(text))))
    if (place / "chat_template.jinja").is_file() and not (place / "tokenizer_config.json").is_file():
        return read_template(str(place / "chat_template.jinja"))
    from transformers import AutoTokenizer

    try:
        other = AutoTokenizer.from_pretrained(place if place.is_dir() else path)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"chat_template_path: {path!r} is no file, and no tokenizer could be read from it: {first}"
        ) from None
    found = template_of(other)
    if found is None:
        raise ConfigError(f"{option} holds a tokenizer without a chat template; expected one, or a Jinja file.")
    check(found, str(place))
    special = [token.content for _, token in sorted(other.added_tokens_decoder.items()) if token.special]
    written = tuple(t for t in special if t in found or t == other.eos_token)
    return Template(str(place), found, written, other.eos_token)


def check(text: str, name: str) -> None:
    """Refuse a template that cannot work: one that is no Jinja, or that prints what no conversation gives it."""
    import jinja2
    from jinja2 import meta
    from transformers.utils.chat_template_utils import _compile_jinja_template

    if not text.strip():
        raise ConfigError(f"the chat template {name} is empty.")
    try:
        environment = _compile_jinja_template(text).environment
        tree = environment.parse(text)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template {name} is not valid Jinja: line {error.lineno}: {error.message}"
        ) from None
    missing = (meta.find_undeclared_variables(tree) & _needed(tree)) - GIVEN - set(environment.globals)
    if missing:
        raise ConfigError(
            f"the chat template {name} needs {', '.join(sorted(missing))}, which conversations do not give. It can use "
            f"messages, add_generation_prompt and the names of special tokens; test others with `is defined` first."
        )
    if "messages" not in meta.find_undeclared_variables(tree):
        raise ConfigError(f"the chat template {name} does not use `messages`: every conversation would be the same.")


def _needed(tree: Any) -> set[str]:
    """Names whose value a template uses, rather than only asking whether there is one."""
    from jinja2 import nodes

    asked = [t.node for t in tree.find_all(nodes.Test) if t.name in ("defined", "undefined", "none")]
    asked += [f.node for f in tree.find_all(nodes.Filter) if f.name in ("default", "d")]
    guarded = {node.name for node in asked if isinstance(node, nodes.Name)}
    conditions = [node.test for node in tree.find_all((nodes.If, nodes.CondExpr))]
    inside = {id(n) for test in conditions for n in (*test.find_all(nodes.Name), *([test] if _name(test) else []))}
    return {n.name for n in tree.find_all(nodes.Name) if n.ctx == "load" and id(n) not in inside} - guarded


def _name(node: Any) -> bool:
    from jinja2 import nodes

    return isinstance(node, nodes.Name)
