"""`fullshard chat` and `fullshard export`: settings checked before torch is imported, then the work."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from fullshard.errors import ConfigError
from fullshard.paths import check_new_folder
from fullshard.results.find_result import fetched, find

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ChatOptions:
    """The flags of `fullshard chat`."""

    prompt: str | None = None
    system: str | None = None
    max_new_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    dtype: str = "auto"
    device: str | None = None
    base: str | None = None
    checkpoint: str | None = None
    use_4bit_quantization: bool | None = None
    as_json: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(f"--max_new_tokens is {self.max_new_tokens}; expected 1 or more.")
        if not self.temperature >= 0:
            raise ConfigError(f"--temperature is {self.temperature}; expected 0 or more.")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"--top_p is {self.top_p}; expected more than 0, and at most 1.")
        if self.dtype not in ("auto", *DTYPES):
            raise ConfigError(f"--dtype is {self.dtype!r}; expected auto, {', '.join(DTYPES)}.")
        if self.device not in (None, "cpu", "cuda"):
            raise ConfigError(f"--device is {self.device!r}; expected cpu or cuda.")
        if self.as_json and self.prompt is None:
            raise ConfigError("--json goes with --prompt: one prompt, one answer.")


@dataclass(frozen=True)
class ExportOptions:
    """The flags of `fullshard export`."""

    merge: bool = False
    dtype: str | None = None
    dequantized: bool = False
    base: str | None = None
    checkpoint: str | None = None
    max_shard_size: str = "10GB"
    verify: bool = True
    as_json: bool = False

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigError(f"--dtype is {self.dtype!r}; expected one of {', '.join(DTYPES)}.")
        if re.fullmatch(r"\d+(\.\d+)?([KMGT]B)?", self.max_shard_size, re.IGNORECASE) is None:
            raise ConfigError(f"--max_shard_size is {self.max_shard_size!r}; expected a size such as 5GB or 500MB.")
        if self.dequantized and not self.merge:
            raise ConfigError("--dequantized says what an adapter is added to; it goes with --merge.")


def chat(name: str, options: ChatOptions) -> None:
    """Talk, or answer one prompt."""
    _alone("chat")
    place = find(name, options.base, options.checkpoint)
    prompt = sys.stdin.read().strip() if options.prompt == "-" else options.prompt
    if prompt is not None and not prompt.strip():
        raise ConfigError("--prompt is empty; expected something to answer.")
    _hush()
    from fullshard.models.generate import Sampling
    from fullshard.results import chat as chatting
    from fullshard.results.chat_model import open_speaker

    speaker = open_speaker(fetched(place, options.base), options.dtype, options.device, options.use_4bit_quantization)
    chatting.seed(options.seed)
    sampling = Sampling(options.temperature, options.top_p)
    conversation = chatting.Chat(speaker, options.system, options.max_new_tokens, sampling)
    if prompt is None:
        chatting.talk(conversation, name)
        return
    if not conversation.templated:
        print(chatting.NO_TEMPLATE, file=sys.stderr)
    chatting.one_shot(conversation, prompt, options.as_json)


def export(name: str, out: str, options: ExportOptions) -> None:
    """Write a result, and say what was written."""
    _alone("export")
    place = find(name, options.base, options.checkpoint)
    check_new_folder(out)
    if place.kind == "model" and options.dequantized:
        raise ConfigError(f"--dequantized: {name} holds a whole model; there is no adapter to add.")
    _hush()
    from fullshard.results.export import Choices, summary
    from fullshard.results.export import export as write

    if place.kind == "model" and options.merge:
        print(f"{name} holds a whole model: there is nothing to merge.", file=sys.stderr)
    choices = Choices(
        options.merge, options.dtype, options.dequantized, options.max_shard_size, options.verify, sys.stderr.isatty()
    )
    found = write(fetched(place, options.base), Path(out).expanduser(), choices)
    print(json.dumps(found) if options.as_json else "\n".join(summary(found)))


def _alone(command: str) -> None:
    world = os.environ.get("WORLD_SIZE", "1")
    if world.isdigit() and int(world) > 1:
        raise ConfigError(f"fullshard {command} runs in one process, and here are {world} ranks; start it by itself.")


def _hush() -> None:
    """Let only warnings through: what the user reads is the answer."""
    from fullshard import log_filter, runtime

    log_filter.leave_out(log_filter.TRAINED)
    runtime.get_logger().setLevel("WARNING")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
