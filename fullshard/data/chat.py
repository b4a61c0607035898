"""Conversations as text: chat templates, and which characters of the result the assistant wrote.

What is learnt is exact or refused. A template with `{% generation %}` marks says it itself. Under any other, a turn
begins where the rendering of what came before it, the assistant's cue included, ends; where it ends is told by
rendering it once more with another text in its place. Which template there is, and which tokens it wants, is said in
`templates.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fullshard.errors import DataError

Message = Mapping[str, Any]
Span = tuple[int, int]
"""Where in a text something begins and ends, in characters."""

MARKED = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
"""How a template marks what the assistant wrote."""
PROBE = "Zq7assistantX0"
"""Stands in a turn's place where only the text around it matters; longer where a conversation has it."""


@dataclass(frozen=True)
class Conversation:
    """A conversation under a template."""

    tokenizer: Any
    template: str | None
    messages: Sequence[Message]
    where: str

    def text(self) -> str:
        return self._render(self.messages)[0]

    def learnt(self, first: int = 0) -> tuple[str, list[Span]]:
        """The text, and the spans of what the assistant says from this message on, end-of-turn marks included."""
        if self.template is not None and MARKED.search(self.template):
            return self._marked(first)
        whole = self.text()
        turns = [i for i, m in enumerate(self.messages) if m["role"] == "assistant" and i >= first]
        return whole, [self._turn(i, whole) for i in turns]

    def _marked(self, first: int) -> tuple[str, list[Span]]:
        whole, spans = self._render(self.messages, marks=True)
        if first and any(m["role"] == "assistant" for m in self.messages[:first]):
            border = self._render(self.messages[:first])[0]
            if not whole.startswith(border):
                raise self._refused(first, "it writes the prompt differently once the completion follows")
            spans = [span for span in spans if span[0] >= len(border)]
        return whole, spans

    def _turn(self, i: int, whole: str) -> Span:
        """Where the assistant's turn lies in the whole: from its cue to its end-of-turn mark."""
        before = self._render(self.messages[:i], cue=True)[0] if i else self._cue()
        alone = self._around(self.messages[: i + 1], i)
        if alone is None or not alone[0].startswith(before):
            raise self._refused(i, "it does not write the turn after the cue that it gives the assistant")
        # A line break behind an end-of-turn mark leads the next turn in. Blanks alone are the mark themselves.
        mark = alone[1].rstrip() or alone[1]
        within = self._around(self.messages, i) if i + 1 < len(self.messages) else alone
        if within is None or not within[1].startswith(mark):
            raise self._refused(i, "it changes earlier turns when later ones follow")
        end = len(whole) - len(within[1]) + len(mark)
        exact = whole.startswith(before) and within[0].startswith(before) and whole.endswith(within[1])
        if not exact or end < len(before):
            raise self._refused(i, "it changes earlier turns when later ones follow, or leaves this one out")
        return len(before), end

    def _around(self, messages: Sequence[Message], i: int) -> tuple[str, str] | None:
        """What the template writes before and after what message `i` says; None where it does not write that once."""
        probe = PROBE
        while any(probe in str(m.get("content")) for m in messages):
            probe += "X"
        shown = self._render([*messages[:i], {**messages[i], "content": probe}, *messages[i + 1 :]])[0]
        start, _, end = shown.partition(probe)
        return (start, end) if shown.count(probe) == 1 else None

    def _cue(self) -> str:
        """What leads an assistant in who speaks first."""
        try:
            return self._render([], cue=True)[0]
        except DataError:
            raise self._refused(0, "it cannot begin with the assistant") from None

    def _refused(self, i: int, why: str) -> DataError:
        return DataError(
            f"{self.where}: what the assistant says in turn {i} cannot be told apart exactly with this chat template: "
            f"{why}. Use chat_template_format chatml, a template with {{% generation %}} marks (chat_template_path), "
            f"or learn everything (assistant_only_loss and completion_only_loss false)."
        )

    def _render(self, messages: Sequence[Message], cue: bool = False, marks: bool = False) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        if self.template is None:
            raise DataError(
                f"{self.where}: the row is a conversation, but the tokenizer has no chat template. Choose one with "
                f"chat_template_format (chatml or zephyr) or chat_template_path."
            )
        try:
            texts, spans = render_jinja_template(
                conversations=[[dict(m) for m in messages]],
                chat_template=self.template,
                add_generation_prompt=cue,
                return_assistant_tokens_mask=marks,
                **self.tokenizer.special_tokens_map,
            )
        except Exception as error:  # a template is a program: anything may go wrong in it
            kind = "" if type(error).__module__.startswith("jinja2") else f"{type(error).__name__}: "
            said = str(error).strip().rstrip(".") or type(error).__name__
            raise DataError(f"{self.where}: the chat template refuses this conversation: {kind}{said}.") from None
        return texts[0], [(int(a), int(b)) for a, b in spans[0]] if marks else []


def conversation(
    tokenizer: Any, template: str | None, messages: Sequence[Message], where: str
) -> tuple[str, list[Span]]:
    """The conversation as text, and the spans of what the assistant says, its end-of-turn marks included."""
    return Conversation(tokenizer, template, messages, where).learnt()
