"""What a run cannot do on XLA is refused by name, with the reason; no torch_xla is needed."""

from __future__ import annotations

import pytest

from fullshard.config.errors import ConfigError
from fullshard.sft.cli_args import CommandConfig
from fullshard.xla.engine import ENGINE

REFUSED = {
    "use_4bit_quantization": ({"use_4bit_quantization": True, "use_peft_lora": True}, "4-bit weights need kernels"),
    "base_dtype": ({"base_dtype": "fp8", "use_peft_lora": True}, "fp8 weights need kernels"),
    "optim muon": ({"optim": "muon"}, "updates whole matrices; use one of adamw_torch"),
    "optim adafactor": ({"optim": "adafactor"}, "updates whole matrices"),
    "torch_compile": ({"torch_compile": True}, "XLA compiles whole steps already"),
    "gradient_checkpointing auto": ({"gradient_checkpointing": "auto"}, "use true or false"),
    "gradient_checkpointing 4GiB": ({"gradient_checkpointing": "4GiB"}, "use true or false"),
    "activation_offloading": ({"activation_offloading": True, "gradient_checkpointing": True}, "stay on XLA devices"),
    "sequence_slices 4": ({"sequence_slices": 4}, "the compiler schedules whole steps"),
    "offload_embedding": ({"offload_embedding": True}, "parameters stay on XLA devices"),
    "offload_experts": ({"offload_experts": True, "use_peft_lora": True}, "parameters stay on XLA devices"),
    "fused_lora": ({"fused_lora": True, "use_peft_lora": True}, "the compiler fuses LoRA layers itself"),
    "use_flash_attn": ({"use_flash_attn": True}, "for GPUs"),
    "attn_implementation fullshard": ({"attn_implementation": "fullshard"}, "use sdpa or eager"),
    "padding_free": ({"padding_free": True}, "use packing"),
    "on_nonfinite_loss skip": ({"on_nonfinite_loss": "skip"}, "reads values in every step"),
    "eval_samples": ({"eval_samples": 2, "eval_strategy": "steps"}, "use fullshard chat afterwards"),
    "sample_prompts": ({"sample_prompts": "p.txt", "eval_strategy": "steps"}, "use fullshard chat afterwards"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name):
    changes, why = REFUSED[name]
    with pytest.raises(ConfigError) as raised:
        ENGINE.check_run(CommandConfig(**changes))
    assert str(raised.value).startswith(f"{name} is not supported on XLA: ") and why in str(raised.value)


def test_the_defaults_are_supported():
    ENGINE.check_run(CommandConfig())
    for optim in ("adamw_torch", "sgd", "adagrad", "rmsprop", "lion_32bit"):
        ENGINE.check_run(CommandConfig(optim=optim, gradient_checkpointing=False, attn_implementation="eager"))
