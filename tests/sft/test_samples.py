"""Sample generations: greedy answers of `generate`, in step on all ranks, and training that does not notice them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from fullshard.config.errors import ConfigError
from fullshard.data.chat_template import BUILT_IN
from fullshard.distributed import runtime
from fullshard.models.generate import end_of_turn, generation_prompt
from fullshard.sft.run_data import read_prompts
from fullshard.sft.samples import answer_begins, select_prompts
from fullshard.sft.sft_config import SFTConfig
from fullshard.sft.trainer import SFTTrainer
from tests.data.tiny import chat_rows, make_tokenizer, text_rows
from tests.pool import ranks
from tests.sft.runs import losses, settings
from tests.sft.tiny import make_folder

CHAT = {"chat_template_format": "chatml", "assistant_only_loss": True, "max_seq_len": 200, "max_steps": 3}
LORA = {"use_peft_lora": True, "lora_r": 4, "lora_dropout": 0.1, "lora_target_modules": "all-linear"}


def run(place: Path, name: str, rows: Any, evaluation: Any, **changes: Any) -> SFTTrainer:
    config = settings(
        place / name, per_device_train_batch_size=2, learning_rate=1e-2, eval_strategy="steps", eval_steps=3, **changes
    )
    trainer = SFTTrainer(model=str(place / "model"), args=config, train_dataset=rows, eval_dataset=evaluation)
    trainer.train()
    trainer.save_model()
    return trainer


def greedy(model: Any, tokenizer: Any, ids: list[int], limit: int, stops: list[int]) -> str:
    """What transformers' own loop says."""
    out = model.generate(
        input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=limit, do_sample=False,
        eos_token_id=stops, pad_token_id=2,
    )  # fmt: skip
    return tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)


@ranks(2)
def test_answers_are_those_of_generate_on_one_device(tmp_path: Path) -> None:
    """Three prompts on two ranks, an adapter with dropout; the losses are those of a run without samples."""
    if runtime.is_main():
        make_folder(tmp_path)
    runtime.barrier()
    rows, held_out = chat_rows(8), chat_rows(4, seed=3)
    plain = run(tmp_path, "plain", rows, held_out, **CHAT, **LORA)
    asked = {"eval_samples": 3, "sample_max_new_tokens": 12, "eval_on_start": True}
    trainer = run(tmp_path, "asked", rows, held_out, **CHAT, **LORA, **asked)
    assert losses(trainer) == losses(plain), "bit for bit"
    out = tmp_path / "asked" / "out"
    written = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert [r["step"] for r in written] == [0, 0, 0, 3, 3, 3]
    tokenizer = AutoTokenizer.from_pretrained(out)
    stops = [1, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    before = [r["answer"] for r in written[:3]]
    after = [r["answer"] for r in written[3:]]
    prompts = []
    for row, record in zip(held_out, written[3:], strict=False):
        turns = row["messages"]
        last = max(i for i, turn in enumerate(turns) if turn["role"] == "assistant")
        text = tokenizer.apply_chat_template(turns[:last], tokenize=False, add_generation_prompt=True)
        assert record["prompt"] == text and record["reference"] == turns[last]["content"].strip()
        prompts.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert before == [greedy(base, tokenizer, ids, 12, stops) for ids in prompts]
    trained = PeftModel.from_pretrained(base, out)
    assert after == [greedy(trained, tokenizer, ids, 12, stops) for ids in prompts] != before
    page = (out / "report.html").read_text()
    found = page.count("<h3>Prompt</h3>"), page.count("<h4>before, step 0</h4>"), page.count("<h4>after, step 3</h4>")
    assert found == (3, 3, 3)
    runtime.barrier()


@pytest.mark.slow
@ranks(2)
def test_prompts_of_the_user_s_own_and_ranks_that_end_at_different_lengths(tmp_path: Path) -> None:
    """Running text, full fine-tuning: an odd number of prompts, some of whose answers end at once."""
    if runtime.is_main():
        make_folder(tmp_path)
        (tmp_path / "prompts.txt").write_text("the red bird\n\nold stone near\nwater and salt\n")
    runtime.barrier()
    ends = [{"text": "the red bird</s>"}] * 24
    run(
        tmp_path, "one", ends, text_rows(4), max_steps=12, sample_prompts=str(tmp_path / "prompts.txt"),
        sample_max_new_tokens=9,
    )  # fmt: skip
    out = tmp_path / "one" / "out"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), make_tokenizer()
    asked = ["the red bird", "old stone near", "water and salt"]
    expected = [greedy(model, tokenizer, tokenizer(p, add_special_tokens=False)["input_ids"], 9, [1]) for p in asked]
    if runtime.is_main():
        records = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
        assert [r["prompt"] for r in records[-3:]] == asked and [r["answer"] for r in records[-3:]] == expected
        assert records[-3]["reference"] is None
    lengths = {len(tokenizer(answer, add_special_tokens=False)["input_ids"]) for answer in expected}
    assert 0 in lengths and max(lengths) > 1, "answers of the same length show nothing"
    runtime.barrier()


def test_where_an_answer_begins() -> None:
    before = [7, 8]
    learnt = np.array([0, 0, 1, 1, 0, 0, 1, 1], dtype=bool)
    assert answer_begins(range(8), learnt, before) == 6, "the last run of learnt tokens"
    learnt = np.array([0, 0, 1, 1, 0], dtype=bool)
    assert answer_begins(range(5), learnt, before) == 2, "what follows it is no answer"
    everything = np.ones(8, dtype=bool)
    assert answer_begins([7, 8, 1, 2, 7, 8, 3, 4], everything, before) == 6, "after the last lead-in"
    assert answer_begins([1, 2, 3, 4, 5, 6, 7, 8], everything, before) == 4, "half of running text"
    assert answer_begins([1], np.ones(1, dtype=bool), before) == 0
    tokenizer = make_tokenizer()
    assert generation_prompt(tokenizer) == "" == end_of_turn(tokenizer)
    tokenizer.chat_template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }} <end>\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"  # noqa: E501
    assert (generation_prompt(tokenizer), end_of_turn(tokenizer)) == ("[assistant] ", "<end>")


def test_prompts_with_tools_are_rendered_by_the_chat_template(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "find", "description": "Finds.", "parameters": {"type": "object"}}}
    call = {"type": "function", "function": {"name": "find", "arguments": {"word": "bird"}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "one bird?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "a stone"},
    ]
    as_text = [{**messages[1], "tool_calls": [{"name": "find", "arguments": json.dumps({"word": "bird"})}]}]
    row = {"messages": [messages[0], *as_text, messages[2]], "tools": [tool], "chat_template_kwargs": {"mood": "salt"}}
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps(row) + "\n")
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ mood }}" + BUILT_IN["qwen"].text
    config = settings(tmp_path, sample_prompts=str(path), eval_strategy="epoch")
    (prompt,) = select_prompts(config, None, tokenizer)
    expected = tokenizer.apply_chat_template(
        messages, tools=[tool], tokenize=False, add_generation_prompt=True, mood="salt"
    )
    assert tokenizer.decode(prompt.tokens) == expected and prompt.shown == "a stone"


def test_a_file_of_prompts_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    path.write_text(json.dumps({"messages": turns}) + "\n" + json.dumps({"prompt": "and", "reference": "so"}) + "\n")
    first, second = read_prompts(str(path))
    assert first.messages == (turns[0],) and (first.reference, second.reference) == ("hello", "so")
    wrong = {
        '{"messages": [': r"prompts.jsonl:1 is not JSON",
        '{"messages": [{"role": "user"}]}': r"prompts.jsonl:1: expected .*messages",
        '{"prompt": "a", "reference": 3}': r"reference is 3; expected text",
        json.dumps({"messages": turns[1:]}): r"an answer without a prompt",
        "\n": r"holds no prompt",
    }
    for text, message in wrong.items():
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_prompts(str(path))
    with pytest.raises(ConfigError, match=r"nowhere.txt cannot be read: No such file"):
        read_prompts(str(tmp_path / "nowhere.txt"))
    with pytest.raises(
        ConfigError, match="eval_samples: samples are generated at evaluations, but eval_strategy is no"
    ):
        SFTConfig(eval_samples=2)
