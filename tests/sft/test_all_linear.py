"""`lora_target_modules all-linear` on mixtures of experts: linear layers and experts, never a router.

The oracle is PEFT: the files of a run load in it on transformers' model, and that model has the losses of the run in a
plain loop on one device. What must train is read from transformers' classes.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from fullshard.config.errors import ConfigError
from fullshard.distributed import runtime
from fullshard.lora.model_size import count_parameters
from fullshard.lora.targets import mixture_targets
from fullshard.sft import assemble
from fullshard.sft.trainer import SFTTrainer
from tests.data.tiny import make_tokenizer, text_rows
from tests.pool import ranks
from tests.report.small_results import command
from tests.sft.runs import global_batch, losses, plain_losses, settings
from tests.sft.test_adapter_kinds import logits_of, values_of
from tests.sft.test_qlora import FOUR_BITS

SHAPE: dict[str, Any] = {
    "vocab_size": 416, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1,
          "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4}  # fmt: skip
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": LOCAL,
    "Qwen2Moe": {**SPARSE, "shared_expert_intermediate_size": 32},
    "Qwen3Moe": {**SPARSE, "head_dim": 8, "mlp_only_layers": [0]},
    "Qwen3Next": {**SPARSE, "head_dim": 8, "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2,
                  "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
                  "layer_types": ["linear_attention", "full_attention"]},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV2": {**ROUTED, **LATENT, "topk_method": "greedy"},
    "DeepseekV3": {**ROUTED, **LATENT},
    "Glm4Moe": {**ROUTED, "head_dim": 8},
    "Dots1": {**ROUTED, "head_dim": 8},
    "GptOss": {**LOCAL, "head_dim": 8},
    "GraniteMoe": LOCAL,
    "GraniteMoeShared": {**LOCAL, "shared_intermediate_size": 32},
    "Phimoe": LOCAL,
    "JetMoe": {**LOCAL, "kv_channels": 8, "num_key_value_heads": 4},
    "Jamba": {"num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 2, "attn_layer_offset": 1,
              "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 4,
              "use_mamba_kernels": False},
    "NemotronH": {"layers_block_type": ["mamba", "moe", "attention"], **ROUTED, "head_dim": 8, "mamba_num_heads": 4,
                  "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2, "moe_shared_expert_intermediate_size": 16},
    "FlexOlmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "Ernie4_5_Moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 1},
    "HunYuanMoEV1": {"num_experts": 4, "moe_topk": 2, "head_dim": 8,
                     "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "Lfm2Moe": {**SPARSE, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "MiniMax": {**LOCAL, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"]},
    "LongcatFlash": {**LATENT, "num_layers": 2, "ffn_hidden_size": 64, "expert_ffn_hidden_size": 16, "moe_topk": 2,
                     "n_routed_experts": 4, "zero_expert_num": 1, "num_key_value_heads": 4, "head_dim": 8},
    "Llama4Text": {**LOCAL, "head_dim": 8, "intermediate_size_mlp": 64, "interleave_moe_layer_step": 1},
    "Gemma4Text": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16,
                   "head_dim": 8, "global_head_dim": 8, "hidden_size_per_layer_input": 0},
    "Dbrx": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 256,
             "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
             "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32}},
}  # fmt: skip
FEW = ("Mixtral", "Qwen2Moe", "Qwen3Moe", "DeepseekV3", "GptOss", "JetMoe", "Phimoe", "Gemma4Text")
ROUTERS = re.compile(r"\.(gate|router)\.")
LORA = {"use_peft_lora": True, "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "lora_target_modules": "all-linear"}


def make(family: str) -> Any:
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **FAMILIES.get(family, {})})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1 and ("expert" in name or "router" in name or "gate" in name):
                p.normal_(std=0.1)  # some classes leave them unset
    return model.eval()


def must_train(model: Any) -> set[str]:
    """The names of the weights that get adapters: of linear layers but the head, and what is stacked for experts."""
    head = model.get_output_embeddings()
    found = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}
    found |= {
        f"{name}.{own}" for name, module in model.named_modules() if "Experts" in type(module).__name__
        for own, p in module.named_parameters(recurse=False) if p.ndim == 3
    }  # fmt: skip
    refused = {n for n in found if "NemotronH" in type(model).__name__ and n.endswith("out_proj.weight")}
    return {n for n in found if not ROUTERS.search(f"{n.rpartition('.')[0]}.")} - refused


def trained(model: Any) -> set[str]:
    """The names of the weights that have an adapter."""
    found = set()
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and "default" in module.lora_A:
            plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
            found.add(f"{plain}.{getattr(module, 'parameter_name', 'weight')}")
    return found


@pytest.mark.parametrize("family", [pytest.param(f, marks=() if f in FEW else pytest.mark.slow) for f in FAMILIES])
def test_linear_layers_and_experts_have_adapters_and_routers_do_not(family, tmp_path):
    model = make(family)
    targets = mixture_targets(model)
    assert targets is not None
    config = LoraConfig(
        r=2, target_modules=targets.modules, target_parameters=targets.parameters, init_lora_weights=False
    )
    made = get_peft_model(make(family), config)
    assert trained(made) == must_train(model)
    made.eval().save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(model, tmp_path)
    torch.testing.assert_close(logits_of(loaded), logits_of(made), rtol=0, atol=1e-5)


# --- runs -------------------------------------------------------------------------------------------------------------


def start(place: Path, family: str, **changes: Any) -> Any:
    if runtime.is_main() and not (place / "model").exists():
        make(family).save_pretrained(place / "model")
        make_tokenizer().save_pretrained(place / "model")
    runtime.barrier()
    values = {"max_steps": 4, "learning_rate": 5e-3, "lr_scheduler_type": "constant"}
    values |= {"router_aux_loss_coef": 0.0} if family == "GptOss" else {}
    config = settings(place / "run", **{**values, **LORA, **global_batch(runtime.world_size()), **changes})
    return SFTTrainer(model=str(place / "model"), args=config, train_dataset=text_rows(40))


def check_run(place: Path, family: str, **changes: Any) -> None:
    trainer = start(place, family, **changes)
    plain = AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.float32)
    assert trained(trainer.parts.model) == must_train(plain)
    ready = trainer.prepare()
    values = {name: value for name, value in values_of(ready.model).items() if "lora_" in name}
    trainer.train()
    trainer.save_model(place / "adapter")
    runtime.barrier()
    loaded = PeftModel.from_pretrained(plain, place / "adapter", is_trainable=True)
    assert trained(loaded) == trained(trainer.parts.model)
    last = values_of(ready.model)
    parameters = {name: p for name, p in loaded.named_parameters() if "lora_" in name}
    assert parameters.keys() == values.keys()
    for name, p in parameters.items():
        assert torch.equal(p, last[name]), name
        p.data.copy_(values[name])
    if changes:
        return
    order = trainer.prepare().loader.sampler.order
    optimizer = torch.optim.AdamW(list(parameters.values()), lr=5e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    expected = plain_losses(loaded.train(), optimizer, schedule, trainer.parts.train, order, trainer.args)
    assert losses(trainer) == pytest.approx(expected, abs=1e-4)


@ranks(1, 2)
@pytest.mark.parametrize(
    "family", ["DeepseekV3", *(pytest.param(f, marks=pytest.mark.slow) for f in ("GptOss", "JetMoe", "Llama4Text"))]
)
def test_a_run_has_the_losses_and_files_of_peft(family, tmp_path):
    check_run(tmp_path, family)


@ranks(1, 2)
@pytest.mark.slow
@pytest.mark.parametrize("family", ["DeepseekV3", "GptOss", "Qwen3Next"])
def test_in_4_bits(family, tmp_path):
    """Layers that PEFT would adapt through their weights are LoRA layers."""
    check_run(tmp_path, family, **FOUR_BITS)
    adapter, model = str(tmp_path / "adapter"), str(tmp_path / "model")
    if runtime.world_size() == 1:
        code, _, errors = command("chat", adapter, "--device", "cpu", "--max_new_tokens", "2", "--prompt", "the old")
        assert code == 0, errors
        code, _, errors = command("export", adapter, str(tmp_path / "merged"), "--merge")
        assert code == 0, errors
        merged = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(model), adapter
        ).merge_and_unload()  # fmt: skip
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        for name, value in merged.state_dict().items():
            torch.testing.assert_close(found.state_dict()[name], value, rtol=0, atol=1e-6, msg=name)


@ranks(1)
def test_experts_have_dropout_and_peft_loads_the_files(tmp_path):
    """PEFT's configuration has no dropout for parameters, so it records 0."""
    trainer = start(tmp_path, "Mixtral", max_steps=1, lora_dropout=0.2)
    layers = [m for m in trainer.parts.model.modules() if hasattr(m, "lora_dropout")]
    assert {m.lora_dropout["default"].p for m in layers} == {0.2} and any(hasattr(m, "parameter_name") for m in layers)
    trainer.train()
    trainer.save_model(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert loaded.peft_config["default"].lora_dropout == 0
    torch.testing.assert_close(logits_of(trainer.model.eval()), logits_of(loaded.eval()), rtol=0, atol=1e-5)


@ranks(1)
def test_the_default_dropout_is_left_out_where_peft_runs_experts(tmp_path):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        trainer = start(tmp_path, "Llama4Text", lora_dropout=None, progress="plain")
    assert trainer.parts.adapter_config.lora_dropout == 0
    assert "lora_dropout: the default of 0.1 is left out" in out.getvalue()
    assert "experts: Llama4ForCausalLM runs them by transformers' own code" in out.getvalue()


@ranks(1)
def test_experts_can_be_left_out(tmp_path):
    trainer = start(tmp_path, "Qwen2Moe", lora_experts=False)
    expected = {name for name in must_train(make("Qwen2Moe")) if ".experts." not in name}
    assert trained(trainer.parts.model) == expected and any("shared_expert" in name for name in expected)


@ranks(1)
def test_leaving_out_experts_that_are_not_there_is_reported(tmp_path):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        start(tmp_path, "Llama", lora_experts=False, progress="plain")
    assert "lora_experts: LlamaForCausalLM has no experts, so it has no effect." in out.getvalue()


@ranks(1)
def test_the_number_of_trained_parameters_is_printed_before_weights_are_loaded(tmp_path):
    def stop(*_: Any, **__: Any) -> None:
        raise ConfigError("weights are read now")

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setattr(assemble, "fill", stop)
        trainer = start(tmp_path, "Mixtral", max_steps=1, progress="plain")
        with pytest.raises(ConfigError, match="weights are read now"):
            trainer.train()
    trainable, _ = count_parameters(trainer.parts.model)
    assert trainable and f"trainable params: {trainable:,}" in out.getvalue()


@ranks(1)
def test_experts_that_peft_cannot_adapt_are_left_out_with_a_note(tmp_path):
    """DBRX reads the weights of its experts past the module that holds them."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        trainer = start(tmp_path, "Dbrx", progress="plain")
    assert "experts of DbrxForCausalLM get no adapters" in out.getvalue()
    assert trained(trainer.parts.model) == must_train(make("Dbrx"))


@ranks(1)
@pytest.mark.parametrize(
    ("changes", "message"),
    [({"lora_dropout": 0.1}, "lora_dropout=0.1: peft has no such adapters on parameters.*set lora_dropout to 0"),
     ({"lora_dropout": 0.2}, "lora_dropout=0.2: peft has no such adapters on parameters.*set lora_dropout to 0"),
     ({"use_dora": True}, "use_dora=True: peft has no such adapters on parameters.*set use_dora to False")],
)  # fmt: skip
def test_a_setting_that_does_not_fit_is_refused(changes, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        start(tmp_path, "Llama4Text", **changes)
    if "use_dora" in changes:
        with pytest.raises(ConfigError, match=message):
            start(tmp_path / "other", "Mixtral", **changes)


@ranks(1)
def test_a_dropout_that_a_script_configures_is_never_left_out(tmp_path):
    """Nor is it taken for the default, which has the same value."""
    make("Llama4Text").save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    for rate in (0.1, 0.3):
        with pytest.raises(ConfigError, match=f"lora_dropout={rate}: peft has no such adapters on parameters"):
            SFTTrainer(
                model=str(tmp_path / "model"), args=settings(tmp_path / "run", max_steps=1), train_dataset=text_rows(9),
                peft_config=LoraConfig(r=4, lora_dropout=rate, target_parameters=["experts.down_proj"]),
            )  # fmt: skip


@ranks(1)
def test_biases_of_adapters_on_experts_are_refused_by_name(tmp_path):
    make("Mixtral").save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    asked = LoraConfig(r=4, target_modules=["q_proj"], target_parameters=["experts.down_proj"], lora_bias=True)
    with pytest.raises(ConfigError, match="lora_bias=True: peft has no such adapters on parameters"):
        SFTTrainer(
            model=str(tmp_path / "model"), args=settings(tmp_path / "run", max_steps=1), train_dataset=text_rows(20),
            peft_config=asked,
        )  # fmt: skip


@ranks(1)
def test_a_script_s_configuration_keeps_its_meaning(tmp_path):
    make("Mixtral").save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    asked = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = SFTTrainer(
        model=str(tmp_path / "model"), args=settings(tmp_path / "run", max_steps=1), train_dataset=text_rows(20),
        peft_config=asked,
    )  # fmt: skip
    expected = get_peft_model(make("Mixtral"), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    assert trained(trainer.parts.model) == trained(expected)
    assert any(ROUTERS.search(name) for name in trained(expected))
    assert asked.target_modules == "all-linear"


@ranks(1)
def test_a_plan_counts_what_trains(tmp_path):
    trainer = start(tmp_path, "DeepseekV3", max_steps=1, skip_plan=False)
    trainer.train()
    trains = sum(p.trainable for unit in trainer.estimate.plan.units for p in unit.parameters)
    assert trains == sum("lora_" in name for name in values_of(trainer.model))
