"""Renders conversations with a chat template and finds the span of each message in the text.

Spans are exact, or the row is rejected. A template with `{% generation %}` blocks marks the assistant's text itself.
With any other template, a turn begins where the rendering of the messages before it, with the generation prompt, ends;
its end is found by rendering the conversation again with a probe text in place of the turn's content.
`chat_template.py` selects the template, `encode.py` decides which turns contribute to the loss.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fullshard.config.errors import ConfigError, DataError
from fullshard.data.template_limits import check_length, run_limited

ChatMessage = Mapping[str, Any]
Span = tuple[int, int]
"""The begin and end of a part of a text, in characters."""

MARKED = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
"""The tag with which a template marks the assistant's text."""
PROBE = "Zq7assistantX0"
"""Replaces a turn's content to find the text around it; extended if the conversation contains it."""


@dataclass(frozen=True)
class Conversation:
    """A conversation and the chat template that renders it."""

    tokenizer: Any
    template: str | None
    messages: Sequence[ChatMessage]
    where: str
    tools: Sequence[Mapping[str, Any]] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """The whole conversation as the template writes it."""
        return self._render(self.messages)[0]

    def prompt(self) -> str:
        """The text up to the start of the assistant's next turn."""
        return self._render(self.messages, generation_prompt=True)[0]

    @property
    def assistant_turns(self) -> list[int]:
        """The positions of the assistant's messages."""
        return [i for i, m in enumerate(self.messages) if m["role"] == "assistant"]

    def completion(self, first: int) -> tuple[str, Span]:
        """The text, and the span after the prompt (the messages before `first`) and the generation prompt.

        If the template continues differently than with the generation prompt, the prompt is the common prefix of both,
        cut at a token boundary.
        """
        whole = self.text()
        if not first:
            return whole, (0, len(whole))
        prompt = self._render(self.messages[:first], generation_prompt=True)[0]
        if whole.startswith(prompt):
            return whole, (len(prompt), len(whole))
        if not whole.startswith(self._render(self.messages[:first])[0]):
            raise self._mask_error(first, "it renders the prompt differently when the completion follows")
        both = zip(prompt, whole, strict=False)
        start = next((i for i, (a, b) in enumerate(both) if a != b), len(whole))
        if getattr(self.tokenizer, "is_fast", False):
            tokens = self.tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
            start = next((a for a, b in tokens if a <= start < b), start)
        return whole, (start, len(whole))

    def turns(self, numbers: Sequence[int]) -> tuple[str, list[Span]]:
        """The text, and the spans of these turns, end-of-turn tokens included."""
        if self.template is None or not MARKED.search(self.template):
            whole = self.text()
            return whole, [self._turn(i, whole) for i in numbers]
        whole, spans = self._render(self.messages, marks=True)
        mine = [i for i in numbers if self.messages[i]["role"] == "assistant"]
        chosen = spans if mine == self.assistant_turns else self._marked(mine, spans)
        others = [self._turn(i, whole) for i in numbers if i not in mine]
        return whole, sorted([*chosen, *others])

    def _marked(self, numbers: Sequence[int], spans: list[Span]) -> list[Span]:
        """The spans marked by the template that belong to these assistant turns."""
        ends = [0]
        for i in range(len(self.messages)):
            is_assistant = self.messages[i]["role"] == "assistant"
            ends.append(len(self._render(self.messages[: i + 1], marks=True)[1]) if is_assistant else ends[-1])
        if ends[-1] != len(spans):
            raise self._mask_error(
                numbers[0] if numbers else 0, "its {% generation %} blocks do not belong to one turn each"
            )
        return [span for i in numbers for span in spans[ends[i] : ends[i + 1]]]

    def _turn(self, i: int, whole: str) -> Span:
        """The span of a turn: from the end of the generation prompt (assistant) or the start of its content, to its
        end-of-turn token."""
        try:
            alone = self._around(self.messages[: i + 1], i)
        except DataError:
            raise self._mask_error(i, "it does not allow a conversation to end with this turn") from None
        if self.messages[i]["role"] == "assistant":
            before = self._render(self.messages[:i], generation_prompt=True)[0] if i else self._generation_prompt()
        else:
            before = alone[0] if alone is not None else ""
        if alone is None or not alone[0].startswith(before):
            raise self._mask_error(i, "it does not continue with the turn after its generation prompt")
        # A line break after an end-of-turn token belongs to the next turn, unless the token is only whitespace.
        mark = alone[1].rstrip() or alone[1]
        within = self._around(self.messages, i) if i + 1 < len(self.messages) else alone
        if within is None or not within[1].startswith(mark):
            raise self._mask_error(i, "it changes earlier turns when later ones follow")
        end = len(whole) - len(within[1]) + len(mark)
        exact = whole.startswith(before) and within[0].startswith(before) and whole.endswith(within[1])
        if not exact or end < len(before):
            raise self._mask_error(i, "it changes earlier turns when later ones follow, or leaves this one out")
        return len(before), end

    def _around(self, messages: Sequence[ChatMessage], i: int) -> tuple[str, str] | None:
        """The text before and after the content of message `i`; None if the template does not render it exactly once.

        If the template omits the content of a message with tool calls, the name of the last function is used instead.
        """
        probe = PROBE
        while any(probe in str(m) for m in messages):
            probe += "X"
        turn = messages[i]
        variants = [{**turn, "content": probe}]
        if calls := turn.get("tool_calls"):
            last = {**calls[-1], "function": {**calls[-1]["function"], "name": probe}}
            variants.append({**turn, "tool_calls": [*calls[:-1], last]})
        for variant in variants:
            text = self._render([*messages[:i], variant, *messages[i + 1 :]])[0]
            if text.count(probe) == 1:
                start, _, end = text.partition(probe)
                return start, end
        return None

    def _generation_prompt(self) -> str:
        """The generation prompt at the start of a conversation."""
        try:
            return self._render([], generation_prompt=True)[0]
        except DataError:
            raise self._mask_error(0, "it does not allow the assistant to begin") from None

    def _mask_error(self, i: int, why: str) -> DataError:
        return DataError(
            f"{self.where}: the loss mask of turn {i} cannot be determined exactly with this chat template: {why}. "
            f"Use chat_template_format chatml, a template with {{% generation %}} blocks (chat_template_path), or "
            f"train on all tokens (assistant_only_loss and completion_only_loss false)."
        )

    def _render(
        self, messages: Sequence[ChatMessage], generation_prompt: bool = False, marks: bool = False
    ) -> tuple[str, list[Span]]:
        if self.template is None:
            raise DataError(
                f"{self.where}: the row is a conversation, but the tokenizer has no chat template. Choose one with "
                f"chat_template_format (such as chatml) or chat_template_path."
            )
        try:
            variables = {**self.tokenizer.special_tokens_map, **self.template_kwargs}
            return render(self.template, messages, self.tools, variables, generation_prompt, marks)
        except ConfigError as error:
            raise ConfigError(f"{self.where}: {error}") from None
        except Exception as error:  # a template is a program and may raise anything
            kind = "" if type(error).__module__.startswith("jinja2") else f"{type(error).__name__}: "
            reason = str(error).strip().rstrip(".") or type(error).__name__
            raise DataError(f"{self.where}: the chat template rejects this conversation: {kind}{reason}.") from None


def render(
    template: str, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any], generation_prompt: bool = False, marks: bool = False,
) -> tuple[str, list[Span]]:  # fmt: skip
    """Render messages with a template; with `marks`, also the spans of its `{% generation %}` blocks."""
    from transformers.utils.chat_template_utils import render_jinja_template

    def rendered() -> Any:
        return render_jinja_template(
            conversations=[[dict(m) for m in messages]],
            tools=[dict(tool) for tool in tools] if tools else None,  # some templates add a section for an empty list
            chat_template=template,
            add_generation_prompt=generation_prompt,
            return_assistant_tokens_mask=marks,
            **variables,
        )

    texts, spans = run_limited(rendered)
    check_length(texts[0])
    return texts[0], [(int(a), int(b)) for a, b in spans[0]] if marks else []
