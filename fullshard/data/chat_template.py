"""Selects a run's chat template and prepares the tokenizer for it.

The template is built in (`built_in_templates.py`), read from a Jinja file or from another tokenizer, or the tokenizer's
own. It is checked when it is selected, before any conversation is rendered. Its markers are added to the tokenizer as
single tokens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.data.built_in_templates import BUILT_IN
from fullshard.errors import ConfigError, one_line

MARKER = re.compile("<[|\uff5c][^<>|\uff5c\\s]{1,40}[|\uff5c]>|<(?:start|end)_of_turn>")
"""Text in a user-provided template that is treated as a marker."""
AVAILABLE = {
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token",
    "unk_token", "sep_token", "pad_token", "cls_token", "mask_token", "additional_special_tokens",
}  # fmt: skip
"""Variables that a template can use, besides transformers' own functions."""


@dataclass(frozen=True)
class Template:
    """A selected chat template."""

    name: str
    text: str
    markers: tuple[str, ...] = ()
    """The markers that should be single tokens."""
    end: str | None = None
    """The end-of-turn token, if known."""


@dataclass(frozen=True)
class Prepared:
    """The changes that `prepare_tokenizer` made."""

    notes: list[str]
    added: list[str]
    """Tokens that were added to the vocabulary."""


def template_of(tokenizer: Any) -> str | None:
    """The Jinja text of the tokenizer's chat template, if it has one."""
    own = getattr(tokenizer, "chat_template", None)
    return own.get("default") if isinstance(own, dict) else own


def prepare_tokenizer(
    tokenizer: Any, chat_template_format: str = "none", path: str | None = None, more: Sequence[str] = (),
    eos_token: str | None = None, pad_token: str | None = None,
) -> Prepared:  # fmt: skip
    """Set the tokenizer's chat template, add the tokens that the template and `more` need, and set its EOS token and
    its padding token."""
    notes: list[str] = []
    chosen = choose(chat_template_format, path)
    if chosen is not None:
        if path and chat_template_format != "none":
            notes.append(
                f"chat_template_format {chat_template_format} is ignored: chat_template_path takes precedence."
            )
        tokenizer.chat_template = chosen.text
    vocabulary = tokenizer.get_vocab()
    wanted = dict.fromkeys((*(chosen.markers if chosen is not None else ()), *more))
    added = [marker for marker in wanted if marker not in vocabulary]
    if added:
        tokenizer.add_special_tokens({"additional_special_tokens": added}, replace_extra_special_tokens=False)
    if chosen is not None and chosen.end in added:  # so that generation stops at the end of a turn
        tokenizer.eos_token = chosen.end
    for name, token in (("eos_token", eos_token), ("pad_token", pad_token)):
        if token is not None and token not in tokenizer.get_vocab():
            raise ConfigError(
                f"{name} is {token!r}, which is not in the tokenizer's vocabulary; expected one of its tokens."
            )
        if token is not None:
            setattr(tokenizer, name, token)
    if tokenizer.pad_token_id is None:
        held = {tokenizer.eos_token_id: tokenizer.eos_token, tokenizer.unk_token_id: tokenizer.unk_token}
        held.pop(None, None)
        if held:
            tokenizer.pad_token = next(iter(held.values()))
            pad = repr(tokenizer.pad_token)
            notes.append(f"the tokenizer has no padding token; {pad} is used (padding has no loss).")
        else:
            added += ["<pad>"] if "<pad>" not in tokenizer.get_vocab() else []
            tokenizer.add_special_tokens({"pad_token": "<pad>"})
    return Prepared(notes, added)


def choose(chat_template_format: str, path: str | None) -> Template | None:
    """The template that the options select; None for the tokenizer's own."""
    if path is not None:
        return read_template(path)
    if chat_template_format in BUILT_IN:
        return Template(chat_template_format, *BUILT_IN[chat_template_format])
    return None


def read_template(path: str) -> Template:
    """Read a template from a Jinja file, or from a folder or Hub repository with a tokenizer."""
    place = Path(path).expanduser()
    option = f"chat_template_path: {place}"
    if place.is_file():
        try:
            text = place.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{option} cannot be read: {error}.") from None
        check(text, str(place))
        return Template(str(place), text, tuple(dict.fromkeys(MARKER.findall(text))))
    if (place / "chat_template.jinja").is_file() and not (place / "tokenizer_config.json").is_file():
        return read_template(str(place / "chat_template.jinja"))
    from transformers import AutoTokenizer

    try:
        other = AutoTokenizer.from_pretrained(place if place.is_dir() else path)
    except Exception as error:  # damaged files raise errors of many kinds
        raise ConfigError(
            f"chat_template_path: {path!r} is not a file, and no tokenizer could be loaded from it: {one_line(error)}"
        ) from None
    found = template_of(other)
    if found is None:
        raise ConfigError(f"{option} holds a tokenizer without a chat template; expected one, or a Jinja file.")
    check(found, str(place))
    special = [token.content for _, token in sorted(other.added_tokens_decoder.items()) if token.special]
    written = tuple(t for t in special if t in found or t == other.eos_token)
    return Template(str(place), found, written, other.eos_token)


def check(text: str, name: str) -> None:
    """Raise if a template cannot work: invalid Jinja, or variables that conversations do not have."""
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
    # Jinja takes a variable that the template sets in the branches of an `if` for an undeclared one.
    own = {name.name for name in tree.find_all(jinja2.nodes.Name) if name.ctx in ("store", "param")}
    missing = (meta.find_undeclared_variables(tree) & _needed(tree)) - AVAILABLE - own - set(environment.globals)
    if missing:
        raise ConfigError(
            f"the chat template {name} uses {', '.join(sorted(missing))}, which conversations do not have. It can use "
            f"messages, add_generation_prompt and the names of special tokens; test others with `is defined` first."
        )
    if "messages" not in meta.find_undeclared_variables(tree):
        raise ConfigError(f"the chat template {name} does not use `messages`: every conversation would be the same.")


def _needed(tree: Any) -> set[str]:
    """Variables whose value a template uses, rather than only testing whether they are defined."""
    from jinja2 import nodes

    tested = [t.node for t in tree.find_all(nodes.Test) if t.name in ("defined", "undefined", "none")]
    tested += [f.node for f in tree.find_all(nodes.Filter) if f.name in ("default", "d")]
    guarded = {node.name for node in tested if isinstance(node, nodes.Name)}
    conditions = [node.test for node in tree.find_all((nodes.If, nodes.CondExpr))]
    inside = {id(n) for test in conditions for n in (*test.find_all(nodes.Name), *([test] if _is_name(test) else []))}
    return {n.name for n in tree.find_all(nodes.Name) if n.ctx == "load" and id(n) not in inside} - guarded


def _is_name(node: Any) -> bool:
    from jinja2 import nodes

    return isinstance(node, nodes.Name)
