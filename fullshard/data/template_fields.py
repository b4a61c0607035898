"""Which parts of a row a chat template writes: tools, tool calls, reasoning. What it would drop is refused.

A template is a program, so it is tried, once for each kind of field: a small conversation that has the field, with a
word in it that must appear in the text. A part that the template knows by another name is given that name.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from fullshard.data.built_in import name_of
from fullshard.data.chat import PROBE, Message, render
from fullshard.data.messages import REASONING
from fullshard.errors import DataError

ARGUMENT, SAID = f"{PROBE}Argument", f"{PROBE}Said"
USER: Message = {"role": "user", "content": "Hello"}
CALL = {"id": "abcDEF123", "type": "function", "function": {"name": PROBE, "arguments": {"word": ARGUMENT}}}
RESULT: Message = {"role": "tool", "content": "42", "name": PROBE, "tool_call_id": CALL["id"]}
ANSWER: Message = {"role": "assistant", "content": "Done"}
TOOL = {
    "type": "function",
    "function": {
        "name": PROBE,
        "description": "Looks up a word.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "The word."}},
            "required": ["word"],
        },
    },
}
DROPPED = object()
"""Stands for a field that a template does not write."""
Special = tuple[tuple[str, Any], ...]
PLAIN, SPOKEN = {"role", "content"}, {"user", "assistant"}
"""Messages with these keys and of these roles need no trial."""


def _written(template: str, special: Special, messages: Sequence[Message], tools: Any) -> str | None:
    """The text of a small conversation; None if the template refuses it."""
    try:
        return render(template, messages, tools, dict(special))[0]
    except Exception:  # it wants other messages than these
        return None


def _writes(template: str, special: Special, messages: Sequence[Message], word: str, tools: Any = None) -> bool:
    """Whether a template writes a word that is in the messages or the tools."""
    return word in (_written(template, special, messages, tools) or "")


@functools.lru_cache(maxsize=64)
def writes_tools(template: str, special: Special) -> bool:
    """Whether a template writes the functions that a row offers."""
    system = {"role": "system", "content": "Be kind"}
    trials = ([USER], [USER, ANSWER], [system, USER, ANSWER])
    return any(_writes(template, special, trial, PROBE, [TOOL]) for trial in trials)


@functools.lru_cache(maxsize=64)
def content_beside_calls(template: str, special: Special) -> Any:
    """What a message that only calls a tool must have as its content (None or "") so that the call is written;
    `DROPPED` if it never is."""
    for content in (None, ""):
        call: Message = {"role": "assistant", "content": content, "tool_calls": [CALL]}
        for trial in ([USER, call], [USER, call, RESULT, ANSWER]):
            if any(_writes(template, special, trial, ARGUMENT, tools) for tools in (None, [TOOL])):
                return content
    return DROPPED


@functools.lru_cache(maxsize=64)
def reasoning_name(template: str, special: Special, name: str) -> str | None:
    """The name under which a template writes what the assistant thought in its last turn; None if it does not."""
    for known in (name, *(other for other in REASONING if other != name)):
        if _writes(template, special, [USER, {**ANSWER, known: PROBE}], PROBE):
            return known
    return None


@functools.lru_cache(maxsize=64)
def variables(template: str) -> frozenset[str]:
    """The names that a template looks at."""
    from jinja2 import meta
    from transformers.utils.chat_template_utils import _compile_jinja_template

    environment = _compile_jinja_template(template).environment
    return frozenset(meta.find_undeclared_variables(environment.parse(template)))


@functools.lru_cache(maxsize=64)
def writes_role(template: str, special: Special, role: str) -> bool:
    """Whether a template writes what the system or a tool says; also if it refuses such messages with an error."""
    said = {**RESULT, "role": role, "content": SAID}
    call: Message = {"role": "assistant", "content": "Wait", "tool_calls": [CALL]}
    system = [said, USER, ANSWER]
    trials = [system] if role == "system" else [[USER, call, said, ANSWER], [USER, ANSWER, said, ANSWER]]
    found = [_written(template, special, trial, None) for trial in trials]
    return any(text is None or SAID in text for text in found)


def fit(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, template: str, tokenizer: Any, where: str
) -> Sequence[Message]:
    """The messages in the words of a template, or a `DataError` if it would leave a part of them out."""
    if not tools and all(message.keys() == PLAIN and message["role"] in SPOKEN for message in messages):
        return messages
    special = tuple((k, v if isinstance(v, str) else tuple(v)) for k, v in tokenizer.special_tokens_map.items())
    if tools and not writes_tools(template, special):
        raise _dropped(where, template, "`tools`", OWN)
    for role in {message["role"] for message in messages} - SPOKEN:
        if not writes_role(template, special, role):
            raise _dropped(where, template, f"a {role} message", "use another template (chat_template_format), or")
    return [_fit(message, template, special, where) for message in messages]


def _fit(message: Message, template: str, special: Special, where: str) -> Message:
    if message.get("tool_calls"):
        content = content_beside_calls(template, special)
        if content is DROPPED:
            raise _dropped(where, template, "tool calls", OWN)
        if message["content"] is None and content is not None:
            message = {**message, "content": content}
    for name in REASONING:
        if message["role"] == "assistant" and message.get(name):
            known = reasoning_name(template, special, name)
            if known is None:
                raise _dropped(where, template, f"`{name}`", "put it into the content, as the model is to write it, or")
            message = {known if k == name else k: v for k, v in message.items()}
    return message


OWN = "use the model's own template (chat_template_format none) if it knows them, or qwen, or"


def _dropped(where: str, template: str, what: str, instead: str) -> DataError:
    known = name_of(template)
    return DataError(
        f"{where}: the row has {what}, which the chat template{f' {known}' if known else ''} does not write: it would "
        f"be left out of what is learnt; {instead} leave such rows out (on_bad_row skip)."
    )
