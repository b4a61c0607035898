"""The prompts in a user's file for sample generations: text with one prompt per line, or JSON lines.

Reads and checks without torch, so that a wrong file is found before anything starts. `samples.py` answers them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.config.errors import ConfigError
from fullshard.data.messages import messages_of, template_kwargs_of, tools_of
from fullshard.data.raw_row import BadRow

EXPECTED = (
    'expected {"messages": [{"role": …, "content": …}, …]} or {"prompt": …}, and "reference", "tools" and '
    '"chat_template_kwargs" if there are any'
)


@dataclass(frozen=True)
class Question:
    """A conversation to answer, and the expected answer where there is one."""

    messages: tuple[dict[str, Any], ...]
    reference: str | None = None
    tools: tuple[dict[str, Any], ...] | None = None
    """The tools that the chat template describes to the model."""
    template_kwargs: dict[str, Any] | None = None
    """Additional variables for the chat template."""


def read_prompts(name: str) -> list[Question]:
    """The prompts in a file. An assistant's turn at the end of a conversation becomes the reference."""
    path = Path(name).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"sample_prompts: {path} cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"sample_prompts: {path} is not UTF-8 text.") from None
    json_lines = path.suffix in (".jsonl", ".json", ".ndjson")
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            found.append(_from_json(line, f"{path}:{number}") if json_lines else _user_turn(line.strip()))
    if not found:
        raise ConfigError(f"sample_prompts: {path} holds no prompt.")
    return found


def _user_turn(text: str, reference: str | None = None) -> Question:
    return Question(({"role": "user", "content": text},), reference)


def _from_json(line: str, where: str) -> Question:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"sample_prompts: {where} is not JSON ({error}); {EXPECTED}.") from None
    row = row if isinstance(row, dict) else {}
    messages, prompt, reference = row.get("messages"), row.get("prompt"), row.get("reference")
    if reference is not None and not isinstance(reference, str):
        raise ConfigError(f"sample_prompts: {where}: reference is {reference!r}; expected text.")
    if isinstance(prompt, str) and prompt.strip():
        return _user_turn(prompt, reference)
    try:
        turns = messages_of(messages, "messages")
        tools, template_kwargs = tools_of(row.get("tools")), template_kwargs_of(row.get("chat_template_kwargs"))
    except BadRow as bad:
        raise ConfigError(f"sample_prompts: {where}: {EXPECTED}; got {line[:120]} ({bad.why})") from None
    if turns[-1]["role"] == "assistant":
        answer = turns.pop()["content"]
        reference = reference or answer
    if not turns:
        raise ConfigError(f"sample_prompts: {where} holds an answer without a prompt.")
    return Question(tuple(turns), reference, tools, template_kwargs)
