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
from typing import Any, NamedTuple

from fullshard.config.errors import ConfigError, one_line


class BuiltIn(NamedTuple):
    """A built-in chat template."""

    text: str
    """The template in Jinja."""
    markers: tuple[str, ...]
    """The markers that should be single tokens."""
    end: str | None
    """The end-of-turn token; None if that is the tokenizer's EOS token."""


def _assistant_text(text: str) -> str:
    """A Jinja expression, inside a `{% generation %}` block if the message `m` is the assistant's."""
    marked = f"{{% generation %}}{{{{ {text} }}}}{{% endgeneration %}}"
    return f"{{% if m.role == 'assistant' %}}{marked}{{% else %}}{{{{ {text} }}}}{{% endif %}}"


def _generation_prompt(text: str) -> str:
    return f"{{% if add_generation_prompt %}}{{{{ {text!r} }}}}{{% endif %}}"


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}"
    + _assistant_text("m.content | trim + '<|eot_id|>'")
    + "{% endfor %}"
    + _generation_prompt("<|start_header_id|>assistant<|end_header_id|>\n\n")
)
ALTERNATE = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) or m.role not in ('user', 'assistant') %}"
    "{{ raise_exception('after the system message, user and assistant must take turns') }}{% endif %}"
)
LED = (
    "{% set led = messages | length > 0 and messages[0].role == 'system' %}"
    "{% set lead = messages[0].content + '\\n\\n' if led else '' %}{% set rest = messages[1:] if led else messages %}"
)
"""A system message that is prepended to the first user turn: `lead` is its text, `rest` the other messages."""
GEMMA = (
    LED
    + "{{ bos_token }}{% for m in rest %}"
    + ALTERNATE
    + "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else 'user') + '\\n' + (lead if loop.first else '') }}"
    + _assistant_text("m.content | trim + '<end_of_turn>'")
    + "{{ '\\n' }}{% endfor %}"
    + _generation_prompt("<start_of_turn>model\n")
)
MISTRAL = (
    LED
    + "{{ bos_token }}{% for m in rest %}"
    + ALTERNATE
    + "{% if m.role == 'user' %}{{ '[INST] ' + (lead if loop.first else '') + m.content + '[/INST]' }}{% endif %}"
    + "{% if m.role == 'assistant' %}{% generation %}{{ ' ' + m.content + eos_token }}{% endgeneration %}{% endif %}"
    + "{% endfor %}"
)
PHI = (
    "{% for m in messages %}{% if m.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('there is no role ' + m.role) }}{% endif %}{{ '<|' + m.role + '|>\\n' }}"
    + _assistant_text("m.content + '<|end|>'")
    + "{{ '\\n' }}{% endfor %}{% if not add_generation_prompt and eos_token != '<|end|>' %}{{ eos_token }}{% endif %}"
    + _generation_prompt("<|assistant|>\n")
)
QWEN_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
QWEN_TOOLS = (
    "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with "
    "function signatures within <tools></tools> XML tags:\n<tools>"
)
QWEN_CALLS = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
QWEN = (
    LED + f"{{{{ '<|im_start|>system\\n' + (messages[0].content if led else {QWEN_SYSTEM!r}) }}}}"
    f"{{% if tools %}}{{{{ {QWEN_TOOLS!r} }}}}{{% for tool in tools %}}{{{{ '\\n' + tool | tojson }}}}{{% endfor %}}"
    f"{{{{ {QWEN_CALLS!r} }}}}{{% endif %}}{{{{ '<|im_end|>\\n' }}}}"
    "{% for m in rest %}{% if m.role == 'tool' %}"
    "{% if loop.previtem is not defined or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{% if loop.nextitem is not defined or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{% elif m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}{% generation %}"
    "{% set said = m.content or '' %}{{ said }}{% for call in m.tool_calls or [] %}"
    "{{ ('\\n' if said or not loop.first else '') + '<tool_call>\\n{\"name\": \"' + call.function.name }}"
    "{{ '\", \"arguments\": ' + call.function.arguments | tojson + '}\\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    + _generation_prompt("<|im_start|>assistant\n")
)

BUILT_IN = {
    "chatml": BuiltIn(CHATML, ("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
    "zephyr": BuiltIn(ZEPHYR, ("<|system|>", "<|user|>", "<|assistant|>", "</s>"), "</s>"),
    "llama3": BuiltIn(LLAMA3, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "<|eot_id|>"),
    "gemma": BuiltIn(GEMMA, ("<start_of_turn>", "<end_of_turn>"), "<end_of_turn>"),
    "mistral": BuiltIn(MISTRAL, ("[INST]", "[/INST]"), None),
    "qwen": BuiltIn(QWEN, ("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
    "phi": BuiltIn(PHI, ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), "<|end|>"),
}


def built_in_name(template: str) -> str | None:
    """The name of a built-in template; None for any other template."""
    return next((name for name, built_in in BUILT_IN.items() if built_in.text == template), None)


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
    markers = dict.fromkeys((*(chosen.markers if chosen is not None else ()), *more))
    added = [marker for marker in markers if marker not in vocabulary]
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
        usable = {tokenizer.eos_token_id: tokenizer.eos_token, tokenizer.unk_token_id: tokenizer.unk_token}
        usable.pop(None, None)
        if usable:
            tokenizer.pad_token = next(iter(usable.values()))
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
        check_template(text, str(place))
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
    template = template_of(other)
    if template is None:
        raise ConfigError(f"{option} holds a tokenizer without a chat template; expected one, or a Jinja file.")
    check_template(template, str(place))
    special = [token.content for _, token in sorted(other.added_tokens_decoder.items()) if token.special]
    written = tuple(t for t in special if t in template or t == other.eos_token)
    return Template(str(place), template, written, other.eos_token)


def check_template(text: str, name: str) -> None:
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
