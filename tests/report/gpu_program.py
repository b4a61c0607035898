"""Talking on one GPU: a model, an adapter, both in 4 bits, against transformers' `generate` there; run as a program."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from fullshard.data.chat_template import BUILT_IN
from fullshard.launch.chat import FOUR_BITS, Chat, load_chat_model
from fullshard.launch.find_result import find_result
from fullshard.quant.linear import NF4Linear
from fullshard.quant.quantize import quantize_model
from tests.data.tiny import make_tokenizer
from tests.sft.tiny import make_model

LIMIT = 48
SHAPE = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 8}


def rounded(model: Any) -> Any:
    """The model with dense weights that 4-bit layers stand for, as the kernels of this device unpack them."""
    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and "lm_head" not in name:
            held = nn.Sequential(layer)
            quantize_model(held, FOUR_BITS)
            packed: NF4Linear = held[0]  # type: ignore[assignment]
            layer.weight.data = packed.dequantize(torch.bfloat16)
    return model


def main(place: Path) -> None:
    base, adapter = place / "base", place / "adapter"
    make_model(**SHAPE).bfloat16().save_pretrained(base)
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = BUILT_IN["chatml"].text
    tokenizer.save_pretrained(base)

    def plain() -> Any:
        return AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).cuda()

    lora = get_peft_model(plain(), LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    for p in lora.parameters():
        if p.requires_grad:
            p.data.normal_(std=0.05)
    lora.save_pretrained(adapter)
    tokenizer.save_pretrained(adapter)
    cases = {
        "model": (base, False, plain()),
        "adapter": (adapter, False, PeftModel.from_pretrained(plain(), adapter)),
        "model in 4 bits": (base, True, rounded(plain())),
        "adapter in 4 bits": (adapter, True, PeftModel.from_pretrained(rounded(plain()), adapter)),
    }
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "the red bird"}], add_generation_prompt=True, return_dict=False
    )
    given = torch.tensor([ids], device="cuda")
    for name, (folder, four_bits, model) in cases.items():
        loaded = load_chat_model(find_result(str(folder)), device="cuda", four_bits=four_bits)
        assert any(isinstance(m, NF4Linear) for m in loaded.model.modules()) == four_bits
        began = time.monotonic()
        reply = Chat(loaded, None, LIMIT).ask("the red bird")
        took = time.monotonic() - began
        out = model.generate(
            input_ids=given, attention_mask=torch.ones_like(given), max_new_tokens=LIMIT, do_sample=False,
            eos_token_id=[1, tokenizer.convert_tokens_to_ids("<|im_end|>")], pad_token_id=2,
        )  # fmt: skip
        said = tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)
        print(f"{name}: {reply.tokens} tokens in {took:.2f} s, {'equal' if said == reply.text else 'DIFFERENT'}")
        assert said == reply.text and reply.tokens > 8, (said, reply)
    print("all right")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
