"""Text generation with a model, sharded or not: prompt tokens in, answer tokens out.

transformers' `generate` does the work. This file calls it through an adapter, decides where an answer ends, and keeps
ranks with different prompts in step. The prompts come from `sft/samples.py` and `launch/chat.py`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from fullshard.config.errors import ConfigError, UserError
from fullshard.data.template_limits import run_limited
from fullshard.distributed import runtime
from fullshard.distributed.ranks import any_of
from fullshard.lora.virtual_tokens import is_prompt
from fullshard.weights.key_mapping import plain_model

PLACEHOLDER = "\u2042 an answer \u2042"
"""The assistant's text in a conversation that is rendered to find the template's text around it."""


@dataclass(frozen=True)
class StopCriteria:
    """Where an answer ends: at one of `tokens`, or before one of `texts`."""

    tokens: frozenset[int]
    texts: tuple[str, ...] = ()
    decode: Callable[[Sequence[int]], str] = lambda tokens: ""

    def cut(self, tokens: Sequence[int]) -> tuple[list[int], bool]:
        """The tokens of the answer, and whether the answer is complete."""
        at = next((i for i, token in enumerate(tokens) if token in self.tokens), None)
        kept = list(tokens[:at])
        if self._has_stop_text(kept):
            first = next(i for i in range(1, len(kept) + 1) if self._has_stop_text(kept[:i]))
            return kept[:first], True
        return kept, at is not None

    def _has_stop_text(self, tokens: Sequence[int]) -> bool:
        return bool(self.texts) and any(text in self.decode(tokens) for text in self.texts)

    def text(self, tokens: Sequence[int]) -> str:
        """The decoded answer, without a stop text."""
        answer = self.decode(tokens)
        for text in self.texts:
            answer = answer.partition(text)[0]
        return answer


def stop_criteria(model: Any, tokenizer: Any) -> StopCriteria:
    """The ends of an answer, from the model's generation config, the tokenizer and the chat template."""
    _, inner = plain_model(model)
    configured = getattr(getattr(inner, "generation_config", None), "eos_token_id", None)
    tokens = {tokenizer.eos_token_id, *(configured if isinstance(configured, list | tuple) else [configured])}
    marker = end_of_turn(tokenizer)
    ids = tokenizer(marker, add_special_tokens=False)["input_ids"] if marker else []
    single = len(ids) == 1 or (ids and ids[0] in tokenizer.added_tokens_decoder)
    tokens |= set(ids[:1]) if single else set()
    texts = (marker,) if ids and not single else ()
    decode = functools.partial(tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return StopCriteria(frozenset(token for token in tokens if token is not None), texts, decode)


def end_of_turn(tokenizer: Any) -> str:
    """The chat template's text after an assistant turn, such as <|im_end|>; empty if there is none."""
    text = _rendered(tokenizer, True)
    return text.partition(PLACEHOLDER)[2].strip().partition("\n")[0] if text else ""


def generation_prompt(tokenizer: Any) -> str:
    """The chat template's text before an assistant turn, such as <|im_start|>assistant."""
    with_prompt, without = _rendered(tokenizer, False, prompt=True), _rendered(tokenizer, False)
    return with_prompt.removeprefix(without) if with_prompt.startswith(without) else ""


def _rendered(tokenizer: Any, answered: bool, prompt: bool = False) -> str:
    if not getattr(tokenizer, "chat_template", None):
        return ""
    turns = [{"role": "user", "content": "?"}]
    turns += [{"role": "assistant", "content": PLACEHOLDER}] if answered else []
    try:
        return _apply_template(tokenizer, turns, prompt)
    except ConfigError:  # it does not end
        raise
    except Exception:  # a template that requires other roles or turns: its markers cannot be found this way
        return ""


def _apply_template(tokenizer: Any, turns: list[dict[str, Any]], prompt: bool) -> str:
    return run_limited(lambda: tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=prompt))


def chat_tokens(tokenizer: Any, messages: Sequence[dict[str, Any]]) -> list[int]:
    """The prompt tokens of a conversation, up to the start of the model's answer."""
    try:
        text = _apply_template(tokenizer, list(messages), True)
    except UserError:
        raise
    except Exception as error:  # a template is a program and may raise anything
        kind = "" if type(error).__module__.split(".")[0] == "jinja2" else f"{type(error).__name__}: "
        raise ConfigError(f"the chat template refuses this conversation: {kind}{error}.") from None
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters."""

    temperature: float = 0.0
    """0 is greedy decoding."""
    top_p: float = 1.0
    """With a temperature above 0: sample from the most likely tokens that together have this probability."""


class _Stop(StoppingCriteria):
    """Stops generation once the answers of all ranks are complete. All ranks call it once per token."""

    def __init__(self, stop: StopCriteria, start: int, stopped: Callable[[], bool]) -> None:
        self.stop, self.start, self.stopped = stop, start, stopped

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        _, complete = self.stop.cut(input_ids[0, self.start :].tolist())
        unfinished = any_of(int(not (complete or self.stopped())), "generation")
        return torch.full((input_ids.shape[0],), not unfinished, dtype=torch.bool, device=input_ids.device)


class _TokenStreamer:
    """A streamer for `generate`: passes each new token to a callback."""

    def __init__(self, on_token: Callable[[int], None]) -> None:
        self.on_token, self.started = on_token, False

    def put(self, value: torch.Tensor) -> None:
        if self.started:
            for token in value.reshape(-1).tolist():
                self.on_token(token)
        self.started = True  # the first call has the prompt

    def end(self) -> None:
        pass


@torch.no_grad()
def answer(
    model: Any,
    prompt: Sequence[int],
    stop: StopCriteria,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    on_token: Callable[[int], None] | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> list[int]:
    """Generate the answer to a prompt. All ranks must call this, each with its own prompt and the same limit.

    `on_token` is called with each new token; generation stops when `stopped` returns True.
    """
    _, inner = plain_model(model)
    assert inner is not None
    sampling = sampling or Sampling()
    ids = torch.tensor([list(prompt)], device=runtime.device())
    settings = copy.deepcopy(inner.generation_config)
    # `_Stop` ends generation, at the same token on all ranks.
    settings.update(
        max_new_tokens=max_new_tokens, max_length=None, eos_token_id=None, pad_token_id=0, num_beams=1,
        do_sample=sampling.temperature > 0, temperature=sampling.temperature or None, num_return_sequences=1,
        top_p=sampling.top_p if sampling.temperature else None, top_k=0 if sampling.temperature else None,
    )  # fmt: skip
    if is_prompt(model):
        settings.use_cache = False  # the adapter prepends its virtual tokens to every input
    was_training, usual = model.training, inner.generation_config
    model.eval()
    inner.generation_config = settings  # `generate` fills unset values from the model's own configuration
    try:
        with _through(model, inner):
            out = inner.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                stopping_criteria=StoppingCriteriaList([_Stop(stop, ids.shape[1], stopped)]),
                streamer=_TokenStreamer(on_token) if on_token is not None else None,
                synced_gpus=False,
            )
    finally:
        inner.generation_config = usual
        model.train(was_training)
    return stop.cut(out[0, ids.shape[1] :].tolist())[0]


@contextlib.contextmanager
def _through(model: Any, inner: Any) -> Iterator[None]:
    """Inside, forward passes of the base model go through the adapter: `generate` is a method of the base model."""
    if inner is model:
        yield
        return
    plain, inside = inner.forward, False

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside:
            return plain(*args, **kwargs)
        inside = True
        try:
            return model(*args, **kwargs)
        finally:
            inside = False

    before = inner.__dict__.get("forward")
    inner.forward = forward
    try:
        yield
    finally:
        if before is not None:
            inner.forward = before
        else:
            del inner.forward
