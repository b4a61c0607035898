"""A conversation with a model: turns in, answers out as they come, and what `fullshard chat` does on the terminal.

`Chat` keeps the turns and asks the model; `one_shot` and `talk` are the two ways to use it from a command line.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fullshard import runtime
from fullshard.errors import ConfigError
from fullshard.models.generate import Ends, Sampling, answer, chat_tokens
from fullshard.reporting.reporter import printable
from fullshard.results.chat_model import Speaker

HELP = """\
  /reset        forget the conversation
  /system TEXT  say who the assistant is, and begin anew; alone, show it
  /save FILE    add the conversation to FILE, as a row that fullshard sft reads
  /exit         leave (so does Ctrl-D); Ctrl-C stops an answer"""
NO_TEMPLATE = "The tokenizer has no chat template: what you write is continued as text, each line for itself."


@dataclass(frozen=True)
class Reply:
    """An answer, and how it came about."""

    text: str
    prompt_tokens: int
    tokens: int
    stopped: str
    """`end`: the model ended it; `length`: `max_new_tokens` did; `user`: it was broken off."""


class Chat:
    """A conversation. Without a chat template every text is continued for itself."""

    def __init__(
        self, speaker: Speaker, system: str | None = None, max_new_tokens: int = 512, sampling: Sampling | None = None
    ) -> None:
        self.speaker, self.system = speaker, system
        self.max_new_tokens, self.sampling = max_new_tokens, sampling or Sampling()
        self.templated = bool(getattr(speaker.tokenizer, "chat_template", None))
        if system is not None and not self.templated:
            raise ConfigError("--system: the tokenizer has no chat template, so there is no place to say it.")
        self.turns: list[dict[str, str]] = []

    @property
    def messages(self) -> list[dict[str, str]]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    def ask(
        self, text: str, show: Callable[[str], None] = lambda said: None, stopped: Callable[[], bool] = lambda: False
    ) -> Reply:
        """Say something and get the answer; `show` is handed its text piece by piece."""
        turn = {"role": "user", "content": text}
        speaker = self.speaker
        if self.templated:
            prompt = chat_tokens(speaker.tokenizer, [*self.messages, turn])
        else:
            prompt = list(speaker.tokenizer(text)["input_ids"])
        if unknown := [token for token in prompt if token >= speaker.rows]:
            raise ConfigError(
                f"the tokenizer gives token {unknown[0]}, the model's embedding has {speaker.rows} rows: they do not "
                f"belong together."
            )
        limit = self._room(len(prompt))
        pieces = _Pieces(speaker.ends, show)
        tokens = answer(speaker.model, prompt, speaker.ends, limit, self.sampling, pieces.tell, stopped)
        said = speaker.ends.text(tokens)
        pieces.finish(said)
        self.turns += [turn, {"role": "assistant", "content": said}] if self.templated else []
        over = "user" if stopped() else "length" if len(pieces.tokens) >= limit and not pieces.ended else "end"
        return Reply(said, len(prompt), len(tokens), over)

    def _room(self, prompt: int) -> int:
        if not prompt:
            raise ConfigError("there is nothing to answer: the prompt is empty.")
        positions = self.speaker.positions
        room = self.max_new_tokens if positions is None else min(self.max_new_tokens, positions - prompt)
        if room < 1:
            raise ConfigError(f"the conversation has {prompt} tokens, the model {positions} positions; begin anew.")
        return room


class _Pieces:
    """Tokens as they come, shown as text: whole characters only, and nothing of what may be a closing mark."""

    def __init__(self, ends: Ends, show: Callable[[str], None]) -> None:
        self.ends, self.show = ends, show
        self.tokens: list[int] = []
        self.shown, self.ended = "", False

    def tell(self, token: int) -> None:
        self.tokens.append(token)
        kept, self.ended = self.ends.cut(self.tokens)
        text = self.ends.text(kept)
        held = 0
        for mark in self.ends.texts:
            held = max(held, *(n for n in range(len(mark)) if text.endswith(mark[:n])))
        text = text[: len(text) - held]
        if not text.endswith("\ufffd"):
            self.finish(text)

    def finish(self, text: str) -> None:
        if text.startswith(self.shown) and text != self.shown:
            self.show(text[len(self.shown) :])
            self.shown = text


def one_shot(chat: Chat, prompt: str, as_json: bool = False) -> None:
    """Answer one prompt: the answer alone on stdout, or all there is to know of it as one JSON object."""
    if as_json:
        reply = chat.ask(prompt)
        print(json.dumps({"prompt": prompt, "answer": reply.text, **_numbers(reply)}))
        return
    chat.ask(prompt, _write)
    print(flush=True)


def talk(chat: Chat, name: str) -> None:
    """Talk on the terminal until the user leaves."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() editing and a history
    asking = sys.stdin.isatty()
    print(f"{name}: {_about(chat)}. /help lists commands.", flush=True)
    if not chat.templated:
        print(NO_TEMPLATE, flush=True)
    while True:
        try:
            text = input("> " if asking else "").strip()
            if text == "/exit":
                return
            if text.startswith("/"):
                _command(chat, text)
            elif text:
                _answer(chat, text)
        except EOFError:
            print(flush=True)
            return
        except KeyboardInterrupt:
            print("\n(/exit or Ctrl-D leaves)", flush=True)
        except ConfigError as error:
            print(f"({error})", flush=True)


def _answer(chat: Chat, text: str) -> None:
    with _interruptible() as stopped:
        reply = chat.ask(text, _write, stopped)
    note = {"user": " (stopped)", "length": f" … (cut off at {reply.tokens} tokens: --max_new_tokens)"}
    print(note.get(reply.stopped, ""), flush=True)


def _command(chat: Chat, text: str) -> None:
    name, _, rest = text.partition(" ")
    if name == "/help":
        print(HELP)
    elif name == "/reset":
        chat.turns.clear()
        print("(forgotten)")
    elif name == "/system" and rest.strip():
        if not chat.templated:
            raise ConfigError("the tokenizer has no chat template, so there is no place to say it.")
        chat.system, chat.turns = rest.strip(), []
        print("(begun anew)")
    elif name == "/system":
        print(f"({chat.system or 'nothing was said'})")
    elif name == "/save" and rest.strip():
        print(f"({save(chat, Path(rest.strip()).expanduser())})")
    else:
        print(f"({name} is no command, or needs a word after it)\n{HELP}")


def save(chat: Chat, path: Path) -> str:
    """Add the conversation to a file of JSON lines; what was done, in words."""
    if not chat.turns:
        raise ConfigError("there is no conversation to save yet.")
    try:
        line = json.dumps({"messages": chat.messages}, ensure_ascii=False)
        begin = "" if not path.exists() or _ends_a_line(path) else "\n"
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{begin}{line}\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}.") from None
    return f"added {len(chat.turns)} turns to {path}"


def _ends_a_line(path: Path) -> bool:
    """Whether a file of JSON lines ends with a whole one; other files, which one more would spoil, are refused."""
    with path.open("rb") as file:
        first, size = file.readline(), file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        last = file.read()
    try:
        if not size or isinstance(json.loads(first), dict):
            return last in (b"", b"\n")
    except ValueError:
        pass
    raise ConfigError(f"{path} exists and is not a file of JSON lines; name another, or a new one.")


@contextlib.contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Inside, Ctrl-C asks for a stop after the next token; a second one does not wait for it."""
    asked = False

    def stop(*_: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


def _about(chat: Chat) -> str:
    warmth = chat.sampling.temperature
    how = f"temperature {warmth:g}, top_p {chat.sampling.top_p:g}" if warmth else "the likeliest token each time"
    return f"on {runtime.device()}, {how}"


def _numbers(reply: Reply) -> dict[str, Any]:
    return {"prompt_tokens": reply.prompt_tokens, "answer_tokens": reply.tokens, "stopped": reply.stopped}


def _write(text: str) -> None:
    print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)


def seed(number: int | None) -> None:
    """Random choices that repeat with the same number; without one they differ each time."""
    if number is None:
        torch.seed()
    else:
        torch.manual_seed(number)
