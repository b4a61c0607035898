"""Documents as tokens: templates, what is learnt, long documents, and the cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fullshard import runtime
from fullshard.data import chat
from fullshard.data.encode import TextSettings
from fullshard.data.formats import Raw, Source, file_source, row_source
from fullshard.data.loader import load_table
from fullshard.data.tokens import TokenTable, make_table, open_table, table_key
from fullshard.errors import ConfigError, DataError
from tests.data.tiny import chat_rows, make_tokenizer, text_rows, write_rows
from tests.pool import ranks


def table(rows: list[dict[str, Any]], tmp_path: Path, tokenizer: Any = None, **settings: Any) -> TokenTable:
    chosen = TextSettings(**settings)
    return load_table(row_source(rows, "rows"), tokenizer or make_tokenizer(), chosen, str(tmp_path))


def test_tokens_are_the_tokenizer_s(tmp_path: Path) -> None:
    tokenizer, rows = make_tokenizer(), text_rows(20)
    for special, end in ((False, False), (True, True)):
        found = table(rows, tmp_path, add_special_tokens=special, append_concat_token=end)
        assert len(found) == 20
        for i, row in enumerate(rows):
            ids = tokenizer(row["text"], add_special_tokens=special)["input_ids"] + [tokenizer.eos_token_id] * end
            ((tokens, learnt),) = found.documents(i)
            assert tokens.tolist() == ids and learnt.all()
            assert found.row_sizes[i] == len(ids) and found.row_targets[i] == len(ids) - 1


def test_built_in_templates() -> None:
    tokenizer = make_tokenizer()
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "A"},
    ]
    text, spans = chat.conversation(tokenizer, chat.TEMPLATES["chatml"], messages, "here")
    assert text == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
    )
    assert [text[a:b] for a, b in spans] == ["A<|im_end|>"]
    text, spans = chat.conversation(tokenizer, chat.TEMPLATES["zephyr"], messages, "here")
    assert text == "<|system|>\nS</s>\n<|user|>\nU</s>\n<|assistant|>\nA</s>\n"
    assert [text[a:b] for a, b in spans] == ["A</s>"]


OWN_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}[{% generation %}{{ m.content }}]{% endgeneration %} "
    "{% else %}({{ m.content }}){% endif %}{% endfor %}{% if add_generation_prompt %}[{% endif %}"
)


def test_what_the_assistant_wrote_is_what_transformers_marks(tmp_path: Path) -> None:
    """transformers tells by marks inside the template; ours by rendering turn by turn."""
    tokenizer, rows = make_tokenizer(), chat_rows(30)
    tokenizer.chat_template = OWN_TEMPLATE
    found = table(rows, tmp_path, tokenizer, template=OWN_TEMPLATE, assistant_only_loss=True)
    for i, row in enumerate(rows):
        marked = tokenizer.apply_chat_template(
            row["messages"], return_assistant_tokens_mask=True, return_dict=True, tokenizer_kwargs={}
        )
        ((tokens, learnt),) = found.documents(i)
        assert tokens.tolist() == marked["input_ids"]
        assert learnt.tolist() == marked["assistant_masks"]


@pytest.mark.parametrize("name", ["chatml", "zephyr"])
def test_learnt_tokens_spell_the_answers(tmp_path: Path, name: str) -> None:
    tokenizer, rows = make_tokenizer(), chat_rows(30, seed=2)
    chat.prepare_tokenizer(tokenizer, name, rows=500)
    template = chat.choose_template(tokenizer, name)
    found = table(rows, tmp_path, tokenizer, template=template, assistant_only_loss=True)
    for i, row in enumerate(rows):
        ((tokens, learnt),) = found.documents(i)
        spelt = tokenizer.decode(tokens[learnt.astype(bool)])
        answers = [m["content"] + chat.END_OF_TURN[name] for m in row["messages"] if m["role"] == "assistant"]
        assert spelt == "".join(answers)


def test_markers_become_tokens_only_where_there_are_rows() -> None:
    tokenizer = make_tokenizer()
    size = len(tokenizer)
    notes = chat.prepare_tokenizer(tokenizer, "chatml", rows=size)
    assert len(tokenizer) == size and "spelled in ordinary tokens" in notes[0]
    notes = chat.prepare_tokenizer(tokenizer, "chatml", rows=size + 2)
    assert len(tokenizer) == size + 2 and "added the tokens <|im_start|> <|im_end|>" in notes[0]
    assert chat.prepare_tokenizer(tokenizer, "chatml", rows=size + 2) == []
    with pytest.raises(ConfigError, match=rf"the tokenizer has {size + 2} tokens, the model's embedding {size} rows"):
        chat.prepare_tokenizer(tokenizer, "none", rows=size)


def test_a_conversation_needs_a_template(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rows, row 0: .*no chat template.*chatml or zephyr"):
        table(chat_rows(1), tmp_path)


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path: Path) -> None:
    last_only = "{% for m in messages %}{% if loop.last or m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    rows = [row for row in chat_rows(30) if len(row["messages"]) > 3]
    with pytest.raises(DataError, match="changes earlier turns"):
        table(rows, tmp_path, template=last_only, assistant_only_loss=True)


def test_a_template_may_refuse_a_conversation(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="row 0: the chat template refuses this conversation: no system"):
        table(chat_rows(1), tmp_path, template="{{ raise_exception('no system') }}")


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("overflow", ["truncate", "split", "drop"])
def test_long_documents(tmp_path: Path, overflow: str, packing: bool) -> None:
    whole = table(text_rows(40), tmp_path)
    found = table(text_rows(40), tmp_path, max_length=16, overflow=overflow, packing=packing)
    sizes = np.diff(whole.document_starts)
    assert found.facts["long"] == (sizes > 16).sum() > 0
    assert np.diff(found.document_starts).max() <= 16 and found.row_sizes.max() <= 16
    kept = {
        "truncate": np.minimum(sizes, 16).sum(),
        "split": sizes.sum(),
        "drop": sizes[sizes <= 16].sum(),
    }[overflow]
    assert found.facts["tokens"] == kept and found.facts["cut"] == sizes.sum() - kept
    if overflow == "split":
        assert found.tokens.tolist() == whole.tokens.tolist()
    assert sorted(found.row_documents) == list(range(found.facts["documents"]))


def test_nothing_to_learn_is_said(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    with pytest.raises(DataError, match="no documents with tokens"):
        table([{"text": ""}], tmp_path)
    with pytest.raises(DataError, match="no documents with tokens"):
        table([], tmp_path)
    users_only = [{"messages": [{"role": "user", "content": "hello"}]}]
    with pytest.raises(DataError, match=r"no token in them is learnt \(assistant_only_loss"):
        table(users_only, tmp_path, tokenizer, template=chat.TEMPLATES["chatml"], assistant_only_loss=True)
    assert not [*(tmp_path / "tokens").iterdir()], "nothing half-written"


def test_the_cache_is_named_by_content(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "train.jsonl", text_rows(5))
    source, tokenizer, settings = file_source([path]), make_tokenizer(), TextSettings()
    key = table_key(source, tokenizer, settings)
    path.touch()
    tokenizer(["padded", "differently from now on"], padding=True, truncation=True, max_length=3)
    assert table_key(source, tokenizer, settings) == key
    for change in ({"max_length": 9}, {"packing": True}, {"add_special_tokens": True}, {"template": "x"}):
        assert table_key(source, tokenizer, replace(settings, **change)) != key  # type: ignore[arg-type]
    tokenizer.add_tokens(["new"])
    assert table_key(source, tokenizer, settings) != key
    write_rows(path, text_rows(6))
    assert table_key(source, make_tokenizer(), settings) != key


def test_a_damaged_table_is_made_again(tmp_path: Path) -> None:
    source, tokenizer, settings = row_source(text_rows(5), "rows"), make_tokenizer(), TextSettings()
    first = load_table(source, tokenizer, settings, str(tmp_path))
    tokens = first.tokens.tolist()
    with (first.folder / "tokens.bin").open("r+b") as file:
        file.truncate(8)
    assert open_table(first.folder) is None
    assert load_table(source, tokenizer, settings, str(tmp_path)).tokens.tolist() == tokens


def test_two_makers_at_once_leave_one_table(tmp_path: Path) -> None:
    source, tokenizer, settings = row_source(text_rows(5), "rows"), make_tokenizer(), TextSettings()
    folder = tmp_path / "table"
    make_table(source, tokenizer, settings, folder)
    make_table(source, tokenizer, settings, folder)
    assert open_table(folder) is not None and [p.name for p in tmp_path.iterdir()] == ["table"]


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"token cache .* cannot be written .*FULLSHARD_CACHE"):
        table(text_rows(1), tmp_path / "file")


@ranks(4)
def test_one_rank_tokenises_and_all_see_it(tmp_path: Path) -> None:
    runtime.use_spmd()
    calls = []

    def rows(start: Any) -> Any:
        calls.append(runtime.rank())
        return (Raw(f"row {i}", row, i + 1) for i, row in enumerate(text_rows(9)))

    source = Source("rows", rows, lambda: "fixed")
    found = load_table(source, make_tokenizer(), TextSettings(), str(tmp_path))
    assert len(found) == 9 and calls == ([0] if runtime.rank() == 0 else [])


@ranks(2)
def test_all_ranks_raise_what_one_met(tmp_path: Path) -> None:
    runtime.use_spmd()
    with pytest.raises(DataError, match="rows, row 1: the text is 3"):
        table([{"text": "good"}, {"text": 3}], tmp_path)
