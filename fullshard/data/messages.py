"""Parses chat messages in the formats of OpenAI, ShareGPT and others: role, content, tool calls, weight.

A message becomes {role, content}; other keys are kept for the chat template. `row_formats.py` defines the columns that
hold messages, `template_fields.py` checks that a template renders every part of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fullshard.data.raw_row import BadRow, parse_json, short

ROLES = {
    "system": "system",
    "developer": "developer",
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response", "function", "ipython"), "tool"),
}
"""Role names in data files, in any case, and the roles they stand for. A developer's message is rendered as a system
message by templates that do not know that role (`template_fields.py`)."""
WEIGHTS = ("weight", "train", "training", "loss")
"""Keys of a message that tell whether it contributes to the loss: OpenAI's, Axolotl's, ms-swift's."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message that hold its reasoning."""
RESERVED = (
    "messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize",
    "continue_final_message", "return_dict", "return_tensors", "return_assistant_tokens_mask",
)  # fmt: skip
"""Variables that `chat_template_kwargs` cannot set."""


def text_of(value: Any, what: str) -> str:
    """The value, if it is text that can be encoded as UTF-8; otherwise raises `BadRow`."""
    if not isinstance(value, str):
        raise BadRow(f"{what} is {short(value)}; expected a string.")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise BadRow(
                f"{what} holds {value[error.start]!a} at character {error.start}, which is half of a surrogate pair or "
                f"a byte that is not UTF-8."
            ) from None
    return value


def list_of(value: Any, what: str, of: str) -> Sequence[Any]:
    """The value as a list; it may also be JSON text, as in CSV files."""
    value = _parsed(value, what, "[")
    if hasattr(value, "tolist"):  # numpy arrays and torch tensors
        value = value.tolist()
    if not isinstance(value, list | tuple) or not value:
        raise BadRow(f"`{what}` is {short(value)}; expected a list of {of}.", kind=f"no {what}")
    return value


def _parsed(value: Any, what: str, opens: str) -> Any:
    if not (isinstance(value, str) and value.lstrip().startswith(opens)):
        return value
    try:
        return parse_json(value)
    except BadRow as bad:
        raise BadRow(f"`{what}`: {bad.why}", kind=bad.kind) from None


def messages_from_json(*values: Any) -> Sequence[Any]:
    """The values, parsed to lists if all of them are JSON text of messages, as in CSV files."""
    lists = []
    for value in values:
        try:
            lists.append(parse_json(value) if isinstance(value, str) and value.lstrip().startswith("[") else None)
        except BadRow:
            return values
    are_messages = all(isinstance(part, list) and part and all(_is_message(m) for m in part) for part in lists)
    return lists if are_messages else values


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and ("role" in value or "from" in value)


def messages_of(value: Any, what: str) -> list[dict[str, Any]]:
    """Parse a list of messages to {role, content}; `weight`, if given, is 0 or 1."""
    return [message_of(m, f"{what}[{i}]") for i, m in enumerate(list_of(value, what, "{role, content} objects"))]


def message_of(message: Any, what: str) -> dict[str, Any]:
    """Parse {role, content} or ShareGPT's {from, value} to {role, content}. Other keys are kept for the template."""
    if not isinstance(message, Mapping):
        raise BadRow(f"{what} is {short(message)}; expected an object with role and content.")
    role_key, content_key = ("from", "value") if "from" in message and "role" not in message else ("role", "content")
    role, content = message.get(role_key), message.get(content_key)
    standard = ROLES.get(role.lower()) if isinstance(role, str) else None
    if standard is None:
        expected = ", ".join(dict.fromkeys(ROLES.values()))
        raise BadRow(f"{what} has the role {short(role)}; expected one of {expected}.", kind="unknown role")
    # Columnar files give every message the keys of all messages, with null where a message has none.
    more = {k: plain(v, what) for k, v in message.items() if k not in (role_key, content_key) and v is not None}
    if more.get("train_detail"):
        raise BadRow(f"{what} has `train_detail`; parts of a message cannot be weighted, only a whole one (`weight`).")
    weight = _weight(more, what)
    calls = _calls(more, content if str(role).lower() == "function_call" else None, what)
    if str(role).lower() == "function_call":
        content = None
    if isinstance(content, list | tuple):
        content = "".join(_part(part, what) for part in content)
    if not isinstance(content, str) and not (content is None and calls):
        kind = "null content" if content is None else "content that is not text"
        raise BadRow(f"{what} has the content {short(content)}; expected text.", kind=kind)
    text_of(content or "", f"the content of {what}")
    empty = not (content or "").strip()
    if standard in ("user", "assistant") and empty and not calls:
        raise BadRow(f"{what}: the {standard} message is empty; expected text.", kind="empty message")
    parsed = {"role": standard, "content": None if calls and empty else content}
    return {**parsed, **more, **({"tool_calls": calls} if calls else {}), **weight}


def _part(part: Any, what: str) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
    if not isinstance(text, str):
        raise BadRow(
            f"{what} has {short(part)} in its content; expected text, or parts of type text (images, video and audio "
            f"are not supported, with a vision-language model either)."
        )
    return text


def _weight(more: dict[str, Any], what: str) -> dict[str, int]:
    """Remove the weight from a message's keys: {"weight": 0 or 1}, or {} if it has none."""
    settings = {name: more.pop(name) for name in WEIGHTS if name in more}
    for name, value in settings.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            raise BadRow(f"{what} has the {name} {short(value)}; expected 0 or 1.")
    if len({int(value) for value in settings.values()}) > 1:
        raise BadRow(f"{what} has {' and '.join(f'{k} {v}' for k, v in settings.items())}; expected one of them.")
    return {"weight": int(next(iter(settings.values())))} if settings else {}


def _calls(more: dict[str, Any], call_text: Any, what: str) -> list[dict[str, Any]]:
    """Remove the tool calls from a message's keys: OpenAI's `tool_calls`, its older `function_call`, or the JSON text
    of ShareGPT's function_call turn."""
    calls = _parsed(more.pop("tool_calls", None), f"{what}.tool_calls", "[")
    older = more.pop("function_call", None)
    if call_text is not None:
        calls = _parsed(_parsed(call_text, what, "["), what, "{")
    elif not calls and older:
        calls = older
    if not calls:
        return []
    call_list = calls if isinstance(calls, list) else [calls]
    return [_call(call, f"{what}.tool_calls[{i}]") for i, call in enumerate(call_list)]


def _call(call: Any, what: str) -> dict[str, Any]:
    """{function: {name, arguments}} with arguments as an object: chat templates convert it to JSON themselves."""
    wrapped = isinstance(call, Mapping) and isinstance(call.get("function"), Mapping)
    function = call["function"] if wrapped else call
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise BadRow(f"{what} is {short(call)}; expected an object with the name and arguments of a function.")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _parsed(arguments, f"{what}.arguments", "{") if arguments.strip() else {}
    if not isinstance(arguments, Mapping):
        raise BadRow(f"{what} has the arguments {short(arguments)}; expected a JSON object.")
    whole = {**function, "arguments": arguments}
    return {**call, "function": whole} if wrapped else {"type": "function", "function": whole}


def plain(value: Any, what: str) -> Any:
    """The value as JSON-compatible data without nulls; raises `BadRow` if it is anything else."""
    try:
        text = json.dumps(value, ensure_ascii=False)
        text.encode()
        return json.loads(text, object_pairs_hook=lambda pairs: {k: v for k, v in pairs if v is not None})
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRow(f"{what} holds {short(value)}, which is not JSON-compatible ({error}).") from None


def tools_of(value: Any) -> tuple[dict[str, Any], ...] | None:
    """The tools of a row: a list of JSON schemas, JSON text of it or of each. None if there are none."""
    value = _parsed(value, "tools", "[")
    if value is None or (isinstance(value, str | list | tuple) and len(value) == 0):
        return None
    schemas = list_of(value, "tools", "JSON schemas of functions")
    tools = [plain(_parsed(tool, f"tools[{i}]", "{"), f"tools[{i}]") for i, tool in enumerate(schemas)]
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise BadRow(f"tools[{i}] is {short(tool)}; expected the JSON schema of a function.")
    return tuple(tools)


def template_kwargs_of(value: Any) -> dict[str, Any] | None:
    """Additional template variables of a row: an object, or JSON text of one."""
    value = _parsed(value, "chat_template_kwargs", "{")
    if value in (None, ""):
        return None
    if not isinstance(value, Mapping) or not all(isinstance(k, str) and k.isidentifier() for k in value):
        raise BadRow(f"`chat_template_kwargs` is {short(value)}; expected an object of names and values.")
    reserved = [name for name in value if name in RESERVED or name.endswith("_token")]
    if reserved:
        raise BadRow(f"`chat_template_kwargs` sets {reserved[0]}, which a row cannot set.")
    return plain({k: v for k, v in value.items() if v is not None}, "`chat_template_kwargs`") or None
