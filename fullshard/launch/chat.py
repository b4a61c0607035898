"""A conversation with a model, and the terminal interface of `fullshard chat`.

`Chat` keeps the messages and generates answers. `one_shot` answers one prompt; `talk` is the interactive loop.
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
from transformers import AutoTokenizer

from fullshard.checkpoint.adapter_from_checkpoint import write_adapter
from fullshard.config.errors import ConfigError, first_line
from fullshard.distributed import runtime
from fullshard.distributed.temporary_folders import temporary_folder
from fullshard.distributed.terminal_text import print_text
from fullshard.launch.find_result import Result
from fullshard.models.causal_lm import embedding_rows, get_causal_lm
from fullshard.models.generate import Sampling, StopCriteria, answer, chat_tokens, stop_criteria
from fullshard.quant.config import dense_dtype, quantization_from_options
from fullshard.weights.load import load_pretrained

FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
"""How to quantize a model that was not trained in 4 bits. Matrix products use the dtype of the other weights."""


@dataclass
class ChatModel:
    """A model with its tokenizer and stop criteria."""

    model: Any
    tokenizer: Any
    stop: StopCriteria

    @property
    def positions(self) -> int | None:
        """The longest context, if the configuration has one."""
        limit = getattr(get_causal_lm(self.model).config.get_text_config(), "max_position_embeddings", None)
        return limit if isinstance(limit, int) else None

    @property
    def rows(self) -> int:
        """The number of rows of the embedding."""
        return embedding_rows(self.model)


def load_chat_model(
    result: Result, dtype: str = "auto", device: str | None = None, four_bits: bool | None = None
) -> ChatModel:
    """Load a result. `four_bits`: quantize linear layers to 4 bits; None does as the run did."""
    if result.checkpoint and result.kind == "model":
        raise ConfigError(
            f"{result.folder} is a training checkpoint of a full model, which chat cannot load. Export it first: "
            f"fullshard export {result.folder} OUT; then fullshard chat OUT."
        )
    runtime.use_spmd(device=device)
    try:
        tokenizer = AutoTokenizer.from_pretrained(result.tokenizer)
    except Exception as error:  # damaged files raise errors of many kinds
        raise ConfigError(f"the tokenizer in {result.tokenizer} cannot be read: {first_line(error)}") from None
    quantization, dense_dtype = _quantization(result, four_bits)
    options = {
        "dtype": dense_dtype if dense_dtype is not None and dtype == "auto" else dtype,
        "quantization_config": quantization,
        "progress": sys.stderr.isatty(),
        "text_only": True,
    }
    with temporary_folder() as temporary:
        adapter = result.folder
        if result.kind == "adapter" and result.checkpoint:
            write_adapter(result.folder, temporary)
            adapter = str(temporary)
        if result.kind == "adapter":
            model = load_pretrained(str(result.base), adapter=adapter, **options)
        else:
            model = load_pretrained(result.folder, **options)
    return ChatModel(model.eval(), tokenizer, stop_criteria(model, tokenizer))


def _quantization(result: Result, four_bits: bool | None) -> tuple[Any, torch.dtype | None]:
    """The quantization config, and the dtype of the weights that stay dense if the run's settings determine it."""
    if not (result.trained_in_4_bits if four_bits is None else four_bits) or result.stored_in_4_bits:
        return None, None  # 4-bit weights in files are read as they are
    return trained_quantization(result.settings) if result.trained_in_4_bits else (FOUR_BITS, None)


def trained_quantization(settings: dict[str, Any]) -> tuple[Any, torch.dtype | None]:
    """The quantization config that a run used for its base model, and the dtype of the weights before quantization
    (None: that of the files), from its settings."""
    names = (
        "use_4bit_quantization", "use_nested_quant", "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage_dtype",
        "bnb_4bit_quant_type",
    )  # fmt: skip
    config = quantization_from_options(**{name: settings[name] for name in names if name in settings})
    dtype = settings.get("torch_dtype", "auto")
    if config is None or dtype != "auto":
        return config, getattr(torch, dtype, None)
    return config, dense_dtype(config.scheme.storage)


HELP = """\
  /reset        start a new conversation
  /system TEXT  set the system message and start a new conversation; without TEXT, show it
  /save FILE    append the conversation to FILE, as a row that fullshard sft reads
  /exit         exit (or Ctrl-D); Ctrl-C stops an answer"""
NO_TEMPLATE = "The tokenizer has no chat template: the model continues each line as plain text, without history."


@dataclass(frozen=True)
class Reply:
    """An answer, its token counts and why it ended."""

    text: str
    prompt_tokens: int
    tokens: int
    stopped: str
    """`end`: the model finished; `length`: `max_new_tokens` was reached; `user`: the user stopped it."""


class Chat:
    """A conversation. Without a chat template, the model continues each text on its own."""

    def __init__(
        self, model: ChatModel, system: str | None = None, max_new_tokens: int = 512, sampling: Sampling | None = None
    ) -> None:
        self.model, self.system = model, system
        self.max_new_tokens, self.sampling = max_new_tokens, sampling or Sampling()
        self.templated = bool(getattr(model.tokenizer, "chat_template", None))
        if system is not None and not self.templated:
            raise ConfigError("--system: the tokenizer has no chat template, so a system message cannot be used.")
        self.turns: list[dict[str, str]] = []

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation so far, with the system message."""
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    def ask(
        self, text: str, show: Callable[[str], None] = lambda text: None, stopped: Callable[[], bool] = lambda: False
    ) -> Reply:
        """Send a message and return the answer. `show` is called with each new piece of text."""
        turn = {"role": "user", "content": text}
        model = self.model
        if self.templated:
            prompt = chat_tokens(model.tokenizer, [*self.messages, turn])
        else:
            prompt = list(model.tokenizer(text)["input_ids"])
        if unknown := [token for token in prompt if token >= model.rows]:
            raise ConfigError(
                f"the tokenizer produced token {unknown[0]}, but the model's embedding has {model.rows} rows: they do "
                f"not belong together."
            )
        limit = self._token_limit(len(prompt))
        stream = _TextStream(model.stop, show)
        tokens = answer(model.model, prompt, model.stop, limit, self.sampling, stream.add, stopped)
        text = model.stop.text(tokens)
        stream.show_up_to(text)
        self.turns += [turn, {"role": "assistant", "content": text}] if self.templated else []
        reason = "user" if stopped() else "length" if len(stream.tokens) >= limit and not stream.complete else "end"
        return Reply(text, len(prompt), len(tokens), reason)

    def _token_limit(self, prompt: int) -> int:
        if not prompt:
            raise ConfigError("the prompt is empty; expected text.")
        positions = self.model.positions
        limit = self.max_new_tokens if positions is None else min(self.max_new_tokens, positions - prompt)
        if limit < 1:
            raise ConfigError(
                f"the conversation has {prompt} tokens, but the model has {positions} positions; start a new one."
            )
        return limit


class _TextStream:
    """Shows an answer while it is generated: only complete characters, and no part of a stop text."""

    def __init__(self, stop: StopCriteria, show: Callable[[str], None]) -> None:
        self.stop, self.show = stop, show
        self.tokens: list[int] = []
        self.shown, self.complete = "", False

    def add(self, token: int) -> None:
        self.tokens.append(token)
        answer, self.complete = self.stop.cut(self.tokens)
        text = self.stop.text(answer)
        withheld = 0
        for stop_text in self.stop.texts:
            withheld = max(withheld, *(n for n in range(len(stop_text)) if text.endswith(stop_text[:n])))
        text = text[: len(text) - withheld]
        if not text.endswith("\ufffd"):
            self.show_up_to(text)

    def show_up_to(self, text: str) -> None:
        if text.startswith(self.shown) and text != self.shown:
            self.show(text[len(self.shown) :])
            self.shown = text


def one_shot(chat: Chat, prompt: str, as_json: bool = False) -> None:
    """Print the answer to one prompt, or with `as_json` one JSON object with the answer and token counts."""
    if as_json:
        reply = chat.ask(prompt)
        print_text(json.dumps({"prompt": prompt, "answer": reply.text, **_numbers(reply)}))
        return
    chat.ask(prompt, _write)
    print_text("")


def talk(chat: Chat, name: str) -> None:
    """Chat on the terminal until the user exits."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - adds line editing and history to input()
    interactive = sys.stdin.isatty()
    print_text(f"{name}: {_about(chat)}. /help lists commands.")
    if not chat.templated:
        print_text(NO_TEMPLATE)
    while True:
        try:
            text = input("> " if interactive else "").strip()
            if text == "/exit":
                return
            if text.startswith("/"):
                _command(chat, text)
            elif text:
                _answer(chat, text)
        except EOFError:
            print_text("")
            return
        except KeyboardInterrupt:
            print_text("\n(/exit or Ctrl-D to exit)")
        except ConfigError as error:
            print_text(f"({error})")


def _answer(chat: Chat, text: str) -> None:
    with _interruptible() as stopped:
        reply = chat.ask(text, _write, stopped)
    note = {"user": " (stopped)", "length": f" … (stopped after {reply.tokens} tokens: --max_new_tokens)"}
    print_text(note.get(reply.stopped, ""))


def _command(chat: Chat, text: str) -> None:
    name, _, rest = text.partition(" ")
    if name == "/help":
        print_text(HELP)
    elif name == "/reset":
        chat.turns.clear()
        print_text("(new conversation)")
    elif name == "/system" and rest.strip():
        if not chat.templated:
            raise ConfigError("the tokenizer has no chat template, so a system message cannot be used.")
        chat.system, chat.turns = rest.strip(), []
        print_text("(new conversation)")
    elif name == "/system":
        print_text(f"({chat.system or 'no system message'})")
    elif name == "/save" and rest.strip():
        print_text(f"({save(chat, Path(rest.strip()).expanduser())})")
    else:
        print_text(f"({name}: unknown command, or an argument is missing)\n{HELP}")


def save(chat: Chat, path: Path) -> str:
    """Append the conversation to a JSON lines file; returns a message for the user."""
    if not chat.turns:
        raise ConfigError("there is no conversation to save yet.")
    try:
        line = json.dumps({"messages": chat.messages}, ensure_ascii=False)
        separator = "" if not path.exists() or _ends_with_newline(path) else "\n"
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{separator}{line}\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}.") from None
    return f"appended {len(chat.turns)} messages to {path}"


def _ends_with_newline(path: Path) -> bool:
    """Whether a JSON lines file ends with a newline. Any other kind of file is an error."""
    with path.open("rb") as file:
        first, size = file.readline(), file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        last = file.read()
    try:
        if not size or isinstance(json.loads(first), dict):
            return last in (b"", b"\n")
    except ValueError:
        pass
    raise ConfigError(f"{path} exists and is not a JSON lines file; choose another file.")


@contextlib.contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Inside, Ctrl-C requests a stop after the next token; a second Ctrl-C interrupts at once."""
    interrupted = False

    def stop(*_: Any) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield lambda: interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def _about(chat: Chat) -> str:
    temperature = chat.sampling.temperature
    decoding = f"temperature {temperature:g}, top_p {chat.sampling.top_p:g}" if temperature else "greedy decoding"
    return f"on {runtime.device()}, {decoding}"


def _numbers(reply: Reply) -> dict[str, Any]:
    return {"prompt_tokens": reply.prompt_tokens, "answer_tokens": reply.tokens, "stopped": reply.stopped}


def _write(text: str) -> None:
    """Show a piece of an answer. In a pipe or a file it is data."""
    if sys.stdout.isatty():
        print_text(text, end="")
    else:
        sys.stdout.write(text)
        sys.stdout.flush()


def seed(number: int | None) -> None:
    """Seed torch's generators; None seeds them differently each time."""
    if number is None:
        torch.seed()
    else:
        torch.manual_seed(number)
