"""What becomes of a run with an adapter: checkpoints, resuming, export, merging, chat; and what trains how.

Values and losses of a resumed run are those of one that was left alone, bit for bit.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig
from peft.optimizers import create_loraplus_optimizer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.integrations.neftune import neftune_post_forward_hook

from fullshard.checkpoint.adapter_from_checkpoint import write_adapter
from fullshard.checkpoint.manifest import read_manifest
from fullshard.config.errors import CheckpointError, ConfigError, WeightsError
from fullshard.distributed import runtime
from fullshard.lora.adapter_config import FIRST
from fullshard.models.generate import StopCriteria, answer
from fullshard.sft.optimizer import make_optimizer
from fullshard.sft.output_dir import CHECKPOINTS
from fullshard.sft.trainer import SFTTrainer
from fullshard.weights.load import load_pretrained
from fullshard.weights.merge_adapter import merge_adapter
from tests.pool import ranks
from tests.sft.runs import losses, settings
from tests.sft.test_adapter_kinds import KINDS, base_of, logits_of, start, values_of
from tests.sft.tiny import make_folder, make_model

SAVES = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "neftune_noise_alpha": 5.0, "lora_dropout": 0.2}
LIVES = ["pissa", "olora", "dora, 4 bits", "vera", "prompt", "prefix, projected", "p_tuning"]


def life(kind: str, place: Path) -> None:
    changes = {**KINDS[kind][0], **SAVES}
    if "init_lora_weights" in changes:
        changes["loraplus_lr_ratio"] = 4.0
    whole = start(place, "whole", **changes)
    whole.train()
    whole.save_model()
    out, model = Path(whole.args.output_dir), whole.loop.model
    got = logits_of(model)
    runtime.barrier()
    if runtime.is_main():
        shutil.copytree(out, place / "part" / "out")
        shutil.rmtree(place / "part" / "out" / CHECKPOINTS / "step-4")
    runtime.barrier()
    again = start(place, "part", **changes, resume=True)
    again.train()
    assert losses(again) == losses(whole)[-len(losses(again)) :] and len(losses(again)) >= 2
    ours = values_of(again.prepare().model)
    for name, value in values_of(model).items():
        assert torch.equal(value, ours[name]), name
    checkpoint = out / CHECKPOINTS / "step-4"
    stored = read_manifest(checkpoint).tensors
    assert not [n for n in stored if "q_proj.base_layer.weight" in n or n.endswith(("q_proj.weight", "packed"))]
    chat = load_pretrained(place / "model", adapter=out, quantization_config=_quantized(whole.args), progress=False)
    torch.testing.assert_close(logits_of(chat), got, rtol=1e-4, atol=1e-5)
    if runtime.is_main():
        after(kind, place, out, got)


def _quantized(config: Any) -> Any:
    from fullshard.sft.adapter import quantization

    return quantization(config)


def after(kind: str, place: Path, out: Path, got: torch.Tensor) -> None:
    """Without ranks: the adapter from a checkpoint, and merged."""
    made = place / "made"
    made.mkdir()
    write_adapter(out / CHECKPOINTS / "step-4", made)
    theirs = load_file(out / "adapter_model.safetensors")
    for name, value in load_file(made / "adapter_model.safetensors").items():
        assert torch.equal(value, theirs[name]), name
    if kind in ("prompt", "prefix, projected", "p_tuning"):
        with pytest.raises(WeightsError, match="change the model's input, not its weights, and cannot be merged"):
            merge_adapter(out, place / "merged", progress=False)
    elif kind != "dora, 4 bits":
        merge_adapter(out, place / "merged", progress=False)
        merged = AutoModelForCausalLM.from_pretrained(place / "merged")
        torch.testing.assert_close(logits_of(merged), got, rtol=1e-4, atol=1e-5)
    if kind in ("pissa", "olora"):
        loaded = AutoPeftModelForCausalLM.from_pretrained(out)
        assert loaded.peft_config["default"].r == 8 and loaded.peft_config["default"].init_lora_weights is True
        shutil.rmtree(out / FIRST)
        with pytest.raises(CheckpointError, match="its initial values are missing"):
            write_adapter(out / CHECKPOINTS / "step-4", made)


@pytest.mark.slow
@ranks(2)
@pytest.mark.parametrize("kind", [LIVES[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in LIVES[1:])])
def test_a_run_resumes_exports_and_talks(kind: str, tmp_path: Path) -> None:
    life(kind, tmp_path)


@pytest.mark.slow
@ranks(1)
def test_without_its_first_values_a_run_computes_them_again(tmp_path: Path) -> None:
    changes = {**KINDS["pissa_niter"][0], **SAVES}
    whole = start(tmp_path, "run", **changes)
    whole.train()
    out = Path(whole.args.output_dir)
    shutil.rmtree(out / CHECKPOINTS / "step-4")
    shutil.rmtree(out / FIRST)
    again = start(tmp_path, "run", **changes, resume=True)
    again.train()
    assert losses(again)[-2:] == losses(whole)[-2:] and (out / FIRST / "adapter_model.safetensors").is_file()


@pytest.mark.slow
@ranks(1)
@pytest.mark.parametrize("kind", ["prompt", "prefix", "p_tuning"])
def test_answers_with_a_prompt_are_peft_s(kind: str, tmp_path: Path) -> None:
    trainer = start(tmp_path, **KINDS[kind][0])
    trainer.train()
    trainer.save_model()
    prompt, end = [4, 9, 23, 50], StopCriteria(frozenset())
    said = answer(trainer.model, prompt, end, 12)
    loaded = PeftModel.from_pretrained(base_of(tmp_path, trainer.args), trainer.args.output_dir).eval()
    ids = torch.tensor([prompt])
    theirs = loaded.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=None
    )
    assert said == theirs[0, -12:].tolist()
    chat = load_pretrained(tmp_path / "model", adapter=trainer.args.output_dir, progress=False,
                           quantization_config=_quantized(trainer.args))  # fmt: skip
    assert answer(chat, prompt, end, 12) == said


@pytest.mark.slow
@ranks(2)
@pytest.mark.parametrize(
    ("kind", "changes"),
    [("prompt", {"gradient_checkpointing": True}), ("prompt", {"chunked_loss": False}),
     ("p_tuning", {"gradient_checkpointing": True, "use_reentrant": True}),
     ("prefix", {"chunked_loss": False}), ("prompt", {"loss_chunk_tokens": 3}),
     ("dora, 4 bits", {"gradient_checkpointing": True}), ("vera", {"gradient_checkpointing": True})],
)  # fmt: skip
def test_how_it_is_computed_does_not_matter(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    usual, other = (start(tmp_path, name, **KINDS[kind][0], **more) for name, more in (("a", {}), ("b", changes)))
    usual.train()
    other.train()
    assert losses(other) == pytest.approx(losses(usual), abs=1e-5)


@pytest.mark.slow
@ranks(2)
@pytest.mark.parametrize("kind", ["dora, 4 bits", "pissa", "vera", "prompt", "prefix", "p_tuning"])
def test_in_bf16(kind: str, tmp_path: Path) -> None:
    changes = {**KINDS[kind][0], "bf16": True, "bnb_4bit_compute_dtype": "bfloat16"}
    wide, narrow = start(tmp_path, "wide", **KINDS[kind][0]), start(tmp_path, "narrow", **changes)
    wide.train()
    narrow.train()
    assert losses(narrow) == pytest.approx(losses(wide), abs=0.05)


# --- what trains, and how ---------------------------------------------------------------------------------------------


@ranks(1)
def test_noise_is_transformers(tmp_path: Path) -> None:
    trainer = start(tmp_path, use_peft_lora=False, neftune_noise_alpha=7.0)
    embedding, plain = trainer.prepare().model.get_input_embeddings(), make_model().get_input_embeddings()
    plain.neftune_noise_alpha = 7.0
    plain.register_forward_hook(neftune_post_forward_hook)
    ids = torch.arange(24).view(2, 12)
    for training in (True, False):
        found = []
        for layer in (embedding.train(training), plain.train(training)):
            torch.manual_seed(3)
            with trainer.loop.model.summon_full_params(), torch.no_grad():
                found.append(layer(ids))
        assert torch.equal(*found), training
    assert not torch.equal(found[0], plain.train()(ids))


@ranks(1)
def test_groups_of_loraplus_are_peft_s(tmp_path: Path) -> None:
    changes = {"loraplus_lr_ratio": 16.0, "weight_decay": 0.1, "learning_rate": 1e-3, "use_dora": True}
    trainer = start(tmp_path, **changes)
    plain = peft.get_peft_model(make_model(), LoraConfig(r=4, target_modules="all-linear", use_dora=True))
    theirs = create_loraplus_optimizer(
        plain, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16.0, loraplus_weight_decay=0.1
    )
    names = [{id(p): n for n, p in m.named_parameters()} for m in (trainer.prepare().model, plain)]
    ours, expected = (
        [
            (g.get("initial_lr", g["lr"]), g["weight_decay"], [known[id(p)] for p in g["params"]])
            for g in o.param_groups
            if g["params"]
        ]
        for o, known in zip((trainer.loop.optimizer, theirs), names, strict=True)
    )
    assert ours == expected and len(ours) > 1
    trainer.args.use_peft_lora, trainer.args.loraplus_lr_ratio = False, 2.0
    with pytest.raises(ConfigError, match="no LoRA matrix is trainable"):
        make_optimizer(make_model(), trainer.args)


@ranks(1)
def test_frozen_by_pattern(tmp_path: Path) -> None:
    trainer = start(tmp_path, use_peft_lora=False, freeze="embed_tokens,layers.0, *.self_attn.[kv]_proj.*", max_steps=2)
    before = values_of(trainer.prepare().model)
    trainer.train()
    same = {name for name, value in values_of(trainer.loop.model).items() if torch.equal(value, before[name])}
    assert same == {n for n in before if "embed" in n or ".layers.0." in n or "k_proj" in n or "v_proj" in n}
    adapter = start(tmp_path, "adapter", freeze="layers.1")
    trains = [name for name, p in adapter.model.named_parameters() if p.requires_grad]
    assert trains and not [name for name in trains if ".layers.1." in name]
    for pattern, message in {
        "embed_token": "'embed_token' matches no parameter; did you mean embed_tokens",
        "lm_head": "'lm_head' matches only frozen parameters",
    }.items():
        with pytest.raises(ConfigError, match=message):
            start(tmp_path, "wrong", use_peft_lora=pattern == "lm_head", freeze=pattern)
    with pytest.raises(ConfigError, match="the model has no trainable parameters"):
        start(tmp_path, "nothing", use_peft_lora=False, freeze="*")
    with pytest.raises(ConfigError, match="has no token '<nobody>'"):
        start(tmp_path, "token", trainable_token_indices="<nobody>")


@ranks(1)
def test_what_an_adapter_of_the_user_s_cannot_do(tmp_path: Path) -> None:
    make_folder(tmp_path, tie_word_embeddings=True)
    rows = str(tmp_path / "data" / "train.jsonl")

    def begin(config: Any, **changes: Any) -> None:
        args = settings(tmp_path, max_steps=1, **changes)
        SFTTrainer(model=str(tmp_path / "model"), args=args, train_dataset=rows, peft_config=config).prepare()

    prompt = {"num_virtual_tokens": 2, "task_type": "CAUSAL_LM"}
    with pytest.raises(ConfigError, match="packing is on, and the adapter is prompt_tuning"):
        begin(PromptTuningConfig(**prompt), packing=True)
    with pytest.raises(ConfigError, match="gradient_checkpointing is on, and the adapter is prefix_tuning"):
        begin(PrefixTuningConfig(**prompt), fsdp_config={"activation_checkpointing": True})
    with pytest.raises(
        ConfigError, match="tokens and 250 virtual ones before them, LlamaForCausalLM has 256 positions"
    ):
        begin(PromptTuningConfig(num_virtual_tokens=250, task_type="CAUSAL_LM"))
    lora: dict[str, Any] = {"r": 2, "target_modules": ["lm_head"], "task_type": "CAUSAL_LM"}
    with pytest.raises(WeightsError, match=r"changes the weight of .*lm_head, which is tied to another"):
        begin(LoraConfig(init_lora_weights="pissa", **lora))
    with pytest.raises(WeightsError, match="init_lora_weights='eva' is not supported for this layer"):
        begin(LoraConfig(init_lora_weights="eva", **{**lora, "target_modules": ["q_proj"]}))
