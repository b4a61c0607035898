"""Conversations as text: chat templates, and which characters of the result belong to which message.

What is learnt is exact or refused. A template with `{% generation %}` marks says itself what the assistant wrote. Under
any other, a turn begins where the rendering of what came before it, the assistant's cue included, ends; where it ends
is told by rendering it once more with another text in its place. Which template there is, and which tokens it wants, is
said in `chat_template.py`; which turns are learnt, in `encode.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fullshard.errors import DataError

ChatMessage = Mapping[str, Any]
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
    messages: Sequence[ChatMessage]
    where: str
    tools: Sequence[Mapping[str, Any]] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        return self._render(self.messages)[0]

    @property
    def assistant_turns(self) -> list[int]:
        return [i for i, m in enumerate(self.messages) if m["role"] == "assistant"]

    def completion(self, first: int) -> tuple[str, Span]:
        """The text, and the part of it that follows the prompt (the messages before `first`) and the assistant's cue.

        Where the template goes on otherwise than by this cue, what both have in common is the prompt, token by token.
        """
        whole = self.text()
        if not first:
            return whole, (0, len(whole))
        prompt = self._render(self.messages[:first], cue=True)[0]
        if whole.startswith(prompt):
            return whole, (len(prompt), len(whole))
        if not whole.startswith(self._render(self.messages[:first])[0]):
            raise self._refused(first, "it writes the prompt differently once the completion follows")
        both = zip(prompt, whole, strict=False)
        start = next((i for i, (a, b) in enumerate(both) if a != b), len(whole))
        if getattr(self.tokenizer, "is_fast", False):
            tokens = self.tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
            start = next((a for a, b in tokens if a <= start < b), start)
        return whole, (start, len(whole))

    def turns(self, numbers: Sequence[int]) -> tuple[str, list[Span]]:
        """The text, and the spans of what is said in these turns, end-of-turn marks included."""
        if self.template is None or not MARKED.search(self.template):
            whole = self.text()
            return whole, [self._turn(i, whole) for i in numbers]
        whole, spans = self._render(self.messages, marks=True)
        mine = [i for i in numbers if self.messages[i]["role"] == "assistant"]
        chosen = spans if mine == self.assistant_turns else self._marked(mine, spans)
        others = [self._turn(i, whole) for i in numbers if i not in mine]
        return whole, sorted([*chosen, *others])

    def _marked(self, numbers: Sequence[int], spans: list[Span]) -> list[Span]:
        """Those of the template's spans that belong to these of the assistant's turns."""
        ends = [0]
        for i in range(len(self.messages)):
            speaks = self.messages[i]["role"] == "assistant"
            ends.append(len(self._render(self.messages[: i + 1], marks=True)[1]) if speaks else ends[-1])
        if ends[-1] != len(spans):
            raise self._refused(numbers[0] if numbers else 0, "its marks do not belong to one turn each")
        return [span for i in numbers for span in spans[ends[i] : ends[i + 1]]]

    def _turn(self, i: int, whole: str) -> Span:
        """Where a turn lies in the whole: from its cue (the assistant's) or its content to its end-of-turn mark."""
        try:
            alone = self._around(self.messages[: i + 1], i)
        except DataError:
            raise self._refused(i, "it refuses to end with this turn") from None
        if self.messages[i]["role"] == "assistant":
            before = self._render(self.messages[:i], cue=True)[0] if i else self._cue()
        else:
            before = alone[0] if alone is not None else ""
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

    def _around(self, messages: Sequence[ChatMessage], i: int) -> tuple[str, str] | None:
        """What the template writes before and after what message `i` says; None where it does not write that once.

        That is its content, or where the template leaves it out beside a tool call, the name of the last function.
        """
        probe = PROBE
        while any(probe in str(m) for m in messages):
            probe += "X"
        turn = messages[i]
        stands = [{**turn, "content": probe}]
        if calls := turn.get("tool_calls"):
            last = {**calls[-1], "function": {**calls[-1]["function"], "name": probe}}
            stands.append({**turn, "tool_calls": [*calls[:-1], last]})
        for stand in stands:
            shown = self._render([*messages[:i], stand, *messages[i + 1 :]])[0]
            if shown.count(probe) == 1:
                start, _, end = shown.partition(probe)
                return start, end
        return None

    def _cue(self) -> str:
        """What leads an assistant in who speaks first."""
        try:
            return self._render([], cue=True)[0]
        except DataError:
            raise self._refused(0, "it cannot begin with the assistant") from None

    def _refused(self, i: int, why: str) -> DataError:
        return DataError(
            f"{self.where}: what is said in turn {i} cannot be told apart exactly with this chat template: "
            f"{why}. Use chat_template_format chatml, a template with {{% generation %}} marks (chat_template_path), "
            f"or learn everything (assistant_only_loss and completion_only_loss false)."
        )

    def _render(
        self, messages: Sequence[ChatMessage], cue: bool = False, marks: bool = False
    ) -> tuple[str, list[Span]]:
        if self.template is None:
            raise DataError(
                f"{self.where}: the row is a conversation, but the tokenizer has no chat template. Choose one with "
                f"chat_template_format (such as chatml) or chat_template_path."
            )
        try:
            given = {**self.tokenizer.special_tokens_map, **self.template_kwargs}
            return render(self.template, messages, self.tools, given, cue, marks)
        except Exception as error:  # a template is a program: anything may go wrong in it
            kind = "" if type(error).__module__.startswith("jinja2") else f"{type(error).__name__}: "
            said = str(error).strip().rstrip(".") or type(error).__name__
            raise DataError(f"{self.where}: the chat template refuses this conversation: {kind}{said}.") from None


def render(
    template: str, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] | None, given: Mapping[str, Any],
    cue: bool = False, marks: bool = False,
) -> tuple[str, list[Span]]:  # fmt: skip
    """The messages under a template, and with `marks` the spans that it marks as the assistant's; its own errors."""
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, spans = render_jinja_template(
        conversations=[[dict(m) for m in messages]],
        tools=[dict(tool) for tool in tools] if tools else None,  # some templates write about tools for an empty list
        chat_template=template,
        add_generation_prompt=cue,
        return_assistant_tokens_mask=marks,
        **given,
    )
    return texts[0], [(int(a), int(b)) for a, b in spans[0]] if marks else []
