"""Chat templates and loss masks: exact to the token, against what turn-by-turn twins and transformers say."""
# ruff: noqa: E501 - tables of cases

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from fullshard.config.errors import ConfigError, DataError
from fullshard.data import chat_template, encode, render_chat, template_limits
from fullshard.data.chat_template import BUILT_IN
from fullshard.data.row_formats import RawRow
from fullshard.models import generate
from tests.data import chats
from tests.data.tiny import chat_rows, make_tokenizer, text_rows

PLAIN_TEMPLATES = {
    "chatml": (
        BUILT_IN["chatml"].text,
        chats.plain(lambda role: f"<|im_start|>{role}\n", "<|im_end|>", "\n"),
    ),
    "zephyr": (BUILT_IN["zephyr"].text, chats.plain(lambda role: f"<|{role}|>\n", "</s>", "\n")),
}
ALL = {**PLAIN_TEMPLATES, **chats.TWINS}
WORDS = (
    "the bird", " ", "\n", "\t ", "", "a", "é", "日本", "🙂", "e\u0301", "<|im_end|>", "<|im_start|>assistant\n", "</s>", "<s>",
    "[/INST]", "<|eot_id|>", "<end_of_turn>", "</think>", "<think>", "Assistant:", render_chat.PROBE, "assistant\n", "the bird sings",
)  # fmt: skip
contents = st.lists(st.sampled_from(WORDS), max_size=4).map("".join)
turns = st.lists(
    st.tuples(st.sampled_from(["user", "assistant", "assistant", "tool"]), contents), min_size=1, max_size=6
)
orderly = st.lists(st.tuples(contents, contents), min_size=1, max_size=3).map(
    lambda pairs: [turn for u, a in pairs for turn in (("user", u), ("assistant", a))]
)
talks = st.tuples(st.one_of(st.none(), contents), st.one_of(turns, orderly)).map(
    lambda t: [{"role": r, "content": c} for r, c in [*([("system", t[0])] if t[0] is not None else []), *t[1]]]
)


def make_kind(kind: str) -> Any:
    """Tokenizers that spell the marks or know them, and whose offsets leave out blanks or do not."""
    tokenizer = make_tokenizer()
    if "marks" in kind:
        marks = ["<|im_start|>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<start_of_turn>", "[/INST]"]
        tokenizer.add_special_tokens({"additional_special_tokens": marks})
    if "trims" in kind:
        both = [processors.ByteLevel(trim_offsets=True), tokenizer.backend_tokenizer.post_processor]
        tokenizer.backend_tokenizer.post_processor = processors.Sequence(both)
    return tokenizer


def with_blanks_in_words() -> Any:
    """As SentencePiece's are: blanks are written as ▁, and characters that are not known byte by byte."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    special = ["<unk>", "<s>", "</s>", "<pad>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([row["text"] for row in text_rows(200, seed=1)], trainer)
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


KINDS = {kind: make_kind(kind) for kind in ("spells", "spells trims", "marks", "marks trims")}
KINDS["blanks"] = with_blanks_in_words()


def byte_table() -> dict[str, int]:
    """The characters in which byte-level tokens are written down."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in kept]
    return {chr(b): b for b in kept} | {chr(256 + i): b for i, b in enumerate(others)}


BYTES = byte_table()


def expected(tokenizer: Any, pieces: chats.Pieces) -> tuple[list[int], list[int]]:
    """Tokens of the whole text, and for each whether the byte it begins with lies in a learnt piece."""
    whole = "".join(text for text, _ in pieces)
    ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
    learnt = [flag for text, flag in pieces for _ in text.encode()]
    at, mask = 0, []
    for token in tokenizer.convert_ids_to_tokens(ids):
        mask.append(int(learnt[at]))
        at += _length(tokenizer, token)
    assert at == len(whole.encode())
    return ids, mask


def _length(tokenizer: Any, token: str) -> int:
    """How many bytes of the text a token stands for."""
    if tokenizer is KINDS["blanks"]:
        return 1 if token.startswith("<0x") else len(token.replace("\u2581", " ").encode())
    return len(token.encode() if token in tokenizer.get_added_vocab() else bytes(BYTES[c] for c in token))


def encoded(tokenizer: Any, row: dict[str, Any], **options: Any) -> tuple[list[int], list[int]]:
    counts: dict[str, Any] = {"empty": 0, "long": 0, "cut": 0}
    settings = encode.TextSettings(max_length=10**6, **options)
    document = encode.Document("here", **row)
    ((ids, mask, _),) = list(encode._tokenize([document], tokenizer, settings, counts)) or [((), (), False)]
    return [int(i) for i in ids], [int(m) for m in mask]


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=12, deadline=None)
@given(messages=talks, kind=st.sampled_from(list(KINDS)))
def test_what_is_learnt_is_what_the_assistant_says(name: str, messages: chats.Messages, kind: str) -> None:
    check(name, messages, kind)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
@settings(max_examples=800, deadline=None)
@given(messages=talks, kind=st.sampled_from(list(KINDS)))
def test_what_is_learnt_in_many_conversations(name: str, messages: chats.Messages, kind: str) -> None:
    check(name, messages, kind)


def check(name: str, messages: chats.Messages, kind: str) -> None:
    template, twin = ALL[name]
    tokenizer, pieces = KINDS[kind], twin(messages)
    if pieces is None:
        with pytest.raises(
            DataError, match=r"here: .*(rejects this conversation|does not allow the assistant to begin)"
        ):
            encoded(tokenizer, {"messages": tuple(messages)}, template=template, assistant_only_loss=True)
        return
    roles = [m["role"] for m in messages]
    last = max((i for i, role in enumerate(roles) if role == "user"), default=0)
    if name == "thinking" and ("assistant", "assistant") in pairwise(r for r in roles[:last] if r != "tool"):
        # What stands before such a turn is itself written differently later on: refused or exact, never guessed.
        with suppress(DataError):
            got = encoded(tokenizer, {"messages": tuple(messages)}, template=template, assistant_only_loss=True)
            assert got == expected(tokenizer, pieces)
        return
    got = encoded(tokenizer, {"messages": tuple(messages)}, template=template, assistant_only_loss=True)
    assert got == expected(tokenizer, pieces)
    everything = encoded(tokenizer, {"messages": tuple(messages)}, template=template)
    assert everything == (got[0], [1] * len(got[0]))


@pytest.mark.parametrize("name", chats.MARKED)
@settings(max_examples=20, deadline=None)
@given(messages=talks)
def test_marks_in_a_template_are_followed(name: str, messages: chats.Messages) -> None:
    tokenizer = KINDS["marks"]
    marked = tokenizer.apply_chat_template(
        messages, chat_template=chats.MARKED[name], return_assistant_tokens_mask=True, return_dict=True
    )
    got = encoded(tokenizer, {"messages": tuple(messages)}, template=chats.MARKED[name], assistant_only_loss=True)
    talk = render_chat.Conversation(tokenizer, chats.MARKED[name], messages, "here")
    spans = talk.turns(talk.assistant_turns)[1]
    assert got[0] == marked["input_ids"]
    if all(end > start for start, end in spans):  # transformers takes an empty mark for the token that follows
        assert got[1] == marked["assistant_masks"]


@pytest.mark.parametrize("name", ["llama3", "gemma", "mistral", "qwen"])
@settings(max_examples=15, deadline=None)
@given(messages=talks, data=st.data())
def test_built_in_marks_are_what_is_found_without_them(
    name: str, messages: chats.Messages, data: st.DataObject
) -> None:
    """A template's marks, and the turns as they are told apart in the same template without marks."""
    marked = BUILT_IN[name].text
    plain = re.sub(r"\{% (end)?generation %\}", "", marked)
    assert render_chat.MARKED.search(marked) and not render_chat.MARKED.search(plain)
    if name == "qwen":
        called = st.fixed_dictionaries({"name": contents, "arguments": st.dictionaries(contents, contents, max_size=2)})
        for message in messages:
            if message["role"] == "assistant" and data.draw(st.booleans()):
                message["tool_calls"] = [{"type": "function", "function": data.draw(called)}]
                message["content"] = data.draw(st.sampled_from([None, message["content"]]))
    weights = [data.draw(st.sampled_from([None, None, 0, 1])) if m["role"] == "assistant" else None for m in messages]
    row = {"messages": tuple(messages), "weights": tuple(weights)}
    for changes in ({"assistant_only_loss": True}, {"last_turn_only_loss": True}, {}):
        found = []
        for template in (marked, plain):
            try:
                found.append(encoded(KINDS["marks"], row, template=template, **changes))
            except DataError as error:
                found.append(([], []) if "rejects this conversation" in str(error) else "loss mask")
        assert found[0] == found[1] or (messages[0]["role"] == "assistant" and "loss mask" in found)


@settings(max_examples=40, deadline=None)
@given(prompt=contents, text=contents, kind=st.sampled_from(list(KINDS)), only=st.sampled_from([None, True, False]))
def test_completions(prompt: str, text: str, kind: str, only: bool | None) -> None:
    """One text: a token that straddles the border belongs to the prompt."""
    tokenizer = KINDS[kind]
    row = {"prompt": prompt, "text": text}
    got = encoded(tokenizer, row, completion_only_loss=only, append_concat_token=False, add_special_tokens=False)
    assert got == expected(tokenizer, [(prompt, only is False), (text, True)])


@pytest.mark.parametrize("name", ["chatml", "llama-3", "qwen", "thinking", "gemma"])
@settings(max_examples=12, deadline=None)
@given(messages=talks, data=st.data())
def test_conversations_as_prompt_and_completion(name: str, messages: chats.Messages, data: st.DataObject) -> None:
    """As in TRL: what the template writes after the prompt and the assistant's cue is learnt, to the end."""
    template, tokenizer, twin = *ALL[name][:1], KINDS["marks"], ALL[name][1]
    pieces = twin(messages)
    if len(messages) < 2 or pieces is None or twin(messages[:1]) is None:
        return
    first = data.draw(st.integers(1, len(messages) - 1))
    row = {"messages": tuple(messages), "completion_start": first}
    whole, prompt, border = (
        tokenizer.apply_chat_template(part, chat_template=template, tokenize=False, add_generation_prompt=cue)
        for part, cue in ((messages, False), (messages[:first], True), (messages[:first], False))
    )
    if not whole.startswith(prompt) and not whole.startswith(border):
        with pytest.raises(DataError, match="it renders the prompt differently when the completion follows"):
            encoded(tokenizer, row, template=template)
        return
    size = max(i for i in range(len(prompt) + 1) if whole.startswith(prompt[:i]))
    if size < len(prompt):  # the token with which they part ways belongs to the completion
        parts = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        size = max((a for a, b in parts if a <= size < b), default=size)
    assert encoded(tokenizer, row, template=template) == expected(
        tokenizer, [(whole[:size], False), (whole[size:], True)]
    )
    assert all(encoded(tokenizer, row, template=template, completion_only_loss=False)[1])
    if name == "thinking":
        return
    numbers = iter([i for i, m in enumerate(messages) if m["role"] == "assistant"])
    said = [(text, learnt and next(numbers) >= first) for text, learnt in pieces]
    assert encoded(tokenizer, row, template=template, assistant_only_loss=True) == expected(tokenizer, said)


def test_completion_only_loss_needs_prompts() -> None:
    with pytest.raises(DataError, match=r"here: completion_only_loss is on, but the row has no prompt"):
        encoded(make_tokenizer(), {"text": "abc"}, completion_only_loss=True)
    assert encoded(make_tokenizer(), {"text": "abc"})[1] == [1] * 5


def test_a_text_s_first_and_last_tokens_are_written_once() -> None:
    tokenizer = make_tokenizer()
    template = "{{ bos_token }}" + BUILT_IN["zephyr"].text
    row = {"messages": tuple(chat_rows(1)[0]["messages"])}
    plain, _ = encoded(tokenizer, row, template=template)
    added, _ = encoded(tokenizer, row, template=template, add_special_tokens=True)
    assert added == plain and plain[0] == tokenizer.bos_token_id != plain[1]
    ended, mask = encoded(tokenizer, row, template=template, append_concat_token=True, assistant_only_loss=True)
    assert ended == [*plain, tokenizer.eos_token_id] and mask[-1] == 1
    asks = {"messages": (*row["messages"], {"role": "user", "content": "and?"})}
    ended, mask = encoded(tokenizer, asks, template=template, append_concat_token=True, assistant_only_loss=True)
    assert ended[-1] == tokenizer.eos_token_id and mask[-1] == 0, "nobody wants the user's turns ended"


REFUSED = {
    "later turns drop it": "{% for m in messages %}{% if loop.last or m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}",
    "its end comes only at the end": (
        "{% for m in messages %}[{{ m.content }}{% if loop.last %}</s>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}[{% endif %}"
    ),
    "the system prompt moves on": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}</s>{% elif m.role == 'user' %}[INST]"
        "{% if loop.revindex0 < 2 %}SYSTEM{% endif %}{{ m.content }}[/INST]{% endif %}{% endfor %}"
    ),
    "content is changed": "{% for m in messages %}[{{ m.content | upper }}]{% endfor %}",
    "the cue is another": "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}<think>{% endif %}",
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_told_exactly_is_refused(why: str) -> None:
    row = next(row for row in chat_rows(30) if len(row["messages"]) > 3)
    said = {"messages": tuple(m for m in row["messages"] if m["role"] != "system")}
    with pytest.raises(DataError, match=r"here: the loss mask of turn \d cannot be determined .*generation"):
        encoded(make_tokenizer(), said, template=REFUSED[why], assistant_only_loss=True)
    assert encoded(make_tokenizer(), said, template=REFUSED[why])[0], "without a mask it does not matter"


def test_text_that_repeats_what_was_left_out_is_not_taken_for_it() -> None:
    said = [("user", "one"), ("assistant", "two"), ("user", "two three"), ("assistant", "four")]
    messages = tuple({"role": role, "content": content} for role, content in said)
    with pytest.raises(DataError, match="turn 1 cannot be determined"):
        encoded(
            make_tokenizer(), {"messages": messages}, template=REFUSED["later turns drop it"], assistant_only_loss=True
        )


def test_rows_that_a_template_refuses_can_be_skipped() -> None:
    rows = [*chat_rows(3), {"messages": [{"role": "assistant", "content": "x"}]}]
    raw = [RawRow(f"row {i}", row, i + 1) for i, row in enumerate(rows)]
    counts: dict[str, Any] = {"empty": 0, "long": 0, "cut": 0}
    template = chats.TWINS["mistral"][0]
    settings = encode.TextSettings(template=template, reading=encode.Reading(on_bad_row="skip"))
    kept = list(encode.encode_rows(raw, make_tokenizer(), settings, counts))
    assert len(kept) + counts["bad"] == 4 and counts["bad"] >= 1
    assert "row 3: the chat template rejects this conversation: roles must alternate" in counts["bad_rows"][-1][1]


def test_a_conversation_needs_a_template() -> None:
    with pytest.raises(DataError, match=r"here: .*no chat template.*such as chatml.*chat_template_path"):
        encoded(make_tokenizer(), {"messages": tuple(chat_rows(1)[0]["messages"])})


def test_an_error_inside_a_template_is_a_line_about_the_row() -> None:
    row = {"messages": tuple(chat_rows(1)[0]["messages"])}
    with pytest.raises(DataError, match="here: the chat template rejects this conversation: TypeError: "):
        encoded(make_tokenizer(), row, template="{{ messages + 1 }}")


# --- which template ---------------------------------------------------------------------------------------------------


def test_markers_become_tokens() -> None:
    tokenizer = make_tokenizer()
    size = len(tokenizer)
    assert chat_template.prepare_tokenizer(tokenizer, "chatml").added == ["<|im_start|>", "<|im_end|>"]
    assert len(tokenizer) == size + 2 and tokenizer.eos_token == "<|im_end|>", "generation is to stop there"
    assert chat_template.template_of(tokenizer) == BUILT_IN["chatml"].text
    assert chat_template.prepare_tokenizer(tokenizer, "chatml").added == [], "they are there already"
    other = make_tokenizer()
    assert chat_template.prepare_tokenizer(other, "zephyr").added == ["<|system|>", "<|user|>", "<|assistant|>"]
    assert other.eos_token == "</s>", "zephyr's end of turn was there"
    assert chat_template.prepare_tokenizer(make_tokenizer()).added == []


def test_something_to_pad_with() -> None:
    tokenizer = make_tokenizer()
    tokenizer.pad_token = None
    prepared = chat_template.prepare_tokenizer(tokenizer)
    assert prepared.added == [] and "'</s>' is used" in prepared.notes[0] and tokenizer.pad_token == "</s>"
    tokenizer.pad_token = tokenizer.eos_token = None
    assert chat_template.prepare_tokenizer(tokenizer).added == [], "<pad> was in the vocabulary"
    assert tokenizer.pad_token == "<pad>"


def test_templates_from_files(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(chats.TWINS["llama-3"][0])
    tokenizer = make_tokenizer()
    prepared = chat_template.prepare_tokenizer(tokenizer, "chatml", str(file))
    assert prepared.added == ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    assert "chat_template_format chatml is ignored" in prepared.notes[0] and tokenizer.chat_template == file.read_text()
    other = make_tokenizer()
    chat_template.prepare_tokenizer(other, "chatml")
    other.add_special_tokens({"additional_special_tokens": ["<|unused|>"]}, replace_extra_special_tokens=False)
    other.save_pretrained(tmp_path / "tokenizer")
    tokenizer = make_tokenizer()
    prepared = chat_template.prepare_tokenizer(tokenizer, "none", str(tmp_path / "tokenizer"))
    assert prepared.added == ["<|im_start|>", "<|im_end|>"] and tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.chat_template == BUILT_IN["chatml"].text
    only = tmp_path / "only"
    only.mkdir()
    (only / "chat_template.jinja").write_text(BUILT_IN["zephyr"].text)
    assert chat_template.read_template(str(only)).text == BUILT_IN["zephyr"].text


BAD = {
    "syntax": ("{% for m in messages %}\n{{ m.content }\n{% endfor %}", r"bad.jinja is not valid Jinja: line 2: "),
    "unknown tag": ("{{ messages }}{% wrong %}", r"line 1: Encountered unknown tag 'wrong'"),
    "variable": ("{{ messages }}{{ persona }}", r"bad.jinja uses persona, which conversations do not have"),
    "empty": (" \n", r"bad.jinja is empty"),
    "constant": ("hello", r"does not use `messages`"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_templates_are_one_clear_error(what: str, tmp_path: Path) -> None:
    text, said = BAD[what]
    (tmp_path / "bad.jinja").write_text(text)
    with pytest.raises(ConfigError, match=said):
        chat_template.prepare_tokenizer(make_tokenizer(), "none", str(tmp_path / "bad.jinja"))


def test_variables_of_the_template_s_own_are_not_missing(tmp_path: Path) -> None:
    """Jinja takes a variable that is set in the branches of an `if` for an undeclared one."""
    text = (
        "{% for m in messages %}{% if m.x %}{% set text = m.x %}{% else %}{% set text = '' %}{% endif %}{{ text }}"
        "{% endfor %}"
    )
    marked = text.replace("{{ text }}", "{% generation %}{{ text }}{% endgeneration %}")
    for number, each in enumerate((text, marked)):
        (tmp_path / f"{number}.jinja").write_text(each)
        assert chat_template.read_template(str(tmp_path / f"{number}.jinja")).text == each


def test_a_path_without_a_template(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        ConfigError, match=r"chat_template_path: .*empty' is not a file, and no tokenizer could be loaded"
    ):
        chat_template.read_template(str(tmp_path / "empty"))
    make_tokenizer().save_pretrained(tmp_path / "without")
    with pytest.raises(ConfigError, match=r"without holds a tokenizer without a chat template"):
        chat_template.read_template(str(tmp_path / "without"))
    (tmp_path / "bytes.jinja").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"bytes.jinja cannot be read"):
        chat_template.read_template(str(tmp_path / "bytes.jinja"))


def test_variables_that_are_asked_for_first_are_fine() -> None:
    chat_template.check_template(
        "{% if tools is defined %}{{ tools }}{% endif %}{% if think %}x{% endif %}{{ messages }}", "x"
    )
    chat_template.check_template(
        "{{ date | default('today') }}{{ strftime_now('%Y') }}{{ bos_token }}{{ messages }}", "x"
    )


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a %}{% endfor %}{% endfor %}{{ messages }}"
ENDLESS = {
    "nested loops": LOOPS,
    "recursion": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}{{ messages }}",
    "lists": "{% for a in range(99999) %}{% set c = range(99999)|list %}{% endfor %}{{ messages }}",
}


@pytest.fixture
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "SECONDS", 0.2)
    monkeypatch.setattr(template_limits, "INTERVAL", 0.05)


@pytest.mark.usefixtures("short_limit")
@pytest.mark.parametrize("bad", ["stop", "skip"])
@pytest.mark.parametrize("case", ENDLESS)
def test_a_template_that_does_not_end_is_one_line(case: str, bad: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}]
    chat = chat_rows(1)[0]
    settings = encode.TextSettings(template=ENDLESS[case], reading=encode.Reading(on_bad_row=bad))
    for row in (chat, {**chat, "tools": tools}):
        with pytest.raises(
            ConfigError, match=r"^here.*: the chat template was stopped after 0.2 s .*chat_template_format|^the chat"
        ):
            list(encode.encode_rows([RawRow("here", row, 1)] * 3, make_tokenizer(), settings, {}))


GROWING = {
    "text": "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "list": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
}
LARGE = {
    "product": "{{ 'a' * 10 ** 9 }}",
    "of lists": "{{ [1] * 10 ** 9 }}",
    "from the right": "{{ 10 ** 9 * 'a' }}",
    "squares": "{% set n = namespace(x=3) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "power": "{{ 9 ** (9 ** 9) }}",
}


@pytest.mark.parametrize("case", GROWING)
def test_a_template_that_needs_all_memory_is_one_line(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "BYTES", 2**28)
    monkeypatch.setattr(template_limits, "INTERVAL", 0.02)
    settings = encode.TextSettings(template=GROWING[case] + "{{ messages }}")
    with pytest.raises(ConfigError, match=r"^here: the chat template was stopped (when it used more than|for want of)"):
        list(encode.encode_rows([RawRow("here", chat_rows(1)[0], 1)], make_tokenizer(), settings, {}))


@pytest.mark.parametrize("case", LARGE)
def test_a_single_operation_of_a_template_has_limits(case: str) -> None:
    """Python cannot interrupt one, not even to report that the rank still runs."""
    settings = encode.TextSettings(template=LARGE[case] + "{{ messages }}")
    with pytest.raises(DataError, match=r"^here: the chat template rejects this conversation: OverflowError: a result"):
        list(encode.encode_rows([RawRow("here", chat_rows(1)[0], 1)], make_tokenizer(), settings, {}))
    tokenizer = make_tokenizer()
    tokenizer.chat_template = LARGE[case]
    with pytest.raises(ConfigError, match="refuses this conversation: OverflowError: a result"):
        generate.chat_tokens(tokenizer, [{"role": "user", "content": "a"}])


def test_a_text_that_no_conversation_makes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "CHARACTERS", 1000)
    settings = encode.TextSettings(template="{% for a in range(99) %}{{ messages }}{% endfor %}")
    with pytest.raises(ConfigError, match=r"^here: the chat template made a text of [\d,]+ characters"):
        list(encode.encode_rows([RawRow("here", chat_rows(1)[0], 1)], make_tokenizer(), settings, {}))
    assert encode.encode_rows([RawRow("here", {"text": "a" * 5000}, 1)], make_tokenizer(), encode.TextSettings(), {})


def test_ordinary_products_stay() -> None:
    template = "{{ '-' * 3 }}{{ 2 ** 10 }}{{ 1.5 * 2 }}{{ (['a'] * 2) | join }}{{ 3 * 'b' }}{{ 2 ** -1 }}{{ 2 * 3 }}"
    assert render_chat.render(template, [], None, {})[0] == "---10243.0aabbb0.56"


@pytest.mark.usefixtures("short_limit")
def test_templates_that_do_not_end_in_generation_and_in_threads() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = LOOPS
    for ask in (generate.generation_prompt, lambda t: generate.chat_tokens(t, [{"role": "user", "content": "a"}])):
        with ThreadPoolExecutor(3) as pool:
            errors = [job.exception() for job in [pool.submit(ask, tokenizer) for _ in range(3)]]
        assert all(isinstance(error, ConfigError) and "was stopped after" in str(error) for error in errors)


@pytest.mark.usefixtures("short_limit")
def test_the_limit_is_one_of_each_rendering() -> None:
    def work() -> int:
        end, count = time.thread_time() + 0.15, 0
        while time.thread_time() < end:
            count += 1
        return count

    assert all(template_limits.run_limited(work) for _ in range(4))
    assert template_limits.run_limited(lambda: time.sleep(0.4)) is None, "waiting for others does not count"
