"""Sample generations: a few prompts that the model answers at each evaluation.

Prompts come from the evaluation data (the tokens before the last trained part) or from the user's file (`run_data.py`).
The ranks divide them and generate in step. Answers are greedy, so they draw no random numbers and do not change
training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fullshard.config.errors import ConfigError
from fullshard.data.chat_template import template_of
from fullshard.data.render_chat import Conversation
from fullshard.data.template_fields import adapt_messages
from fullshard.data.token_table import TokenTable
from fullshard.distributed import data_ranks, runtime
from fullshard.distributed.ranks import exchange, run_on_all_ranks
from fullshard.models.causal_lm import get_causal_lm
from fullshard.models.generate import StopCriteria, answer, generation_prompt, stop_criteria
from fullshard.report.records import Sample
from fullshard.sft.run_data import Question, read_prompts
from fullshard.sft.sft_config import SFTConfig


@dataclass(frozen=True)
class Prompt:
    """The tokens that the model continues, and the text to show for them."""

    tokens: tuple[int, ...]
    shown: str
    reference: str | None


class SamplePrompts(NamedTuple):
    """The prompts that are answered at each evaluation, and what ends an answer."""

    prompts: Sequence[Prompt]
    stop: StopCriteria


class Samples:
    """Answers the prompts after each evaluation; a callback of the trainer's own. All ranks take part."""

    def __init__(self, samples: SamplePrompts, model: Any, record: Callable[[int, list[Sample]], None]) -> None:
        self.samples, self.model, self.record = samples, model, record

    def on_evaluate(self, args: SFTConfig, state: Any, control: Any, **facts: Any) -> None:
        """Answer the prompts and record the answers."""
        prompts, stop = self.samples
        answers = _answers(self.model, prompts, stop, args.sample_max_new_tokens)
        step, pairs = state.global_step, zip(prompts, answers, strict=True)
        self.record(step, [Sample(step, p.shown, text, p.reference) for p, text in pairs])


def choose_samples(
    config: SFTConfig, model: Any, evaluation: TokenTable | dict[str, TokenTable] | None, tokenizer: Any
) -> SamplePrompts | None:
    """The prompts that the settings ask for and that fit into the model; of several data sets, those of the first. All
    ranks must call it."""
    if not (config.eval_samples or config.sample_prompts):
        return None
    table = next(iter(evaluation.values())) if isinstance(evaluation, dict) else evaluation
    prompts = run_on_all_ranks(lambda: select_prompts(config, table, tokenizer), "sample prompts")
    return SamplePrompts(_that_fit(prompts, model, config.sample_max_new_tokens), stop_criteria(model, tokenizer))


def _answers(model: Any, prompts: Sequence[Prompt], stop: StopCriteria, limit: int) -> list[str]:
    """The answers, in order, on every rank. Ranks take turns; all of them generate equally often."""
    world, mine = data_ranks.data_size(), []
    for first in range(0, len(prompts), world):
        at = first + data_ranks.data_rank()
        tokens = answer(model, prompts[at if at < len(prompts) else first].tokens, stop, limit)
        mine.append(stop.text(tokens))
    by_rank = data_ranks.of_each_row(exchange(mine, "sample generations"))
    return [by_rank[i % world][i // world] for i in range(len(prompts))]


def select_prompts(config: SFTConfig, table: TokenTable | None, tokenizer: Any) -> list[Prompt]:
    """The prompts that the settings ask for."""
    if config.sample_prompts is not None:
        return [_prompt_of(question, tokenizer, config) for question in read_prompts(config.sample_prompts)]
    if table is None:
        return []
    prompts: list[Prompt] = []
    opening = generation_prompt(tokenizer)
    before = tokenizer(opening, add_special_tokens=False)["input_ids"] if opening else []
    for start, end in zip(table.document_starts[:-1], table.document_starts[1:], strict=True):
        if len(prompts) == config.eval_samples:
            break
        ids, trained = table.tokens[start:end].tolist(), np.asarray(table.loss_mask[start:end]) != 0
        if (split := answer_begins(ids, trained, before)) > 0:
            reference = tokenizer.decode(ids[split:], skip_special_tokens=True, clean_up_tokenization_spaces=False)
            shown = tokenizer.decode(ids[:split], clean_up_tokenization_spaces=False)
            prompts.append(Prompt(tuple(ids[:split]), shown, reference.strip()))
    return prompts


def answer_begins(ids: Sequence[int], trained: Any, before: Sequence[int]) -> int:
    """The index at which a document's last answer begins; 0 if it is too short to have a prompt.

    The last answer is the last run of trained tokens. Where all tokens are trained, it is what follows the last
    `before` (the tokens that open an assistant's turn); in plain text it is the second half.
    """
    if trained.any() and not trained.all():
        last = int(np.flatnonzero(trained)[-1])
        gaps = np.flatnonzero(~trained[:last])
        if len(gaps):
            return int(gaps[-1]) + 1
    size = len(before)
    for at in range(len(ids) - size - 1, -1, -1) if size else ():
        if list(ids[at : at + size]) == list(before):
            return at + size
    return len(ids) // 2


def _prompt_of(question: Question, tokenizer: Any, config: SFTConfig) -> Prompt:
    """A prompt of the user's file: by the chat template, or without one as text to continue."""
    messages, template, where = question.messages, template_of(tokenizer), "sample_prompts"
    shown = str(messages[-1]["content"])
    if template is not None:
        adapted = adapt_messages(messages, question.tools, template, tokenizer, where)
        kwargs = question.template_kwargs or {}
        text = Conversation(tokenizer, template, adapted, where, question.tools, kwargs).prompt()
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        return Prompt(tuple(tokens), shown, question.reference)
    if len(messages) > 1:
        raise ConfigError(
            "sample_prompts: there are conversations, but the tokenizer has no chat template; choose one with "
            "chat_template_format."
        )
    tokens = tokenizer(shown, add_special_tokens=config.add_special_tokens is not False)["input_ids"]
    return Prompt(tuple(tokens), shown, question.reference)


def _that_fit(prompts: list[Prompt], model: Any, limit: int) -> list[Prompt]:
    """The prompts that leave the model room for an answer; a warning counts the others."""
    positions = getattr(get_causal_lm(model).config, "max_position_embeddings", None)
    room = positions - limit if isinstance(positions, int) else None
    fitting = [p for p in prompts if p.tokens and (room is None or len(p.tokens) <= room)]
    if len(fitting) < len(prompts) and runtime.is_main():
        runtime.get_logger().warning(
            "%d of %d sample prompts are skipped: with answers of %d tokens (sample_max_new_tokens) they do not fit "
            "into the model's %s positions",
            len(prompts) - len(fitting),
            len(prompts),
            limit,
            positions,
        )
    return fitting
