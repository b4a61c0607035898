"""Sample generations: a few prompts that the model answers at each evaluation, so that one sees what it has learnt.

Prompts come from the evaluation data (what stands before the last part that is learnt) or from the user's file. The
ranks share them out and answer in step; answers are greedy, draw no random numbers and leave training as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fullshard import runtime
from fullshard.data.token_table import TokenTable
from fullshard.errors import ConfigError
from fullshard.models.generate import StopCriteria, answer, chat_tokens, generation_prompt, stop_criteria
from fullshard.models.inner_model import causal
from fullshard.ranks import agree_locally, exchange
from fullshard.reporting.records import Sample
from fullshard.train.config import SFTConfig
from fullshard.train.prompts import Question, read_prompts

if TYPE_CHECKING:
    from fullshard.train.trainer import SFTTrainer


@dataclass(frozen=True)
class Prompt:
    """What the model is given, and how it is shown."""

    tokens: tuple[int, ...]
    shown: str
    reference: str | None


class Samples:
    """Answers the prompts whenever the trainer has evaluated. All ranks take part."""

    def __init__(self, trainer: SFTTrainer) -> None:
        self.trainer = trainer
        config, parts = trainer.args, trainer.parts
        found = agree_locally(lambda: prompts_of(config, parts.evaluation, parts.tokenizer), "sample prompts")
        self.prompts = _that_fit(found, parts.model, config.sample_max_new_tokens)
        self.ends = stop_criteria(parts.model, parts.tokenizer)

    def on_evaluate(self, args: SFTConfig, state: Any, control: Any, **facts: Any) -> None:
        loop = self.trainer.loop
        answers = _answers(loop.model, self.prompts, self.ends, args.sample_max_new_tokens)
        step, pairs = loop.progress.step, zip(self.prompts, answers, strict=True)
        loop.reporter.samples(step, [Sample(step, p.shown, said, p.reference) for p, said in pairs])


def _answers(model: Any, prompts: Sequence[Prompt], ends: StopCriteria, limit: int) -> list[str]:
    """The answers, in order, on every rank. Each rank answers every so-manieth; all of them generate equally often."""
    world, mine = runtime.world_size(), []
    for first in range(0, len(prompts), world):
        at = first + runtime.rank()
        tokens = answer(model, prompts[at if at < len(prompts) else first].tokens, ends, limit)
        mine.append(ends.text(tokens))
    by_rank = exchange(mine, "sample generations")
    return [by_rank[i % world][i // world] for i in range(len(prompts))]


def prompts_of(config: SFTConfig, table: TokenTable | None, tokenizer: Any) -> list[Prompt]:
    """The prompts that the settings ask for."""
    if config.sample_prompts is not None:
        return [_asked(question, tokenizer, config) for question in read_prompts(config.sample_prompts)]
    if table is None:
        return []
    found: list[Prompt] = []
    opening = generation_prompt(tokenizer)
    before = tokenizer(opening, add_special_tokens=False)["input_ids"] if opening else []
    for start, end in zip(table.document_starts[:-1], table.document_starts[1:], strict=True):
        if len(found) == config.eval_samples:
            break
        ids, learnt = table.tokens[start:end].tolist(), np.asarray(table.loss_mask[start:end]) != 0
        if (split := answer_begins(ids, learnt, before)) > 0:
            reference = tokenizer.decode(ids[split:], skip_special_tokens=True, clean_up_tokenization_spaces=False)
            shown = tokenizer.decode(ids[:split], clean_up_tokenization_spaces=False)
            found.append(Prompt(tuple(ids[:split]), shown, reference.strip()))
    return found


def answer_begins(ids: Sequence[int], learnt: Any, before: Sequence[int]) -> int:
    """Where a document's last answer begins; 0 if it is too short to have a prompt.

    That is the last run of learnt tokens. Where all of it is learnt, it is what follows the last `before` (what opens
    an assistant's turn); in running text the second half.
    """
    if learnt.any() and not learnt.all():
        last = int(np.flatnonzero(learnt)[-1])
        gaps = np.flatnonzero(~learnt[:last])
        if len(gaps):
            return int(gaps[-1]) + 1
    size = len(before)
    for at in range(len(ids) - size - 1, -1, -1) if size else ():
        if list(ids[at : at + size]) == list(before):
            return at + size
    return len(ids) // 2


def _asked(question: Question, tokenizer: Any, config: SFTConfig) -> Prompt:
    """A prompt of the user's own: by the chat template, or where there is none as text to be continued."""
    messages = list(question.messages)
    shown = messages[-1]["content"]
    if getattr(tokenizer, "chat_template", None):
        return Prompt(tuple(chat_tokens(tokenizer, messages)), shown, question.reference)
    if len(messages) > 1:
        raise ConfigError(
            "sample_prompts: there are conversations, but the tokenizer has no chat template; choose one with "
            "chat_template_format."
        )
    tokens = tokenizer(shown, add_special_tokens=config.add_special_tokens)["input_ids"]
    return Prompt(tuple(tokens), shown, question.reference)


def _that_fit(prompts: list[Prompt], model: Any, limit: int) -> list[Prompt]:
    """Prompts that leave the model room for an answer; the others are named."""
    positions = getattr(causal(model).config, "max_position_embeddings", None)
    room = positions - limit if isinstance(positions, int) else None
    fitting = [p for p in prompts if p.tokens and (room is None or len(p.tokens) <= room)]
    if len(fitting) < len(prompts) and runtime.is_main():
        runtime.get_logger().warning(
            "%d of %d sample prompts are left out: with answers of %d tokens (sample_max_new_tokens) they do not fit "
            "into the model's %s positions",
            len(prompts) - len(fitting),
            len(prompts),
            limit,
            positions,
        )
    return fitting
