"""New tokens: rows that start at the mean, train beside an adapter as on one device, and travel with it.

The oracle is PEFT: its plain training loop on one device, its loading, its merging.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from fullshard.checkpoint.adapter_from_checkpoint import write_adapter
from fullshard.checkpoint.manifest import read_manifest
from fullshard.config.errors import ConfigError
from fullshard.data.chat_template import prepare_tokenizer
from fullshard.distributed import runtime
from fullshard.distributed.ranks import exchange
from fullshard.fsdp.state_dict import whole_value
from fullshard.lora.trainable_tokens import keep_tables_whole
from fullshard.models.causal_lm import embedding_rows
from fullshard.models.chunked_loss import ChunkedLossHead
from fullshard.sft import results
from fullshard.sft.output_dir import CHECKPOINTS
from fullshard.sft.trainer import SFTTrainer
from fullshard.sft.vocabulary import add_token_rows
from fullshard.weights.merge_adapter import merge_adapter
from tests.data.tiny import chat_rows, make_tokenizer
from tests.pool import ranks
from tests.sft.runs import global_batch, losses, settings, train
from tests.sft.test_qlora import FOUR_BITS, rounded
from tests.sft.test_ranks import STRATEGIES, one_device
from tests.sft.tiny import make_folder, make_model

LORA = {"use_peft_lora": True, "lora_r": 4, "lora_dropout": 0.0, "lora_target_modules": "all-linear"}
CHATS = {"chat_template_format": "chatml", "max_seq_len": 128}
MARKS = "<|im_start|>user\nthe old bird<|im_end|>\n<|im_start|>assistant\nsings<|im_end|>\n"
NEW = 400
"""The number of the first new token: the tokenizer's, and the model's, size."""


def folder(place: Path, **changes: Any) -> Path:
    if runtime.is_main():
        make_folder(place, **{"vocab_size": NEW, **changes})
    runtime.barrier()
    return place


def start(place: Path, engine: dict[str, Any] | None = None, model: str | None = None, **changes: Any) -> Any:
    """A trainer on conversations, from files."""
    config = settings(place, **{**LORA, **CHATS, **global_batch(runtime.world_size()), **changes})
    model = model or (str(place / "model") if config.adapter_name_or_path is None else None)
    rows = str(place / "chats" / "train.jsonl")
    trainer = SFTTrainer(model=model, args=config, train_dataset=rows, eval_dataset=rows.replace("train.", "test."))
    changed = dataclasses.replace(trainer.parts.engine, **(engine or {}))
    trainer.parts = dataclasses.replace(trainer.parts, engine=changed)
    return trainer


def logits_of(model: Any, tokenizer: Any) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokenizer(MARKS, add_special_tokens=False)["input_ids"]])).logits.float()


def rows_of(model: Any) -> dict[str, torch.Tensor]:
    """The trained rows of a sharded model, whole."""
    held = [p for unit in model._fullshard_engine.units for p in unit.parameters]
    return {p.plan.name: whole_value(p).clone() for p in held if "trainable_tokens_delta" in p.plan.name}


def check_against_one_device(place: Path, engine: dict[str, Any], tied: bool = False, **changes: Any) -> Any:
    """Train from files, and once more from the same first values with PEFT alone; the losses are the same."""
    folder(place, tie_word_embeddings=tied)
    config = {"max_steps": 8, "lr_scheduler_type": "cosine", "warmup_steps": 3, "weight_decay": 0.01, **changes}
    trainer = start(place, engine, **config)
    assert not trainer.prepare().head.why_not, "the logits never exist as a whole"
    table = load_file(place / "model" / "model.safetensors")
    for name, value in rows_of(trainer.loop.model).items():
        key = "lm_head.weight" if "lm_head" in name else "model.embed_tokens.weight"
        mean = table[key].double().mean(0).to(value.dtype)
        torch.testing.assert_close(value.cpu(), mean.expand(2, -1), rtol=1e-6, atol=1e-8)
    results.export_adapter(trainer.loop.model, place / "first")
    trainer.train()
    trainer.save_model()
    runtime.barrier()
    ours, alone = losses(trainer), None
    if runtime.is_main():
        base = AutoModelForCausalLM.from_pretrained(place / "model")
        base.resize_token_embeddings(NEW + 2)
        base = rounded(base, trainer.args) if trainer.args.use_4bit_quantization else base
        plain = PeftModel.from_pretrained(base, place / "first", is_trainable=True)
        alone = one_device(plain, trainer.parts.train, trainer.loop.loader.sampler.order, trainer.args)
    alone = exchange(alone, "oracle", watched=False)[0]
    assert alone is not None and alone[0] - alone[-1] > 0.05
    assert ours == pytest.approx(alone, abs=1e-4)
    return trainer


def check_that_peft_loads(trainer: Any, place: Path, out: Path) -> None:
    """Base and adapter give the trained logits, new tokens included, in PEFT's ways."""
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == NEW + 1 and tokenizer.eos_token == "<|im_end|>"
    trained = logits_of(trainer.model, tokenizer)
    assert trained.shape[-1] == NEW + 2
    base = AutoModelForCausalLM.from_pretrained(place / "model")
    base.resize_token_embeddings(len(tokenizer))
    if trainer.args.use_4bit_quantization:
        base = rounded(base, trainer.args)
    else:
        loaded = AutoPeftModelForCausalLM.from_pretrained(out)
        torch.testing.assert_close(logits_of(loaded, tokenizer), trained, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        logits_of(PeftModel.from_pretrained(base, out), tokenizer), trained, rtol=1e-4, atol=1e-5
    )


@ranks(2)
@pytest.mark.parametrize(
    ("tied", "strategy"), [(False, "FULL_SHARD"), pytest.param(True, "SHARD_GRAD_OP", marks=pytest.mark.slow)]
)
def test_new_tokens_train_and_travel(tied: bool, strategy: str, tmp_path: Path) -> None:
    trainer = check_against_one_device(
        tmp_path, {"sharding_strategy": strategy}, tied, save_strategy="steps", save_steps=8
    )
    out = Path(trainer.args.output_dir)
    check_that_peft_loads(trainer, tmp_path, out)
    trained = rows_of(trainer.model)
    assert len(trained) == (1 if tied else 2)
    frozen = {n: p for n, p in trainer.model.named_parameters() if "base_layer" in n and "token_adapter" in n}
    assert frozen and not any(p.requires_grad for p in frozen.values())
    saved = read_manifest(out / CHECKPOINTS / "step-8").tensors
    assert not [n for n in saved if n.startswith("model/") and "lora" not in n and "trainable_tokens" not in n], (
        "only what trains is saved"
    )
    if runtime.is_main():
        config = json.loads((out / "adapter_config.json").read_text())
        assert all(rows == [NEW, NEW + 1] for rows in config["trainable_token_indices"].values())
        files = load_file(out / "adapter_model.safetensors")
        assert {tuple(v.shape) for k, v in files.items() if "lora" not in k} == {(2, 32)}, "no whole tables"
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        base.resize_token_embeddings(NEW + 2)
        merged = PeftModel.from_pretrained(base, out).merge_and_unload().state_dict()
        merge_adapter(out, tmp_path / "merged", progress=False)
        got = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
        assert got.config.vocab_size == NEW + 2
        assert all(torch.equal(v, merged[k]) for k, v in got.state_dict().items())


@pytest.mark.slow
@ranks(2)
def test_new_tokens_beside_4_bits(tmp_path: Path) -> None:
    trainer = check_against_one_device(tmp_path, {}, **FOUR_BITS)
    check_that_peft_loads(trainer, tmp_path, Path(trainer.args.output_dir))


MATRIX = [
    *[(s, {}, {}) for s in STRATEGIES],
    ("FULL_SHARD", {"offload_params": True}, {}),
    ("FULL_SHARD", {}, {"gradient_checkpointing": True, "use_reentrant": True}),
    ("HYBRID_SHARD", {}, {"gradient_checkpointing": True, "use_reentrant": False}),
    ("FULL_SHARD", {"offload_params": True}, {**FOUR_BITS, "gradient_checkpointing": True, "use_reentrant": True}),
    ("SHARD_GRAD_OP", {}, {"packing": True, "chunked_loss": False}),
]


@pytest.mark.slow
@ranks(1, 2, 4)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("strategy", "engine", "changes"), MATRIX)
def test_new_tokens_everywhere(
    strategy: str, engine: dict[str, Any], changes: dict[str, Any], tied: bool, world_size: int, tmp_path: Path
) -> None:
    engine = {"sharding_strategy": strategy, **engine}
    if strategy.startswith("HYBRID"):
        copies = 2 if world_size == 4 else world_size
        engine |= {"dp_replicate_size": copies, "dp_shard_size": world_size // copies}
    trainer = check_against_one_device(tmp_path, engine, tied, **changes)
    check_that_peft_loads(trainer, tmp_path, Path(trainer.args.output_dir))


@pytest.mark.slow
@ranks(2)
@pytest.mark.parametrize("storage", ["uint8", "bfloat16"])
def test_new_tokens_in_bf16(storage: str, tmp_path: Path) -> None:
    """The adapter that PEFT loads gives the logits of the sharded model, to bf16's precision."""
    folder(tmp_path)
    trainer = start(
        tmp_path, max_steps=6, bf16=True, torch_dtype="bfloat16",
        **({**FOUR_BITS, "bnb_4bit_quant_storage_dtype": storage} if storage == "bfloat16" else {}),
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    tokenizer = trainer.tokenizer
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    base.resize_token_embeddings(len(tokenizer))
    base = rounded(base, trainer.args) if storage == "bfloat16" else base
    loaded = PeftModel.from_pretrained(base, trainer.args.output_dir)
    torch.testing.assert_close(logits_of(trainer.model, tokenizer), logits_of(loaded, tokenizer), rtol=0.02, atol=0.02)


@pytest.mark.slow
@ranks(2)
def test_a_resumed_run_ends_bit_for_bit_alike(tmp_path: Path) -> None:
    folder(tmp_path)
    steps = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6, "lora_dropout": 0.1}
    whole = start(tmp_path, **steps)
    whole.train()
    expected = rows_of(whole.model)
    out = Path(whole.args.output_dir)
    if runtime.is_main():
        shutil.rmtree(out / CHECKPOINTS / "step-6")
    runtime.barrier()
    again = start(tmp_path, resume=True, **steps)
    again.train()
    assert losses(again)[-3:] == losses(whole)[-3:]
    assert all(torch.equal(value, expected[name]) for name, value in rows_of(again.model).items())


@ranks(1)
def test_full_fine_tuning_with_new_tokens(tmp_path: Path) -> None:
    folder(tmp_path)
    trainer = start(tmp_path, use_peft_lora=False, max_steps=4)
    trainer.train()
    trainer.save_model()
    loaded = AutoModelForCausalLM.from_pretrained(trainer.args.output_dir)
    assert loaded.config.vocab_size == NEW + 2 and NEW + 1 in loaded.generation_config.eos_token_id
    torch.testing.assert_close(logits_of(loaded, trainer.tokenizer), logits_of(trainer.model, trainer.tokenizer))


@ranks(1)
def test_spare_rows_are_used_and_train(tmp_path: Path) -> None:
    folder(tmp_path, vocab_size=NEW + 16)
    before = load_file(tmp_path / "model" / "model.safetensors")["lm_head.weight"][NEW : NEW + 2]
    trainer = start(tmp_path, max_steps=4)
    assert trainer.prepare().model.get_base_model().config.vocab_size == NEW + 16
    first = rows_of(trainer.loop.model)
    assert torch.equal(next(v for k, v in first.items() if "lm_head" in k), before), "as the files have them"
    trainer.train()
    trainer.save_model()
    assert all(not torch.equal(v, first[k]) for k, v in rows_of(trainer.model).items())
    loaded = AutoPeftModelForCausalLM.from_pretrained(trainer.args.output_dir)
    torch.testing.assert_close(
        logits_of(loaded, trainer.tokenizer), logits_of(trainer.model, trainer.tokenizer), rtol=1e-4, atol=1e-5
    )


@ranks(1)
def test_a_tokenizer_that_has_the_marks_changes_nothing(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    prepare_tokenizer(tokenizer, "chatml")
    trainer = train(
        make_model(vocab_size=NEW + 2),
        settings(tmp_path, max_steps=1, **LORA, **CHATS),
        chat_rows(8),
        tokenizer=tokenizer,
    )
    assert not rows_of(trainer.model) and trainer.model.peft_config["default"].trainable_token_indices is None


def test_what_a_tokenizer_s_class_brings_along_is_no_new_token(tmp_path: Path) -> None:
    """Qwen2's adds <|endoftext|> to any vocabulary; a template's marks are new beside it, and it is not."""
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=400,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )
    make_tokenizer().save_pretrained(tmp_path)
    model.config.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == 401 and tokenizer.unk_token == "<|endoftext|>", "it does so"
    said: list[str] = []
    assert add_token_rows(model, tokenizer, [], said.append) == [] and embedding_rows(model) == 400 and not said
    added = prepare_tokenizer(tokenizer, "chatml").added
    new = add_token_rows(model, tokenizer, added, said.append)
    assert tokenizer.convert_ids_to_tokens(new) == ["<|im_start|>", "<|im_end|>"]
    assert len(said) == 1 and said[0].startswith("2 new tokens (<|im_start|> <|im_end|>)")
    tokenizer.add_tokens(["<|mine|>"])
    assert len(add_token_rows(model, tokenizer, [], said.append)) == 1, "a token of the user's own is new"


@ranks(1)
def test_models_of_the_user_s_own(tmp_path: Path) -> None:
    model = make_model(vocab_size=NEW)
    mean = model.lm_head.weight.detach().double().mean(0).float()
    config = settings(tmp_path, max_steps=1, **LORA, **CHATS)
    trainer = SFTTrainer(model=model, args=config, train_dataset=chat_rows(8), tokenizer=make_tokenizer())
    head = trainer.parts.model.get_base_model().lm_head  # before it is sharded
    torch.testing.assert_close(head.token_adapter.trainable_tokens_delta["default"].detach(), mean.expand(2, -1))
    trainer.train()
    lora = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    wrapped = get_peft_model(make_model(vocab_size=NEW), lora)
    plain = settings(tmp_path, max_steps=1, **CHATS)
    with pytest.raises(
        ConfigError, match=r"needs 402 token rows, the PeftModelForCausalLM has 400, .*resize_token_emb"
    ):
        SFTTrainer(model=wrapped, args=plain, train_dataset=chat_rows(8), tokenizer=make_tokenizer())
    targets = LoraConfig(r=4, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    with pytest.raises(ConfigError, match="lora_target_modules names lm_head, which needs rows for new tokens"):
        train(make_model(vocab_size=NEW), config, chat_rows(8), peft_config=targets)
    whole = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    trainer = SFTTrainer(
        model=make_model(vocab_size=NEW), args=config, train_dataset=chat_rows(8), tokenizer=make_tokenizer(),
        peft_config=whole,
    )  # fmt: skip
    assert trainer.model.peft_config["default"].trainable_token_indices == {"model.embed_tokens": [NEW, NEW + 1]}
    assert whole.trainable_token_indices is None, "the user's own is left as it is"


@ranks(2)
@pytest.mark.parametrize(
    ("tied", "chats"),
    [(False, False), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(True, False), (False, True)])],
)
def test_a_model_that_was_resized_before_it_was_handed_over(tied: bool, chats: bool, tmp_path: Path) -> None:
    """What PEFT would save, `save_embedding_layers="auto"`: the rows that the base does not have."""
    folder(tmp_path, tie_word_embeddings=tied)
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([f"<new {i}>" for i in range(5)])
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    rows = chat_rows(16) if chats else [{"text": f"the <new {i % 5}> sings to <new {i % 3}>"} for i in range(16)]
    changes = {**LORA, **(CHATS if chats else {}), "max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    config = settings(tmp_path, **changes)
    trainer = SFTTrainer(model=model, args=config, train_dataset=rows, tokenizer=tokenizer)
    trainer.train()
    trainer.save_model()
    runtime.barrier()
    out = Path(trainer.args.output_dir)
    ids = torch.arange(NEW - 3, NEW + (7 if chats else 5)).view(1, -1)
    trainer.model.eval()
    with torch.no_grad():
        expected = trainer.model(input_ids=ids).logits
        loaded = AutoPeftModelForCausalLM.from_pretrained(out)
        torch.testing.assert_close(loaded(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-5)
        if runtime.is_main():
            write_adapter(out / CHECKPOINTS / "step-2", tmp_path)
            found, saved = (load_file(place / "adapter_model.safetensors") for place in (tmp_path, out))
            assert found.keys() >= saved.keys() and all(torch.equal(found[name], v) for name, v in saved.items())
            merge_adapter(out, tmp_path / "merged", progress=False)
            merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
            torch.testing.assert_close(merged(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_the_loss_and_gradients_of_peft_s_own_layers(tied: bool) -> None:
    """fp64: trained rows put over the frozen layer's answer, chunk by chunk, against whole tables and whole logits."""
    tokens = [5, 17, 3]
    where = tokens if tied else {"embed_tokens": tokens, "lm_head": tokens}
    lora = LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=where, task_type="CAUSAL_LM")
    ids = torch.randint(0, 40, (3, 20), generator=torch.Generator().manual_seed(1))
    labels = ids.masked_fill(ids % 7 == 0, -100)
    found = []
    for lean in (False, True):
        torch.manual_seed(0)
        model: Any = get_peft_model(make_model(vocab_size=40, tie_word_embeddings=tied), lora).double()
        for p in model.parameters():
            if p.requires_grad:
                p.data.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()), dtype=p.dtype))
        if lean:
            keep_tables_whole(model)
            head = ChunkedLossHead(model, 7)
            assert not head.why_not
            with head.loss_pass():
                loss = model(input_ids=ids, labels=labels).loss
        else:
            logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
        loss.backward()
        found.append((loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
        if lean:
            with torch.no_grad():
                shown = model(input_ids=ids).logits
                with model.disable_adapter():
                    base = model(input_ids=ids).logits
            torch.manual_seed(0)
            torch.testing.assert_close(base, make_model(vocab_size=40, tie_word_embeddings=tied).double()(ids).logits)
            torch.testing.assert_close(shown[:, :-1].flatten(0, 1), logits)
    (plain, gradients), (ours, others) = found
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    assert any("trainable_tokens" in n for n in gradients) and gradients.keys() == others.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-10, atol=1e-12, msg=name)
