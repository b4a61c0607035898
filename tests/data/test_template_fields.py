"""Tools, tool calls, reasoning, system messages: written by the template, or the row is refused."""
# ruff: noqa: E501 - templates and tables of cases

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from fullshard.config.errors import DataError
from fullshard.data import template_fields
from fullshard.data.chat_template import BUILT_IN
from fullshard.data.encode import TextSettings, encode_rows
from fullshard.data.row_formats import Reading
from fullshard.data.sources import row_source
from tests.data import chats
from tests.data.tiny import make_tokenizer
from tests.data.trl_tokens import CALL, CALLS, SHORT, TOOL

TOKENIZER = make_tokenizer()
U, A = {"role": "user", "content": "the red bird?"}, {"role": "assistant", "content": "a stone"}
OTHERS = {
    # templates of other styles: what they need to write a tool call
    "null": "{% for m in messages %}[{{ m.role }}]{% if m.content is none %}{% for c in m.tool_calls %}<{{ c.function.name }}{{ c.function.arguments | tojson }}>{% endfor %}{% else %}{{ m.content }}{% endif %};{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "text": "{% for m in messages %}[{{ m.role }}]{{ m.content + '' }}{% for c in m.tool_calls or [] %}<{{ c.function.name }}{{ c.function.arguments | tojson }}>{% endfor %};{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "arguments as text": "{% for m in messages %}[{{ m.role }}]{% if m.content is none %}{% for c in m.tool_calls %}{{ '<' + c.function.name + c.function.arguments + '>' }}{% endfor %}{% else %}{{ m.content }}{% endif %};{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "no text": "{% for m in messages %}[{{ m.role }}]{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}<{{ m.tool_calls[0].function.name }}{{ m.tool_calls[0].function.arguments | tojson }}>{% else %}{{ m.content }}{% endif %};{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    "results follow": "{% for m in messages %}{% if m.tool_calls and (loop.last or loop.nextitem.role != 'tool') %}{{ raise_exception('results must follow') }}{% endif %}[{{ m.role }}]{{ m.content or '' }}{% for c in m.tool_calls or [] %}<{{ c.function.name }}{{ c.function.arguments | tojson }}{{ c.id }}>{% endfor %};{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
}


def template_text(template: str) -> str:
    """The text of a built-in template by its name; other templates as they are."""
    return BUILT_IN[template].text if template in BUILT_IN else template


def texts(rows: list[dict[str, Any]], template: str, **changes: Any) -> list[tuple[str, str]]:
    """Each row as text, and what of it is learnt."""
    settings = TextSettings(10**6, template=template_text(template), **changes)
    raws = list(row_source(rows, "rows").rows(None))
    found = encode_rows(raws, TOKENIZER, settings, Counter())
    return [(TOKENIZER.decode(ids), TOKENIZER.decode(ids[mask.astype(bool)])) for ids, mask, _ in found]


def test_openai_s_tool_calls_are_written() -> None:
    """Arguments as JSON text, content that is null, an older name of the call: one conversation."""
    function = {"name": "find", "arguments": '{"word": "red bird", "n": 2}'}
    result = {"role": "tool", "tool_call_id": "x", "content": "a stone"}
    ways: list[list[dict[str, Any]]] = [
        [U, {"role": "assistant", "content": None, "tool_calls": [{"id": "x", "type": "function", "function": function}]}, result, A],
        [U, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {**result, "role": "tool"}, A],
        [U, {"role": "assistant", "tool_calls": [function]}, result, A],
        [U, {"role": "assistant", "content": None, "function_call": function}, {**result, "role": "function"}, A],
        [U, {"from": "function_call", "value": '{"name": "find", "arguments": {"word": "red bird", "n": 2}}'}, {"from": "observation", "value": "a stone"}, A],
    ]  # fmt: skip
    written = [texts([{"messages": talk, "tools": [TOOL]}], "qwen", assistant_only_loss=True)[0] for talk in ways]
    assert len(set(written)) == 1
    text, learnt = written[0]
    call = '<tool_call>\n{"name": "find", "arguments": {"word": "red bird", "n": 2}}\n</tool_call><|im_end|>'
    assert learnt == call + "a stone<|im_end|>" and '"description": "Finds a word."' in text


@pytest.mark.parametrize("name", OTHERS)
def test_templates_of_other_styles(name: str) -> None:
    """What is learnt is the call with its end, whatever a template needs to write it."""
    call = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    result = {"role": "tool", "content": "a stone"}
    row = {"messages": [U, call, result, A]}
    if name == "results follow":
        with pytest.raises(
            DataError,
            match=r"turn 1 cannot be determined exactly .*: it does not allow a conversation to end with this turn",
        ):
            texts([row], OTHERS[name], assistant_only_loss=True)
        assert '<find{"word": "red bird", "n": 2}call00001>' in texts([row], OTHERS[name])[0][0]
        return
    text, learnt = texts([row], OTHERS[name], assistant_only_loss=True)[0]
    written = '<find{"word": "red bird", "n": 2}>'
    assert learnt == f"{written};a stone;"
    assert text == f"[user]the red bird?;[assistant]{written};[tool]a stone;[assistant]a stone;"


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "tools": ({"messages": [U, A], "tools": [TOOL]}, "chatml", "the row has `tools`, which the chat template chatml does not render"),
    "tool calls": ({"messages": CALLS}, "chatml", "the row has tool calls, which the chat template chatml does not render"),
    "a call in ShareGPT's words": ({"conversations": [U, {"from": "function_call", "value": '{"name": "f", "arguments": {}}'}]}, "zephyr", "the row has tool calls"),
    "reasoning": ({"messages": [U, {**A, "reasoning_content": "hm"}]}, "chatml", "the row has `reasoning_content`, .* put it into the content"),
    "thinking": ({"messages": [U, {**A, "thinking": "hm"}]}, chats.TWINS["llama-3"][0], "the row has `thinking`, which the chat template does not render"),
    "a system message": ({"messages": [{"role": "system", "content": "S"}, U, A]}, "{% for m in messages %}{% if m.role != 'system' %}[{{ m.content }}]{% endif %}{% endfor %}", "the row has a system message, which"),
    "a tool's result": ({"messages": [U, A, {"role": "tool", "content": "x"}, A]}, "{% for m in messages %}{% if m.role != 'tool' %}[{{ m.content }}]{% endif %}{% endfor %}", "the row has a tool message, which"),
    "the result of a call": ({"messages": CALLS}, "{% for m in messages %}{% if m.role != 'tool' %}[{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}]{% endif %}{% endfor %}", "the row has a tool message, which"),
    "text beside a call": ({"messages": [U, {**A, "tool_calls": [CALL]}]}, OTHERS["no text"], "the row has a tool call beside text, which"),
    "a call beside text": ({"messages": [U, {**A, "tool_calls": [CALL]}]}, OTHERS["null"], "the row has a tool call beside text, which"),
    "what a template refuses": ({"messages": [U, {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]}]}, OTHERS["no text"], "rejects this conversation: one call at a time"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_template_would_drop_is_refused(case: str) -> None:
    row, template, said = REFUSED[case]
    with pytest.raises(DataError, match=f"^rows, row 0: .*{said}") as error:
        texts([row], template)
    assert "\n" not in str(error.value)
    counts: Counter[str] = Counter()
    skip = TextSettings(template=template_text(template), reading=Reading(on_bad_row="skip"))
    kept = list(encode_rows(list(row_source([row, {"messages": [U, A]}], "rows").rows(None)), TOKENIZER, skip, counts))
    assert len(kept) == 1 and counts["bad"] == 1


def test_a_developer_speaks_as_the_system_where_templates_know_none() -> None:
    said = [{"role": "developer", "content": "Be kind"}, U, A]
    as_system = [{**said[0], "role": "system"}, U, A]
    knows = "{% for m in messages %}<{{ m.role }}{{ '!' if m.role == 'developer' }}>{{ m.content }}{% endfor %}"
    for template in ("chatml", "llama3", "gemma", "mistral", "qwen", "phi"):
        assert texts([{"messages": said}], template) == texts([{"messages": as_system}], template)
    assert texts([{"messages": said}], knows)[0][0].startswith("<developer!>Be kind<user>")


def test_no_empty_turn_is_ever_learnt() -> None:
    """chatml would make an empty turn of a call; it did, and it was learnt."""
    empty = "<|im_start|>assistant\n<|im_end|>"
    with pytest.raises(DataError):
        texts([{"messages": [U, {"role": "assistant", "content": "", "tool_calls": [CALL]}]}], "chatml")
    for template in ("qwen", *OTHERS.values()):
        talk = [U, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "x"}, A]
        assert empty not in texts([{"messages": talk}], template)[0][0]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_written_under_the_template_s_own_name(name: str) -> None:
    text, learnt = texts([{"messages": [U, {**A, name: "hm"}]}], chats.REASONS, assistant_only_loss=True)[0]
    assert text == "<user>the red bird?</s><assistant>(hm)a stone</s>" and learnt == "(hm)a stone</s>"


def test_a_template_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []
    plain = template_fields.render
    monkeypatch.setattr(
        template_fields, "render", lambda *given, **more: (tried.append(given), plain(*given, **more))[1]
    )
    template = OTHERS["text"] + "{# tried once #}"
    row = {
        "messages": [
            U,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "x"},
            A,
        ]
    }
    texts([row], template)
    count = len(tried)
    assert count > 0
    texts([row] * 50, template)
    texts([{"messages": [U, A]}] * 50, template)
    assert len(tried) == count


def test_more_is_told_to_the_template() -> None:
    template = "{{ mood }}" + BUILT_IN["chatml"].text
    rows: list[dict[str, Any]] = [
        {"messages": [U, A], "chat_template_kwargs": {"mood": "glad", "none": None}},
        {"messages": [U, A], "chat_template_kwargs": '{"mood": "sad", "size": 3}'},
        {"prompt": [U], "completion": [A], "chat_template_kwargs": {"mood": "calm"}},
    ]
    assert [text[:4] for text, _ in texts(rows, template)] == ["glad", "sad<", "calm"]
    counts: Counter[str] = Counter()
    list(encode_rows(list(row_source(rows, "rows").rows(None)), TOKENIZER, TextSettings(template=template), counts))
    assert {k: v for k, v in counts.items() if k.startswith("unused")} == {"unused chat_template_kwargs.size": 1}


TALK = [{"role": "system", "content": "salt"}, *SHORT]


@pytest.mark.parametrize("template", ["chatml", "llama3", "gemma", "mistral", "qwen", "phi", chats.MARKED["appends"]])
def test_which_turns_are_learnt(template: str) -> None:
    """Weights and the last turn, against what is learnt of each turn alone."""

    def learnt(weights: dict[int, Any], key: str = "weight", **changes: Any) -> str:
        messages = [{**m, **({key: weights[i]} if i in weights else {})} for i, m in enumerate(TALK)]
        found = texts([{"messages": messages}], template, **changes)
        return found[0][1] if found else ""

    both = learnt({}, assistant_only_loss=True)
    first, second = learnt({4: 0}, assistant_only_loss=True), learnt({2: 0}, assistant_only_loss=True)
    assert first + second == both and "a small tree" in first and "salt" in second and "tree" not in second
    assert learnt({2: 0.0, 4: 1}, "loss", assistant_only_loss=True) == second
    assert learnt({2: False, 1: False}, "train", assistant_only_loss=True) == second
    assert learnt({}, last_turn_only_loss=True) == learnt({2: 1, 4: 1}, last_turn_only_loss=True) == second
    assert learnt({4: 0}, last_turn_only_loss=True) == ""
    whole = texts([{"messages": TALK}], template)[0][0]
    assert learnt({}) == whole
    assert learnt({2: 0}) == whole.replace(first, "", 1)
    if template == "phi":  # which ends every text with a mark of its own
        with pytest.raises(DataError, match="turn 3 cannot be determined exactly"):
            learnt({3: 1}, assistant_only_loss=True)
    elif template != "mistral":  # where the word is one token with the blank before it
        asked = learnt({3: 1, 2: 0, 4: 0}, "training", assistant_only_loss=True)
        assert asked.startswith("winter") and whole.count(asked) == 1


def test_the_last_turn_of_a_completion() -> None:
    row = {"prompt": SHORT[:1], "completion": SHORT[1:]}
    assert texts([row], "chatml", last_turn_only_loss=True)[0][1] == "salt<|im_end|>"
    assert texts([row], "chatml", assistant_only_loss=True)[0][1] == "a small tree<|im_end|>salt<|im_end|>"
    assert texts([{"text": "bread"}], "chatml", last_turn_only_loss=True)[0][1] == "<s>bread</s>"
