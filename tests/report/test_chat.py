"""`fullshard chat`: the answers of transformers' and PEFT's `generate`, turn by turn; the terminal; wrong words."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from fullshard.config.errors import ConfigError
from fullshard.launch.chat import Chat, _TextStream, load_chat_model, save
from fullshard.launch.find_result import find_result
from fullshard.models.generate import Sampling, StopCriteria, stop_criteria
from fullshard.quant.sharded_groups import Scheme
from tests.data.tiny import make_tokenizer
from tests.pool import ranks
from tests.quant.programs import rounded
from tests.report.small_results import LORA, add_adapter, base_of_run, chat_model, command, greedy, run

LIMIT = 12


def expected(model: Any, tokenizer: Any, messages: list[dict[str, str]], **options: Any) -> list[int]:
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return greedy(model, ids, LIMIT, [1, tokenizer.convert_tokens_to_ids("<|im_end|>")], **options)


def assert_talks_like(name: Path, plain: Any, four_bits: bool | None = None, base: str | None = None) -> None:
    """Two turns and a system prompt: text and number of tokens are those of the plain model."""
    loaded = load_chat_model(find_result(str(name), base), four_bits=four_bits)
    chat, tokenizer = Chat(loaded, "be brief", LIMIT), loaded.tokenizer
    history = [{"role": "system", "content": "be brief"}]
    for text in ("the red bird", "and the old stone?"):
        shown: list[str] = []
        reply = chat.ask(text, shown.append)
        history.append({"role": "user", "content": text})
        tokens = expected(plain, tokenizer, history)
        said = tokenizer.decode(tokens, skip_special_tokens=True)
        assert (reply.text, reply.tokens) == (said, len(tokens)) and "".join(shown) == said != ""
        history.append({"role": "assistant", "content": said})
    assert chat.messages == history


@ranks(1)
def test_answers_are_those_of_generate(tmp_path: Path) -> None:
    """A model, an adapter on it, both in 4 bits; folders that moved; chance with a seed."""
    base = chat_model(tmp_path / "base")
    adapter = add_adapter(base, tmp_path / "adapter")

    def plain() -> Any:
        return AutoModelForCausalLM.from_pretrained(base)

    assert_talks_like(base, plain())
    assert_talks_like(adapter, PeftModel.from_pretrained(plain(), adapter))
    scheme = Scheme(double=True)
    assert_talks_like(base, rounded(plain(), scheme), four_bits=True)
    assert_talks_like(adapter, PeftModel.from_pretrained(rounded(plain(), scheme), adapter), four_bits=True)
    loaded = load_chat_model(find_result(str(base)), four_bits=True)
    loaded.model.save_pretrained(tmp_path / "packed", tokenizer=loaded.tokenizer)
    assert_talks_like(tmp_path / "packed", rounded(plain(), scheme))
    loaded = load_chat_model(find_result(str(base)))
    with pytest.raises(
        ConfigError, match=r"the conversation has 3\d\d tokens, but the model has 256 positions; start a new one"
    ):
        Chat(loaded).ask("the red bird " * 100)
    for seed in (3, 4):
        torch.manual_seed(seed)
        reply = Chat(loaded, None, LIMIT, Sampling(0.9, 0.8)).ask("salt")
        torch.manual_seed(seed)
        options = {"do_sample": True, "temperature": 0.9, "top_p": 0.8, "top_k": 0}
        tokens = expected(plain(), loaded.tokenizer, [{"role": "user", "content": "salt"}], **options)
        assert reply.text == loaded.tokenizer.decode(tokens, skip_special_tokens=True)
    moved = shutil.move(base, tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"base of the adapter in .*/base does not exist; set the folder .* --base"):
        find_result(str(adapter))
    with_adapter = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(moved), adapter)
    assert_talks_like(adapter, with_adapter, base=str(moved))


@ranks(1)
def test_a_run_by_command(tmp_path: Path) -> None:
    """QLoRA with new tokens: in 4 bits as it was trained, from its result and from a checkpoint."""
    out = run(tmp_path, "qlora", use_4bit_quantization=True, bnb_4bit_compute_dtype="float32", **LORA)
    tokenizer = AutoTokenizer.from_pretrained(out)
    trained = PeftModel.from_pretrained(rounded(base_of_run(tmp_path, out), Scheme()), out)
    tokens = expected(trained, tokenizer, [{"role": "user", "content": "one small tree"}])
    said = tokenizer.decode(tokens, skip_special_tokens=True)
    words = ("chat", str(out), "--max_new_tokens", str(LIMIT))
    assert said and command(*words, "--prompt", "one small tree") == (0, f"{said}\n", "")
    code, printed, _ = command(*words, "--prompt", "-", "--json", "--checkpoint", "latest", given="one small tree\n")
    facts = json.loads(printed)
    assert code == 0 and (facts["answer"], facts["answer_tokens"]) == (said, len(tokens))
    assert facts["stopped"] == ("end" if len(tokens) < LIMIT else "length") and facts["prompt"] == "one small tree"
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (out / name).unlink()
    code, _, error = command(*words, "--prompt", "x")
    assert code == 2 and "is a run without a result yet; its newest checkpoint is step 4" in error
    assert error.startswith("fullshard: ") and error.count("\n") == 1


def test_where_answers_end() -> None:
    tokenizer = make_tokenizer()
    ends = StopCriteria(frozenset({1}), (" <end>",), tokenizer.decode)
    before, mark, after = (tokenizer(t, add_special_tokens=False)["input_ids"] for t in ("old tree", " <end>", " and"))
    assert ends.cut([*before, 1, *after]) == (before, True) and ends.cut(before) == (before, False)
    cut, over = ends.cut([*before, *mark, *after])
    assert over and cut == [*before, *mark] and ends.text(cut) == "old tree"
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}</s>\n{% endfor %}"
    found = stop_criteria(torch.nn.Linear(1, 1), tokenizer)
    assert found.tokens == {1} and found.texts == ()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for mark, tokens, texts in (("<|im_end|> ...", {1, end}, ()), ("[end]", {1}, ("[end]",)), ("", {1}, ())):
        tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}" + mark + "\n{% endfor %}"
        found = stop_criteria(torch.nn.Linear(1, 1), tokenizer)
        assert (found.tokens, found.texts) == (tokens, texts), mark


def test_text_appears_in_whole_characters_and_without_marks() -> None:
    tokenizer = make_tokenizer()
    shown: list[str] = []
    pieces = _TextStream(StopCriteria(frozenset(), ("<end>",), tokenizer.decode), shown.append)
    for token in tokenizer("bread é <b <end> x", add_special_tokens=False)["input_ids"]:
        pieces.add(token)
    assert "".join(shown) == "bread é <b " and "\ufffd" not in "".join(shown) and len(shown) > 3
    assert not any(piece.endswith("<e") for piece in shown)


WRONG: list[tuple[list[str], str]] = [
    (["chat", "nowhere/at/all"], "nowhere/at/all does not exist"),
    (["chat", "FILE"], "is a file; expected a folder"),
    (["chat", "EMPTY"], "contains no model (config.json and safetensors files), adapter"),
    (["chat", "MODEL", "--base", "x"], "--base sets the base model of an adapter"),
    (["chat", "MODEL", "--checkpoint", "3"], "contains no checkpoints"),
    (["chat", "MODEL", "--temperature", "-1"], "--temperature is -1.0; expected 0 or more"),
    (["chat", "MODEL", "--top_p", "0"], "--top_p is 0.0; expected more than 0"),
    (["chat", "MODEL", "--max-new-tokens", "0"], "--max_new_tokens is 0"),
    (["chat", "MODEL", "--dtype", "int8"], "--dtype is 'int8'; expected auto, float32"),
    (["chat", "MODEL", "--device", "gpu"], "--device is 'gpu'; expected cpu, cuda"),
    (["chat", "MODEL", "--json"], "--json needs --prompt"),
    (["chat", "MODEL", "--prompt", " "], "--prompt is empty"),
    (["export", "MODEL", "MODEL"], "exists already and is not empty"),
    (["export", "MODEL", "OUT", "--dtype", "int4"], "--dtype is 'int4'; expected one of float32"),
    (["export", "MODEL", "OUT", "--max-shard-size", "big"], "--max_shard_size is 'big'; expected a size such as 5GB"),
    (["export", "MODEL", "OUT", "--dequantized"], "--dequantized needs --merge"),
    (["export", "MODEL", "OUT", "--merge", "--dequantized"], "contains a full model; there is no adapter"),
    (["export", "RUN", "OUT"], "is a run without a result or a checkpoint yet"),
]


def test_wrong_words_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "FILE").touch()
    for name in ("EMPTY", "MODEL", "RUN"):
        (tmp_path / name).mkdir()
    for name in ("MODEL/config.json", "RUN/settings.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "MODEL" / "model.safetensors").touch()
    for words, message in WRONG:
        given = [str(tmp_path / word) if word.isupper() else word for word in words]
        code, out, error = command(*given)
        assert (code, out) == (2, "") and message in error and error.count("\n") == 1, (words, error)
    assert not (tmp_path / "OUT").exists()
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "runs in one process, but there are 2 ranks" in command("chat", str(tmp_path / "MODEL"))[2]


class Terminal:
    """The command on a terminal of its own. A fresh process: one forked from here would wait for threads it lacks."""

    def __init__(self, *words: str) -> None:
        self.end, side = pty.openpty()
        command = [sys.executable, "-m", "fullshard", *words]
        self.process = subprocess.Popen(
            command, stdin=side, stdout=side, stderr=side, start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # shells let background jobs ignore it
        )  # fmt: skip
        os.close(side)
        self.said = ""

    def until(self, text: str, within: float = 120.0) -> str:
        """What is said up to this text."""
        limit = time.monotonic() + within
        while text not in self.said:
            ready, _, _ = select.select([self.end], [], [], max(0.0, limit - time.monotonic()))
            assert ready, f"waited for {text!r}, and there was {self.said!r}"
            try:
                self.said += os.read(self.end, 65536).decode(errors="replace")
            except OSError as gone:
                raise AssertionError(f"left before {text!r}: {self.said!r}") from gone
        before, _, self.said = self.said.partition(text)
        return before

    def prompt(self) -> None:
        """Wait for the prompt, and until the process sleeps in wait of a key.

        After printing the prompt Python's input() goes to sleep in select(). A signal that comes between the two is
        only looked at once a line was entered, so on a busy machine no fixed time is long enough.
        """
        self.until("> ")
        asleep, limit = 0, time.monotonic() + 120.0
        while asleep < 10:  # looks in a row; a process that merely waits for its turn is running to the kernel
            assert time.monotonic() < limit, "the process never came to rest at its prompt"
            time.sleep(0.02)
            asleep = asleep + 1 if self._sleeps() else 0

    def _sleeps(self) -> bool:
        """Whether the process is in an interruptible wait (as Linux tells it)."""
        state = Path(f"/proc/{self.process.pid}/stat")
        return not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "S"

    def type(self, text: str) -> None:
        os.write(self.end, text.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.end)


def test_a_conversation_is_added_to_json_lines_and_to_nothing_else(tmp_path: Path) -> None:
    talk: Any = SimpleNamespace(turns=[1, 2], messages=[{"role": "user", "content": "hé"}])
    for name, held, before in (
        ("new", None, ""),
        ("whole", '{"a": 1}\n', '{"a": 1}\n'),
        ("cut", '{"a": 1}', '{"a": 1}\n'),
    ):
        file = tmp_path / f"{name}.jsonl"
        if held is not None:
            file.write_text(held)
        save(talk, file)
        added = file.read_text(encoding="utf-8").removeprefix(before)
        assert json.loads(added) == {"messages": talk.messages} and added.endswith("\n"), name
    other = tmp_path / "model.safetensors"
    other.write_bytes(b"\x08\0\0\0{}\n")
    with pytest.raises(ConfigError, match="exists and is not a JSON lines file"):
        save(talk, other)
    assert other.read_bytes() == b"\x08\0\0\0{}\n"


@pytest.mark.slow
def test_talking_on_a_terminal(tmp_path: Path) -> None:
    """Commands, an answer that is stopped with Ctrl-C, Ctrl-C and Ctrl-D at the prompt."""
    base = chat_model(tmp_path / "base", max_position_embeddings=100_000)
    plain, tokenizer = AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    terminal = Terminal("chat", str(base), "--max_new_tokens", "30000", "--device", "cpu")
    try:
        terminal.until("/help lists commands.")
        terminal.type("/help\n")
        terminal.until("/save FILE")
        terminal.type("/system be brief\n")
        terminal.until("(new conversation)")
        terminal.type("the red bird\n")
        messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the red bird"}]
        first = tokenizer.decode(expected(plain, tokenizer, messages), skip_special_tokens=True)
        word = max("".join(c if c.isascii() and c.isalnum() else " " for c in first).split(), key=len)
        terminal.until(word)
        terminal.process.send_signal(signal.SIGINT)
        terminal.until("(stopped)")
        terminal.prompt()
        terminal.process.send_signal(signal.SIGINT)
        terminal.until("(/exit or Ctrl-D to exit)")
        terminal.type(f"/save {tmp_path / 'talk.jsonl'}\n")
        terminal.until("appended 2 messages")
        terminal.type("/nothing\n")
        terminal.until("/nothing: unknown command")
        terminal.prompt()
        terminal.type("\x04")
        assert terminal.process.wait(60) == 0
    finally:
        terminal.close()
    (row,) = (json.loads(line) for line in (tmp_path / "talk.jsonl").read_text().splitlines())
    said, first = (text.rstrip("\ufffd") for text in (row["messages"][2]["content"], first))
    assert row["messages"][:2] == messages and word in said
    assert said.startswith(first) or first.startswith(said), "as far as it got"
