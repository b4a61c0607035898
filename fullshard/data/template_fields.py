"""Which parts of a row a chat template writes: tools, tool calls, reasoning. What it would drop is refused.

A template is a program, so it is tried, once for each kind of field: a small conversation that has the field, with a
word in it that must appear in the text. A part that the template knows by another name is given that name.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fullshard.data.built_in_templates import built_in_name
from fullshard.data.messages import REASONING
from fullshard.data.render_chat import PROBE, ChatMessage, render
from fullshard.errors import DataError

ARGUMENT, SAID = f"{PROBE}Argument", f"{PROBE}Said"
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
PLAIN, SPOKEN = {"role", "content"}, {"user", "assistant"}
"""Messages with these keys and of these roles need no trial."""


def _written(template: str, special: Special, messages: Sequence[ChatMessage], tools: Any) -> str | None:
    """The text of a small conversation; None if the template refuses it."""
    try:
        return render(template, messages, tools, dict(special))[0]
    except Exception:  # it wants other messages than these
        return None


def _writes(template: str, special: Special, messages: Sequence[ChatMessage], word: str, tools: Any = None) -> bool:
    """Whether a template writes a word that is in the messages or the tools."""
    return word in (_written(template, special, messages, tools) or "")


@functools.lru_cache(maxsize=64)
def writes_tools(template: str, special: Special) -> bool:
    """Whether a template writes the functions that a row offers."""
    system = {"role": "system", "content": "Be kind"}
    trials = ([USER], [USER, ANSWER], [system, USER, ANSWER])
    return any(_writes(template, special, trial, PROBE, [TOOL]) for trial in trials)


class CallForm(NamedTuple):
    """How a message must call a tool so that a template writes the call."""

    content: str | None
    """What the message has as its content where it says nothing."""
    text: bool
    """Whether arguments are JSON text rather than an object."""

    def calling(self, message: ChatMessage, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The message with these calls, in this form."""
        content = message.get("content")
        made = [{**call, "function": self._function(call["function"])} for call in calls] if self.text else [*calls]
        return {**message, "content": self.content if content is None else content, "tool_calls": made}

    def _function(self, function: Mapping[str, Any]) -> dict[str, Any]:
        return {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}


@functools.lru_cache(maxsize=64)
def call_form(template: str, special: Special, says: bool = False) -> CallForm | None:
    """The form in which a template writes tool calls, of messages that say something besides or not; None if it leaves
    the calls out, or what is said."""
    turn: ChatMessage = {"role": "assistant", "content": SAID if says else None}
    words = (ARGUMENT, SAID) if says else (ARGUMENT,)
    for form in (CallForm(None, False), CallForm("", False), CallForm(None, True), CallForm("", True)):
        call = form.calling(turn, [CALL])
        for trial in ([USER, call], [USER, call, RESULT, ANSWER]):
            texts = (_written(template, special, trial, tools) or "" for tools in (None, [TOOL]))
            if any(all(word in text for word in words) for text in texts):
                return form
    return None


@functools.lru_cache(maxsize=64)
def reasoning_name(template: str, special: Special, name: str, calls: bool = False) -> str | None:
    """The name under which a template writes what the assistant thought in its last turn, or before it called a tool;
    None if it does not."""
    form = call_form(template, special) if calls else None
    turn = ANSWER if form is None else form.calling({"role": "assistant"}, [CALL])
    for known in (name, *(other for other in REASONING if other != name)):
        thought = {**turn, known: SAID}
        trials = [[USER, thought]] if form is None else [[USER, thought], [USER, thought, RESULT, ANSWER]]
        if any(_writes(template, special, trial, SAID) for trial in trials):
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
    call: ChatMessage = {"role": "assistant", "content": "Wait", "tool_calls": [CALL]}
    system = [said, USER, ANSWER]
    trials = [system] if role == "system" else [[USER, call, said, ANSWER], [USER, ANSWER, said, ANSWER]]
    found = [_written(template, special, trial, None) for trial in trials]
    return any(text is None or SAID in text for text in found)


def adapt_messages(
    messages: Sequence[ChatMessage],
    tools: Sequence[Mapping[str, Any]] | None,
    template: str,
    tokenizer: Any,
    where: str,
) -> Sequence[ChatMessage]:
    """The messages in the words of a template, or a `DataError` if it would leave a part of them out."""
    if not tools and all(message.keys() == PLAIN and message["role"] in SPOKEN for message in messages):
        return messages
    special = tuple((k, v if isinstance(v, str) else tuple(v)) for k, v in tokenizer.special_tokens_map.items())
    if tools and not writes_tools(template, special):
        raise _dropped(where, template, "`tools`", OWN)
    for role in {message["role"] for message in messages} - SPOKEN:
        if not writes_role(template, special, role):
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
            known = reasoning_name(template, special, name, bool(calls))
            if known is None:
                raise _dropped(where, template, f"`{name}`", "put it into the content, as the model is to write it, or")
            message = {known if k == name else k: v for k, v in message.items()}
    return message


OWN = "use the model's own template (chat_template_format none) if it knows them, or qwen, or"


def _dropped(where: str, template: str, what: str, instead: str) -> DataError:
    known = built_in_name(template)
    return DataError(
        f"{where}: the row has {what}, which the chat template{f' {known}' if known else ''} does not write: it would "
        f"be left out of what is learnt; {instead} leave such rows out (on_bad_row skip)."
    )
