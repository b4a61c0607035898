"""The messages of a conversation, from the words of OpenAI, ShareGPT and others: role, text, tool calls, weight.

A message becomes {role, content}, what else is in it stays for the chat template. Which columns hold messages is said
in `row_formats.py`; whether a template writes all of a message, in `template_fields.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fullshard.data.raw_row import BadRow, parse_json, short

ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response", "function", "ipython"), "tool"),
}
"""Who speaks, by the names that files give them, in any case."""
WEIGHTS = ("weight", "train", "training", "loss")
"""Keys of a message that say whether it is learnt: OpenAI's, Axolotl's, ms-swift's."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message that hold what was thought before it was said."""
RESERVED = (
    "messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize",
    "continue_final_message", "return_dict", "return_tensors", "return_assistant_tokens_mask",
)  # fmt: skip
"""What `chat_template_kwargs` cannot set: each has its own place."""


def text_of(value: Any, what: str) -> str:
    """The value, if it is text that can be encoded."""
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
    """The value as a list; tables such as CSV hold it as JSON text."""
    value = _parsed(value, what, "[")
    if hasattr(value, "tolist"):  # numpy's and torch's
        value = value.tolist()
    if not isinstance(value, list | tuple) or not value:
        raise BadRow(f"`{what}` is {short(value)}; expected a list of {of}.")
    return value


def _parsed(value: Any, what: str, opens: str) -> Any:
    if not (isinstance(value, str) and value.lstrip().startswith(opens)):
        return value
    try:
        return parse_json(value)
    except BadRow as bad:
        raise BadRow(f"`{what}`: {bad.why}") from None


def messages_from_json(*values: Any) -> Sequence[Any]:
    """The values; as lists where all of them are JSON text of messages, which is how CSV holds these."""
    lists = []
    for value in values:
        try:
            lists.append(parse_json(value) if isinstance(value, str) and value.lstrip().startswith("[") else None)
        except BadRow:
            return values
    told = all(isinstance(part, list) and part and all(_is_message(m) for m in part) for part in lists)
    return lists if told else values


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and ("role" in value or "from" in value)


def messages_of(value: Any, what: str) -> list[dict[str, Any]]:
    """{role, content} messages; `weight`, where one is given, is 0 or 1."""
    return [message_of(m, f"{what}[{i}]") for i, m in enumerate(list_of(value, what, "{role, content} objects"))]


def message_of(message: Any, what: str) -> dict[str, Any]:
    """{role, content}, from that or from ShareGPT's {from, value}. What else is in it is kept for the template."""
    if not isinstance(message, Mapping):
        raise BadRow(f"{what} is {short(message)}; expected an object with role and content.")
    speaker, said = ("from", "value") if "from" in message and "role" not in message else ("role", "content")
    role, content = message.get(speaker), message.get(said)
    known = ROLES.get(role.lower()) if isinstance(role, str) else None
    if known is None:
        raise BadRow(f"{what} has the role {short(role)}; expected one of {', '.join(dict.fromkeys(ROLES.values()))}.")
    # Tables give every message the keys of all messages, and null where one has none.
    more = {k: plain(v, what) for k, v in message.items() if k not in (speaker, said) and v is not None}
    if more.get("train_detail"):
        raise BadRow(f"{what} has `train_detail`; parts of a message cannot be weighed, only whole ones (`weight`).")
    weight = _weight(more, what)
    calls = _calls(more, content if str(role).lower() == "function_call" else None, what)
    if str(role).lower() == "function_call":
        content = None
    if isinstance(content, list | tuple):
        content = "".join(_part(part, what) for part in content)
    if not isinstance(content, str) and not (content is None and calls):
        raise BadRow(f"{what} has the content {short(content)}; expected text.")
    text_of(content or "", f"the content of {what}")
    silent = not (content or "").strip()
    if known in ("user", "assistant") and silent and not calls:
        raise BadRow(f"{what}: the {known} says nothing; expected text.")
    said_here = {"role": known, "content": None if calls and silent else content}
    return {**said_here, **more, **({"tool_calls": calls} if calls else {}), **weight}


def _part(part: Any, what: str) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
    if not isinstance(text, str):
        raise BadRow(f"{what} has {short(part)} in its content; expected text, or parts of type text.")
    return text


def _weight(more: dict[str, Any], what: str) -> dict[str, int]:
    """Whether the message is learnt, taken out of its keys; {} where nothing says so."""
    given = {name: more.pop(name) for name in WEIGHTS if name in more}
    for name, value in given.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            raise BadRow(f"{what} has the {name} {short(value)}; expected 0 or 1.")
    if len({int(value) for value in given.values()}) > 1:
        raise BadRow(f"{what} has {' and '.join(f'{k} {v}' for k, v in given.items())}; expected one of them.")
    return {"weight": int(next(iter(given.values())))} if given else {}


def _calls(more: dict[str, Any], told: Any, what: str) -> list[dict[str, Any]]:
    """The tool calls of a message, taken out of its keys: OpenAI's `tool_calls`, its older `function_call`, or what
    ShareGPT's function_call turn tells as JSON text."""
    calls = _parsed(more.pop("tool_calls", None), f"{what}.tool_calls", "[")
    older = more.pop("function_call", None)
    if told is not None:
        calls = _parsed(_parsed(told, what, "["), what, "{")
    elif not calls and older:
        calls = older
    if not calls:
        return []
    found = calls if isinstance(calls, list) else [calls]
    return [_call(call, f"{what}.tool_calls[{i}]") for i, call in enumerate(found)]


def _call(call: Any, what: str) -> dict[str, Any]:
    """{function: {name, arguments}}, with arguments as an object: templates write it as JSON themselves."""
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
    """Plain data without nulls, checked to be such: a template may write any of it."""
    try:
        text = json.dumps(value, ensure_ascii=False)
        text.encode()
        return json.loads(text, object_pairs_hook=lambda pairs: {k: v for k, v in pairs if v is not None})
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRow(f"{what} holds {short(value)}, which is no plain data ({error}).") from None


def tools_of(value: Any) -> tuple[dict[str, Any], ...] | None:
    """The functions that a row offers: a list of JSON schemas, or one as JSON text. None where it offers none."""
    value = _parsed(value, "tools", "[")
    if value is None or (isinstance(value, str | list | tuple) and len(value) == 0):
        return None
    tools = [plain(tool, f"tools[{i}]") for i, tool in enumerate(list_of(value, "tools", "JSON schemas of functions"))]
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise BadRow(f"tools[{i}] is {short(tool)}; expected the JSON schema of a function.")
    return tuple(tools)


def template_kwargs_of(value: Any) -> dict[str, Any] | None:
    """What a row says to the template besides its messages: an object, or one as JSON text."""
    value = _parsed(value, "chat_template_kwargs", "{")
    if value in (None, ""):
        return None
    if not isinstance(value, Mapping) or not all(isinstance(k, str) and k.isidentifier() for k in value):
        raise BadRow(f"`chat_template_kwargs` is {short(value)}; expected an object of names and values.")
    taken = [name for name in value if name in RESERVED or name.endswith("_token")]
    if taken:
        raise BadRow(f"`chat_template_kwargs` sets {taken[0]}, which is not the row's to set.")
    return plain({k: v for k, v in value.items() if v is not None}, "`chat_template_kwargs`") or None
