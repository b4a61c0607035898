"""Conversations as text: chat templates, and which characters of the result the assistant wrote.

`chatml` and `zephyr` are built in; otherwise the tokenizer's own template is used. Spans are found by rendering the
conversation turn by turn, so they hold for any template that only ever appends; one that does not is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fullshard.errors import ConfigError, DataError

TEMPLATES = {
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "zephyr": (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '</s>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    ),
}
MARKERS = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "zephyr": ("<|system|>", "<|user|>", "<|assistant|>"),
}
"""What a template would like to be single tokens."""
END_OF_TURN = {"chatml": "<|im_end|>", "zephyr": "</s>"}


def choose_template(tokenizer: Any, chat_template_format: str) -> str | None:
    """The Jinja text of the template to use: a built-in one, or (`none`) the tokenizer's own, if it has one."""
    if chat_template_format in TEMPLATES:
        return TEMPLATES[chat_template_format]
    own = getattr(tokenizer, "chat_template", None)
    if isinstance(own, dict):
        own = own.get("default")
    return own


def prepare_tokenizer(tokenizer: Any, chat_template_format: str, rows: int) -> list[str]:
    """Make the tokenizer fit for training; returns notes for the user.

    A built-in template's markers become single tokens where the model's embedding has rows to spare (`rows` in all);
    elsewhere they stay spelled in ordinary tokens, which a frozen embedding handles better than untrained rows.
    """
    notes = []
    if chat_template_format in TEMPLATES:
        tokenizer.chat_template = TEMPLATES[chat_template_format]
        vocabulary = tokenizer.get_vocab()
        missing = [m for m in MARKERS[chat_template_format] if m not in vocabulary]
        if missing and len(tokenizer) + len(missing) <= rows:
            tokenizer.add_special_tokens({"additional_special_tokens": missing}, replace_extra_special_tokens=False)
            notes.append(f"added the tokens {' '.join(missing)}: the model's embedding has rows for them.")
        elif missing:
            notes.append(
                f"the tokenizer lacks {' '.join(missing)} and the model's embedding ({rows} rows) has none to "
                f"spare, so "
                f"they are spelled in ordinary tokens."
            )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
        notes.append(f"the tokenizer has no padding token; {tokenizer.pad_token!r} is used (padding is never learnt).")
    if tokenizer.pad_token_id is None:
        raise ConfigError("the tokenizer has neither a padding nor an end-of-text token; set tokenizer.pad_token.")
    if len(tokenizer) > rows:
        raise ConfigError(
            f"the tokenizer has {len(tokenizer)} tokens, the model's embedding {rows} rows: they do not belong "
            f"together. "
            f"Name the model's own tokenizer, or resize the model's embedding first."
        )
    return notes


def render(tokenizer: Any, template: str, messages: Sequence[Mapping[str, Any]], prompt: bool, where: str) -> str:
    try:
        return tokenizer.apply_chat_template(
            list(messages), chat_template=template, tokenize=False, add_generation_prompt=prompt
        )
    except Exception as error:
        if type(error).__module__.split(".")[0] != "jinja2":
            raise
        raise DataError(f"{where}: the chat template refuses this conversation: {error}.") from None


def conversation(
    tokenizer: Any, template: str | None, messages: Sequence[Mapping[str, Any]], where: str
) -> tuple[str, list[tuple[int, int]]]:
    """The conversation as text, and the character spans of what the assistant says, its end-of-turn mark included."""
    if template is None:
        raise DataError(
            f"{where}: the row is a conversation, but the tokenizer has no chat template. Choose one with "
            f"chat_template_format (chatml or zephyr)."
        )
    whole = render(tokenizer, template, messages, False, where)
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(tokenizer, template, messages[:i], True, where)
        upto = render(tokenizer, template, messages[: i + 1], False, where)
        if not (whole.startswith(upto) and upto.startswith(before)):
            raise DataError(
                f"{where}: the chat template changes earlier turns when later ones follow (turn {i}), so what the "
                f"assistant wrote cannot be told apart. Use chat_template_format chatml, or assistant_only_loss false."
            )
        # What follows the end-of-turn mark (a line break) is the next turn's lead-in, not the assistant's.
        content = message["content"].strip()
        at = upto.find(content, len(before))
        tail = at + len(content) if at >= 0 else len(upto)
        spans.append((len(before), tail + len(upto[tail:].rstrip())))
    return whole, spans
