"""The settings of what trains and how it starts: adapters, the 4-bit model beside them, frozen parts, noise.

Part of `SFTConfig`. Names are PEFT's (`LoraConfig`, `VeraConfig`, …) and transformers'. No torch: what does not go
together is found at once.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Literal

from fullshard.errors import ConfigError
from fullshard.lora.adapter_config import taken_from_weights
from fullshard.options import as_list, option

LORA_TARGETS = "q_proj,k_proj,v_proj,o_proj,down_proj,up_proj,gate_proj"
PLAIN_STARTS = ("true", "false", "gaussian", "orthogonal")
"""Ways to begin a LoRA adapter that do not look at the weights it adapts."""
NOT_OFFERED = {
    "eva": "it begins with activations of the data",
    "corda": "it begins with activations of the data",
    "lora_ga": "it begins with gradients of the data",
    "mica": "it freezes half of the adapter",
}
PROMPT_TYPES = ("prompt_tuning", "prefix_tuning", "p_tuning")


@dataclass
class AdapterOptions:
    """Settings of adapters and of the frozen model beside them."""

    use_peft_lora: bool = False
    """Train a LoRA adapter and leave the model as it is."""
    adapter_name_or_path: str | None = option(None, given_as="a folder, or a name on the hub")
    """Go on training this adapter instead of starting a new one; its own rank, targets and new tokens are kept."""
    lora_r: int = 64
    """Rank of the adapter's matrices."""
    lora_alpha: int = 16
    """The adapter's output is scaled by alpha / r."""
    lora_dropout: float = 0.1
    """Dropout before the adapter."""
    lora_target_modules: str = option(LORA_TARGETS, given_as="module names, or all-linear")
    """Which layers get an adapter: a comma-separated list, or all-linear for every linear layer but the output head."""
    adapter_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The dtype the adapter is stored and updated in; auto is float32, but bfloat16 beside a 4-bit model whose
    `bnb_4bit_quant_storage_dtype` is that."""
    use_4bit_quantization: bool = False
    """Hold the frozen model in 4 bits (QLoRA): it is quantised while it is read, each rank its own part."""
    use_8bit_quantization: bool = False
    """Hold the frozen model in 8 bits. Not offered; use 4 bits."""
    use_nested_quant: bool = False
    """Quantise the scales of a 4-bit model as well: 4.127 instead of 4.5 bits per weight."""
    bnb_4bit_compute_dtype: Literal["auto", "float16", "bfloat16", "float32"] = "auto"
    """The dtype a 4-bit model multiplies in; auto is the one that the run computes in."""
    bnb_4bit_quant_storage_dtype: Literal["uint8", "float16", "bfloat16", "float32"] = "uint8"
    """What stands beside the 4-bit weights: bfloat16 trains in bf16 throughout, float32 keeps the rest wide, uint8
    leaves it as in the files. The packed values themselves are bytes whatever it says."""
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = "nf4"
    """The 4-bit format."""
    peft_type: Literal["lora", "vera", "prompt_tuning", "prefix_tuning", "p_tuning"] = option(
        "lora", aliases=("peft_method",), flags=("peft_method",)
    )
    """The kind of adapter. All but lora are switched on by being named; lora by `use_peft_lora`. vera takes rank,
    dropout and targets from the `lora_*` settings."""
    use_rslora: bool = False
    """Scale the adapter's output by alpha / √r."""
    use_dora: bool = False
    """DoRA: train the length of each weight's rows apart from their direction. Works on 4-bit layers too."""
    init_lora_weights: str = option(
        "true", given_as="true, false, gaussian, orthogonal, pissa, pissa_niter_N, olora, loftq"
    )
    """How the adapter's matrices begin. pissa and olora take them out of the weights, loftq out of what 4 bits lose of
    them; all three are computed weight by weight while the model is read."""
    modules_to_save: str | None = option(None, given_as="module names")
    """Modules that train whole beside the adapter and are saved with it, such as embed_tokens,lm_head."""
    trainable_token_indices: str | None = option(None, given_as="numbers of tokens, or tokens")
    """Tokens whose rows in the embedding and the output head train beside the adapter, with commas; digits are
    numbers of tokens."""
    freeze: str | None = option(None, given_as="patterns of parameter names")
    """What does not train, with commas: whole parts of names, * and [0-9] as in file names, such as
    embed_tokens,layers.[0-7]."""
    vera_d_initial: float = 0.1
    """VeRA: the first value of the vector inside."""
    projection_prng_key: int = 0
    """VeRA: the seed of the shared projections."""
    save_projection: bool = True
    """VeRA: write the shared projections with the adapter instead of drawing them again from their seed."""
    num_virtual_tokens: int = 20
    """Prompt methods: how many tokens are trained in front of each row."""
    prompt_tuning_init_text: str | None = None
    """Prompt tuning: begin with the embeddings of this text, repeated or cut; at random if not given."""
    prefix_projection: bool = False
    """Prefix tuning: train the prefix through a small network."""
    encoder_hidden_size: int | None = None
    """The width of that network, and of p-tuning's; the model's own if not given."""
    loraplus_lr_ratio: float | None = None
    """LoRA+: train the B matrices with this many times the learning rate."""
    loraplus_lr_embedding: float = 1e-6
    """LoRA+: the learning rate of adapters on embeddings."""
    neftune_noise_alpha: float | None = None
    """NEFTune: add noise of this strength to the embeddings while training."""

    @property
    def adapter_kind(self) -> str | None:
        """What PEFT calls the adapter that is asked for; None for full fine-tuning."""
        return self.peft_type if self.use_peft_lora or self.peft_type != "lora" else None

    @property
    def first_values(self) -> bool | str:
        """`init_lora_weights` as PEFT takes it."""
        return {"true": True, "false": False}.get(self.init_lora_weights.lower(), self.init_lora_weights.lower())

    def check_adapter(self) -> None:
        """Refuse what does not go together."""
        self._check_quantization()
        self._check_start()
        self._check_kind()
        self._check_prompt()
        for name, least in (("num_virtual_tokens", 1), ("encoder_hidden_size", 1), ("loraplus_lr_ratio", 1)):
            value = getattr(self, name)
            if value is not None and not least <= value < math.inf:
                raise ConfigError(f"{name} is {value}; expected {least} or more.")
        for name in ("neftune_noise_alpha", "loraplus_lr_embedding"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ConfigError(f"{name} is {value}; expected 0 or more.")
        for name in ("freeze", "modules_to_save", "trainable_token_indices"):
            if (given := getattr(self, name)) is not None and not as_list(given):
                raise ConfigError(f"{name} is empty; expected names with commas.")

    def _check_quantization(self) -> None:
        if self.use_4bit_quantization and self.use_8bit_quantization:
            raise ConfigError("use_4bit_quantization and use_8bit_quantization are both on; choose one.")
        if self.use_8bit_quantization:
            raise ConfigError(
                "use_8bit_quantization is on, but 8-bit weights are not offered; use_4bit_quantization is."
            )
        if self.use_nested_quant and not self.use_4bit_quantization:
            raise ConfigError("use_nested_quant quantises the scales of 4-bit weights; it needs use_4bit_quantization.")

    def _check_start(self) -> None:
        wanted: Any = self
        start = self.init_lora_weights.lower()
        if start in NOT_OFFERED:
            raise ConfigError(
                f"init_lora_weights is {start}, which is not offered: {NOT_OFFERED[start]}. Expected one of true, "
                f"false, gaussian, orthogonal, pissa, pissa_niter_N, olora, loftq."
            )
        if not (start in (*PLAIN_STARTS, "pissa", "olora", "loftq") or re.fullmatch(r"pissa_niter_\d+", start)):
            raise ConfigError(
                f"init_lora_weights is {self.init_lora_weights!r}; expected true, false, gaussian, orthogonal, pissa, "
                f"pissa_niter_N (with a number), olora or loftq."
            )
        if start == "loftq" and not self.use_4bit_quantization:
            raise ConfigError("init_lora_weights is loftq, which makes up for 4 bits; it needs use_4bit_quantization.")
        if taken_from_weights(start) and wanted.save_dtype in ("float16", "bfloat16"):
            raise ConfigError(
                f"save_dtype is {wanted.save_dtype}, and init_lora_weights is {start}: what is saved is a difference "
                f"of two adapters, which rounding would swallow. Leave save_dtype out."
            )
        if taken_from_weights(start) and self.use_4bit_quantization:
            raise ConfigError(
                f"init_lora_weights is {start}, and the model is held in 4 bits: what is left of the weights would be "
                f"rounded, and no adapter's files could give the trained model again. Use loftq, or leave "
                f"use_4bit_quantization out."
            )

    def _check_kind(self) -> None:
        """Settings of one kind of adapter mean nothing to another."""
        kind, defaults = self.adapter_kind, type(self).__dataclass_fields__
        needs = {
            "lora": ("use_rslora", "use_dora", "init_lora_weights", "trainable_token_indices"),
            "vera": ("vera_d_initial", "projection_prng_key", "save_projection"),
            "prompt_tuning": ("prompt_tuning_init_text",),
            "prefix_tuning": ("prefix_projection",),
        }
        earlier = self.adapter_name_or_path
        for wanted, names in needs.items():
            for name in names:
                if getattr(self, name) != defaults[name].default and kind != wanted and not earlier:
                    found = f"peft_type is {kind}" if kind else "no adapter is asked for"
                    raise ConfigError(f"{name} is a setting of {wanted} adapters, and {found}; leave it out.")
        if self.modules_to_save and kind not in ("lora", "vera") and not earlier:
            why = f"{kind} trains a prompt alone" if kind else "without an adapter all modules train"
            raise ConfigError(f"modules_to_save: {why}; leave it out.")

    def _check_prompt(self) -> None:
        wanted: Any = self
        if self.adapter_kind in PROMPT_TYPES:
            check_prompt(self.peft_type, wanted.packing, wanted.gradient_checkpointing)


def check_prompt(kind: str, packing: bool, checkpointing: bool) -> None:
    """Refuse what a prompt cannot be trained with."""
    if packing:
        raise ConfigError(
            f"packing is on, and the adapter is {kind}: documents that share a row would share one prompt and see each "
            f"other. Leave packing out."
        )
    if kind == "prefix_tuning" and checkpointing:
        raise ConfigError(
            "gradient_checkpointing is on, and the adapter is prefix_tuning: the prefix lies in the attention cache, "
            "which computing a layer again would write to twice. Leave gradient_checkpointing out."
        )
