"""From prompt tokens to answer tokens: how a model, sharded or not, is asked for a continuation.

transformers' `generate` does the work; this file says how it is reached through an adapter, where an answer ends, and
how ranks with different prompts stay in step. Which prompts there are is the business of `train/samples.py` and of the
chat.
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

from fullshard import runtime
from fullshard.errors import ConfigError
from fullshard.lora.virtual_tokens import is_prompt
from fullshard.ranks import any_of
from fullshard.weights.key_mapping import plain_model

PLACEHOLDER = "\u2042 an answer \u2042"
"""Stands for what the assistant says where only the template around it matters."""


@dataclass(frozen=True)
class Ends:
    """Where an answer ends: at one of these tokens, or before one of these texts."""

    tokens: frozenset[int]
    texts: tuple[str, ...] = ()
    decode: Callable[[Sequence[int]], str] = lambda tokens: ""

    def cut(self, tokens: Sequence[int]) -> tuple[list[int], bool]:
        """The tokens of the answer, and whether its end has come."""
        at = next((i for i, token in enumerate(tokens) if token in self.tokens), None)
        kept = list(tokens[:at])
        if self._marked(kept):
            first = next(i for i in range(1, len(kept) + 1) if self._marked(kept[:i]))
            return kept[:first], True
        return kept, at is not None

    def _marked(self, tokens: Sequence[int]) -> bool:
        return bool(self.texts) and any(text in self.decode(tokens) for text in self.texts)

    def text(self, tokens: Sequence[int]) -> str:
        """What the answer's tokens say, without a closing mark."""
        said = self.decode(tokens)
        for text in self.texts:
            said = said.partition(text)[0]
        return said


def ends_of(model: Any, tokenizer: Any) -> Ends:
    """The ends that the model's generation settings, its tokenizer and its chat template know."""
    _, inner = plain_model(model)
    stated = getattr(getattr(inner, "generation_config", None), "eos_token_id", None)
    tokens = {tokenizer.eos_token_id, *(stated if isinstance(stated, list | tuple) else [stated])}
    mark = end_mark(tokenizer)
    ids = tokenizer(mark, add_special_tokens=False)["input_ids"] if mark else []
    single = len(ids) == 1 or (ids and ids[0] in tokenizer.added_tokens_decoder)
    tokens |= set(ids[:1]) if single else set()
    texts = (mark,) if ids and not single else ()
    decode = functools.partial(tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return Ends(frozenset(token for token in tokens if token is not None), texts, decode)


def end_mark(tokenizer: Any) -> str:
    """What the chat template writes right after an assistant's turn, such as <|im_end|>; empty if nothing."""
    said = _rendered(tokenizer, True)
    return said.partition(PLACEHOLDER)[2].strip().partition("\n")[0] if said else ""


def lead_in(tokenizer: Any) -> str:
    """What the chat template writes right before an assistant's turn, such as <|im_start|>assistant."""
    asked, without = _rendered(tokenizer, False, prompt=True), _rendered(tokenizer, False)
    return asked.removeprefix(without) if asked.startswith(without) else ""


def _rendered(tokenizer: Any, answered: bool, prompt: bool = False) -> str:
    if not getattr(tokenizer, "chat_template", None):
        return ""
    turns = [{"role": "user", "content": "?"}]
    turns += [{"role": "assistant", "content": PLACEHOLDER}] if answered else []
    try:
        return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=prompt)
    except Exception:  # a template that wants other roles or more of them: it has no mark that we could know of
        return ""


def chat_tokens(tokenizer: Any, messages: Sequence[dict[str, Any]]) -> list[int]:
    """A conversation as the model reads it, up to where its answer begins."""
    try:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    except Exception as error:
        if type(error).__module__.split(".")[0] != "jinja2":
            raise
        raise ConfigError(f"the chat template refuses this conversation: {error}.") from None
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 0.0
    """0 takes the likeliest one."""
    top_p: float = 1.0
    """Above 0: choose among the likeliest tokens that together have this probability."""


class _Stop(StoppingCriteria):
    """Ends generation once every rank's answer has ended. Called once per token on all ranks, so they stay in step."""

    def __init__(self, ends: Ends, start: int, stopped: Callable[[], bool]) -> None:
        self.ends, self.start, self.stopped = ends, start, stopped

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        _, over = self.ends.cut(input_ids[0, self.start :].tolist())
        goes_on = any_of(int(not (over or self.stopped())), "generation")
        return torch.full((input_ids.shape[0],), not goes_on, dtype=torch.bool, device=input_ids.device)


class _Told:
    """Passes new tokens on as they come; what `generate` calls a streamer."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        self.tell, self.begun = tell, False

    def put(self, value: torch.Tensor) -> None:
        if self.begun:
            for token in value.reshape(-1).tolist():
                self.tell(token)
        self.begun = True  # what comes first is the prompt

    def end(self) -> None:
        pass


@torch.no_grad()
def answer(
    model: Any,
    prompt: Sequence[int],
    ends: Ends,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    tell: Callable[[int], None] | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> list[int]:
    """The model's answer to a prompt. All ranks must call it, each with a prompt of its own and the same limit.

    `tell` gets each token as it comes; `stopped` is asked after each whether to leave off.
    """
    _, inner = plain_model(model)
    assert inner is not None
    how = sampling or Sampling()
    ids = torch.tensor([list(prompt)], device=runtime.device())
    settings = copy.deepcopy(inner.generation_config)
    # Where an answer ends is decided by `_Stop`, alike on all ranks.
    settings.update(
        max_new_tokens=max_new_tokens, max_length=None, eos_token_id=None, pad_token_id=0, num_beams=1,
        do_sample=how.temperature > 0, temperature=how.temperature or None, num_return_sequences=1,
        top_p=how.top_p if how.temperature else None, top_k=0 if how.temperature else None,
    )  # fmt: skip
    if is_prompt(model):
        settings.use_cache = False  # the adapter puts its prompt before whatever it is given
    was_training, usual = model.training, inner.generation_config
    model.eval()
    inner.generation_config = settings  # what a configuration leaves open is taken from the model's own
    try:
        with _through(model, inner):
            out = inner.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                stopping_criteria=StoppingCriteriaList([_Stop(ends, ids.shape[1], stopped)]),
                streamer=_Told(tell) if tell is not None else None,
                synced_gpus=False,
            )
    finally:
        inner.generation_config = usual
        model.train(was_training)
    return ends.cut(out[0, ids.shape[1] :].tolist())[0]


@contextlib.contextmanager
def _through(model: Any, inner: Any) -> Iterator[None]:
    """`generate` belongs to the model inside an adapter; its forward passes are to go through the adapter's own."""
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

    held = inner.__dict__.get("forward")
    inner.forward = forward
    try:
        yield
    finally:
        if held is not None:
            inner.forward = held
        else:
            del inner.forward
