"""`fullshard chat` and `fullshard export`. Options are checked before torch is imported."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from fullshard.config.errors import ConfigError
from fullshard.config.options import counting_number
from fullshard.config.paths import check_new_folder
from fullshard.device.device_kinds import KINDS
from fullshard.distributed.terminal_text import print_text
from fullshard.launch.find_result import fetched, find_result

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
        if self.device not in (None, "cpu", *KINDS):
            raise ConfigError(f"--device is {self.device!r}; expected cpu, {', '.join(KINDS)}.")
        if self.as_json and self.prompt is None:
            raise ConfigError("--json needs --prompt: it prints one answer.")


@dataclass(frozen=True)
class ExportOptions:
    """The flags of `fullshard export`."""

    merge: bool = False
    dtype: str | None = None
    dequantized: bool = False
    requantize: bool = False
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
            raise ConfigError(
                "--dequantized needs --merge: it selects the base weights that the adapter is merged into."
            )
        if self.requantize and not self.merge:
            raise ConfigError("--requantize quantizes merged weights again; set --merge too.")
        if self.requantize and self.dtype is not None:
            raise ConfigError(
                f"--requantize keeps the format of the base's files, and --dtype is {self.dtype}; use one."
            )


def chat(name: str, options: ChatOptions) -> None:
    """Start a conversation, or answer one prompt."""
    _check_one_process("chat")
    result = find_result(name, options.base, options.checkpoint)
    prompt = sys.stdin.read().strip() if options.prompt == "-" else options.prompt
    if prompt is not None and not prompt.strip():
        raise ConfigError("--prompt is empty; expected text.")
    _only_warnings()
    from fullshard.launch import chat as chatting
    from fullshard.launch.chat import load_chat_model
    from fullshard.models.generate import Sampling

    model = load_chat_model(fetched(result, options.base), options.dtype, options.device, options.use_4bit_quantization)
    chatting.seed(options.seed)
    sampling = Sampling(options.temperature, options.top_p)
    conversation = chatting.Chat(model, options.system, options.max_new_tokens, sampling)
    if prompt is None:
        chatting.talk(conversation, name)
        return
    if not conversation.templated:
        print_text(chatting.NO_TEMPLATE, sys.stderr)
    chatting.one_shot(conversation, prompt, options.as_json)


def export(name: str, out: str, options: ExportOptions) -> None:
    """Write a result and print what was written."""
    _check_one_process("export")
    result = find_result(name, options.base, options.checkpoint)
    check_new_folder(out)
    if result.kind == "model" and options.dequantized:
        raise ConfigError(f"--dequantized: {name} contains a full model; there is no adapter to merge.")
    if result.kind == "model" and options.requantize:
        raise ConfigError(f"--requantize: {name} contains a full model; there is no adapter to merge.")
    _only_warnings()
    from fullshard.launch.export import Choices, summary
    from fullshard.launch.export import export as write

    if result.kind == "model" and options.merge:
        print_text(f"{name} contains a full model; there is no adapter to merge.", sys.stderr)
    choices = Choices(
        options.merge, options.dtype, options.dequantized, options.requantize, options.max_shard_size, options.verify,
        sys.stderr.isatty(),
    )  # fmt: skip
    written = write(fetched(result, options.base), Path(out).expanduser(), choices)
    print_text(json.dumps(written) if options.as_json else "\n".join(summary(written)))


def _check_one_process(command: str) -> None:
    world = os.environ.get("WORLD_SIZE", "1")
    if (counting_number(world) or 1) > 1:
        raise ConfigError(
            f"fullshard {command} runs in one process, but there are {world} ranks; start it without a launcher."
        )


def _only_warnings() -> None:
    """Log warnings only."""
    from fullshard.distributed import log_filter, runtime

    log_filter.install_filters(log_filter.TRAINED)
    runtime.get_logger().setLevel("WARNING")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
