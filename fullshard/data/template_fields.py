"""Checks that a chat template renders tools, tool calls, reasoning and roles; rows it would drop parts of are rejected.

A template is a program, so each kind of field is tested once: a small conversation with that field is rendered, and a
probe word in the field must appear in the text. A field that the template has under another name is renamed.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fullshard.config.errors import ConfigError, DataError
from fullshard.data.chat_template import built_in_name
from fullshard.data.messages import REASONING
from fullshard.data.render_chat import PROBE, ChatMessage, render

ARGUMENT, CONTENT = f"{PROBE}Argument", f"{PROBE}Content"
USER: ChatMessage = {"role": "user", "content": "Hello"}
CALL = {"id": "abcDEF123", "type": "function", "function": {"name": PROBE, "arguments": {"word": ARGUMENT}}}
RESULT: ChatMessage = {"role": "tool", "content": "42", "name": PROBE, "tool_call_id": CALL["id"]}
ANSWER: ChatMessage = {"role": "assistant", "content": "Done"}
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
Special = tuple[tuple[str, Any], ...]
PLAIN_KEYS, PLAIN_ROLES = {"role", "content"}, {"user", "assistant"}
"""Messages with only these keys and roles need no test."""


def _rendered(template: str, special: Special, messages: Sequence[ChatMessage], tools: Any) -> str | None:
    """The text of a small conversation; None if the template rejects it."""
    try:
        return render(template, messages, tools, dict(special))[0]
    except ConfigError:  # it does not end
        raise
    except Exception:  # it requires other messages than these
        return None


def _renders(template: str, special: Special, messages: Sequence[ChatMessage], word: str, tools: Any = None) -> bool:
    """Whether a word in the messages or the tools appears in the rendered text."""
    return word in (_rendered(template, special, messages, tools) or "")


@functools.lru_cache(maxsize=64)
def renders_tools(template: str, special: Special) -> bool:
    """Whether a template renders a row's tools."""
    system = {"role": "system", "content": "Be kind"}
    trials = ([USER], [USER, ANSWER], [system, USER, ANSWER])
    return any(_renders(template, special, trial, PROBE, [TOOL]) for trial in trials)


class CallForm(NamedTuple):
    """The form of tool calls that a template renders."""

    content: str | None
    """The content of a message without text."""
    text: bool
    """Whether arguments must be JSON text rather than an object."""

    def calling(self, message: ChatMessage, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The message with these calls, in this form."""
        content = message.get("content")
        rendered_calls = (
            [{**call, "function": self._function(call["function"])} for call in calls] if self.text else [*calls]
        )
        return {**message, "content": self.content if content is None else content, "tool_calls": rendered_calls}

    def _function(self, function: Mapping[str, Any]) -> dict[str, Any]:
        return {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}


@functools.lru_cache(maxsize=64)
def call_form(template: str, special: Special, with_text: bool = False) -> CallForm | None:
    """The form in which a template renders tool calls, of messages with text (`with_text`) or without; None if it omits
    the calls or the text."""
    turn: ChatMessage = {"role": "assistant", "content": CONTENT if with_text else None}
    words = (ARGUMENT, CONTENT) if with_text else (ARGUMENT,)
    for form in (CallForm(None, False), CallForm("", False), CallForm(None, True), CallForm("", True)):
        call = form.calling(turn, [CALL])
        for trial in ([USER, call], [USER, call, RESULT, ANSWER]):
            texts = (_rendered(template, special, trial, tools) or "" for tools in (None, [TOOL]))
            if any(all(word in text for word in words) for text in texts):
                return form
    return None


@functools.lru_cache(maxsize=64)
def reasoning_name(template: str, special: Special, name: str, calls: bool = False) -> str | None:
    """The key under which a template renders the assistant's reasoning in the last turn, or with a tool call; None if
    it does not render it."""
    form = call_form(template, special) if calls else None
    turn = ANSWER if form is None else form.calling({"role": "assistant"}, [CALL])
    for known in (name, *(other for other in REASONING if other != name)):
        reasoned = {**turn, known: CONTENT}
        trials = [[USER, reasoned]] if form is None else [[USER, reasoned], [USER, reasoned, RESULT, ANSWER]]
        if any(_renders(template, special, trial, CONTENT) for trial in trials):
            return known
    return None


@functools.lru_cache(maxsize=64)
def variables(template: str) -> frozenset[str]:
    """The variables that a template uses."""
    from jinja2 import meta
    from transformers.utils.chat_template_utils import _compile_jinja_template

    environment = _compile_jinja_template(template).environment
    return frozenset(meta.find_undeclared_variables(environment.parse(template)))


@functools.lru_cache(maxsize=64)
def renders_role(template: str, special: Special, role: str) -> bool:
    """Whether a template renders messages of this role, or rejects them with an error."""
    message = {**RESULT, "role": role, "content": CONTENT}
    call: ChatMessage = {"role": "assistant", "content": "Wait", "tool_calls": [CALL]}
    system = [message, USER, ANSWER]
    trials = (
        [system]
        if role in ("system", "developer")
        else [[USER, call, message, ANSWER], [USER, ANSWER, message, ANSWER]]
    )
    renderings = [_rendered(template, special, trial, None) for trial in trials]
    return any(text is None or CONTENT in text for text in renderings)


def adapt_messages(
    messages: Sequence[ChatMessage],
    tools: Sequence[Mapping[str, Any]] | None,
    template: str,
    tokenizer: Any,
    where: str,
) -> Sequence[ChatMessage]:
    """The messages in the form that a template renders; raises `DataError` if it would drop a part of them."""
    if not tools and all(message.keys() == PLAIN_KEYS and message["role"] in PLAIN_ROLES for message in messages):
        return messages
    if "developer" not in template:
        messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
    special = tuple((k, v if isinstance(v, str) else tuple(v)) for k, v in tokenizer.special_tokens_map.items())
    if tools and not renders_tools(template, special):
        raise _dropped(where, template, "`tools`", OWN)
    for role in {message["role"] for message in messages} - PLAIN_ROLES:
        if not renders_role(template, special, role):
            raise _dropped(where, template, f"a {role} message", "use another template (chat_template_format), or")
    return [_adapt_message(message, template, special, where) for message in messages]


def _adapt_message(message: ChatMessage, template: str, special: Special, where: str) -> ChatMessage:
    calls = message.get("tool_calls")
    if calls:
        form = call_form(template, special, message["content"] is not None)
        if form is None:
            alone = call_form(template, special)
            raise _dropped(where, template, "tool calls" if alone is None else "a tool call beside text", OWN)
        message = form.calling(message, calls)
    for name in REASONING:
        if message["role"] == "assistant" and message.get(name):
            field_name = reasoning_name(template, special, name, bool(calls))
            if field_name is None:
                raise _dropped(
                    where,
                    template,
                    f"`{name}`",
                    "put it into the content, or",
                )
            message = {field_name if k == name else k: v for k, v in message.items()}
    return message


OWN = "use the model's own template (chat_template_format none) if it renders them, or qwen, or"


def _dropped(where: str, template: str, what: str, instead: str) -> DataError:
    built_in = built_in_name(template)
    return DataError(
        f"{where}: the row has {what}, which the chat template{f' {built_in}' if built_in else ''} does not render: it "
        f"would be missing from the training text; {instead} leave such rows out (on_bad_row skip)."
    )
