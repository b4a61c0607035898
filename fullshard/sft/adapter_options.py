"""The settings of adapters, of the 4-bit model beside them, of frozen parameters and of NEFTune noise.

Part of `SFTConfig`. Names are PEFT's (`LoraConfig`, `VeraConfig`, …) and transformers'. Nothing here imports torch:
conflicting settings are reported at once.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Literal

from fullshard.config.errors import ConfigError
from fullshard.config.options import as_list, option
from fullshard.lora.adapter_config import taken_from_weights

LORA_TARGETS = "q_proj,k_proj,v_proj,o_proj,down_proj,up_proj,gate_proj"
PLAIN_STARTS = ("true", "false", "gaussian", "orthogonal")
"""Initializations of a LoRA adapter that do not depend on the weights."""
NOT_SUPPORTED = {
    "eva": "it needs activations of the data",
    "corda": "it needs activations of the data",
    "lora_ga": "it needs gradients of the data",
    "mica": "it freezes half of the adapter",
}
PROMPT_TYPES = ("prompt_tuning", "prefix_tuning", "p_tuning")


@dataclass
class AdapterOptions:
    """Settings of adapters and of the frozen model beside them."""

    use_peft_lora: bool = option(False, elsewhere=("use_peft", "use_lora", "lora", "peft", "finetuning_type"))
    """Train a LoRA adapter; the model's own weights are frozen."""
    adapter_name_or_path: str | None = option(
        None, metavar="a folder, or a name on the hub", elsewhere=("adapter", "adapter_name", "lora_path")
    )
    """Resume training this adapter instead of starting a new one; its rank, targets and new tokens are kept."""
    lora_r: int = option(64, elsewhere=("lora_rank", "rank", "r"))
    """The rank of the adapter."""
    lora_alpha: int = option(16, elsewhere=("alpha",))
    """The adapter's output is scaled by alpha / r."""
    lora_dropout: float | None = option(None, elsewhere=("dropout",))
    """Dropout on the adapter's input; unset: 0.1. Adapters on fused experts have it where fullshard's experts run; PEFT
    has none there, so the adapter's files record 0. Where PEFT's code runs the experts, unset means none, and a value
    is refused."""
    lora_target_modules: str = option(
        LORA_TARGETS,
        metavar="module names, or all-linear",
        elsewhere=("target_modules", "lora_target", "lora_target_linear", "lora_modules"),
    )
    """The layers that get an adapter: a comma-separated list, or all-linear for every linear layer except the output
    head, and all experts of a mixture, but no router."""
    lora_experts: bool = True
    """Whether all-linear includes the experts of a mixture. Shared experts, which see every token, are included in any
    case."""
    fused_lora: bool | None = None
    """Run LoRA layers that share an input (queries, keys and values; the branches of an MLP) as one operator, with
    dropout inside it and a backward pass of its own. On by default on GPUs. Layers that it does not support run as in
    PEFT."""
    adapter_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The dtype in which the adapter is stored and updated. auto is float32, or bfloat16 with a 4-bit model whose
    `bnb_4bit_quant_storage_dtype` is bfloat16."""
    base_dtype: Literal["fp8"] | None = None
    """The dtype of the frozen linear weights, which are quantized while loading: fp8 halves their memory, and GPUs that
    multiply in fp8 (Ada, Hopper and later) train about 1.4 times as fast. Not set, they keep the model's dtype."""
    dequantize: bool = False
    """Train a model that is shipped in few bits (MXFP4, fp8 blocks, compressed-tensors) in its dense values: each rank
    unpacks its own part while loading. Otherwise such weights stay frozen as they are stored, and adapters train."""
    use_4bit_quantization: bool = option(
        False, elsewhere=("load_in_4bit", "qlora", "use_qlora", "use_4bit", "quantization_bit")
    )
    """Quantize the frozen model to 4 bits (QLoRA). Each rank quantizes its own part while loading."""
    use_8bit_quantization: bool = option(False, elsewhere=("load_in_8bit", "use_8bit"))
    """Quantize the frozen model to 8 bits. Refused if true: use 4 bits."""
    use_nested_quant: bool = option(
        False, elsewhere=("use_bnb_nested_quant", "bnb_4bit_use_double_quant", "double_quantization")
    )
    """Quantize the scales of a 4-bit model too: 4.127 instead of 4.5 bits per weight."""
    bnb_4bit_compute_dtype: Literal["auto", "float16", "bfloat16", "float32"] = "auto"
    """The compute dtype of 4-bit layers; auto is the compute dtype of the run."""
    bnb_4bit_quant_storage_dtype: Literal["uint8", "float16", "bfloat16", "float32"] = option(
        "uint8", elsewhere=("bnb_4bit_quant_storage",)
    )
    """The dtype of the parameters that are not quantized: bfloat16 trains in bf16 throughout, float32 keeps them in
    fp32, uint8 keeps the dtype of the files. The 4-bit values are always stored as bytes."""
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = "nf4"
    """The 4-bit format."""
    offload_embedding: bool | None = None
    """Keep a frozen input embedding in host memory, where the GPU reads the rows of the batch; the numbers are the
    same. Every rank holds it whole then. If not set: with 4-bit models on GPUs."""
    offload_experts: bool = False
    """Keep the frozen experts of a mixture of experts in host memory, sharded over the ranks, and copy those of each
    layer to the GPU ahead of it. All other weights stay on the GPU; the numbers are the same."""
    peft_type: Literal["lora", "vera", "prompt_tuning", "prefix_tuning", "p_tuning"] = option(
        "lora", aliases=("peft_method",), flags=("peft_method",)
    )
    """The kind of adapter. lora is turned on by `use_peft_lora`, the others by naming them here. vera uses rank,
    dropout and targets of the `lora_*` options."""
    use_rslora: bool = False
    """Scale the adapter's output by alpha / √r."""
    use_dora: bool = False
    """DoRA: train the magnitude of each weight's rows separately from their direction. Works on 4-bit layers too."""
    init_lora_weights: str = option(
        "true", metavar="true, false, gaussian, orthogonal, pissa, pissa_niter_N, olora, loftq"
    )
    """How the adapter is initialized. pissa and olora take the initial matrices from the weights, loftq from the
    quantization error; all three are computed weight by weight while the model is loaded."""
    modules_to_save: str | None = option(
        None, metavar="module names", elsewhere=("lora_modules_to_save", "additional_target")
    )
    """Modules that are trained whole beside the adapter and saved with it, such as embed_tokens,lm_head."""
    trainable_token_indices: str | None = option(None, metavar="numbers of tokens, or tokens")
    """Tokens whose rows in embedding and output head are trained beside the adapter; a comma-separated list of tokens
    or token ids."""
    freeze: str | None = option(None, metavar="patterns of parameter names")
    """Parameters to freeze, as a comma-separated list of patterns: whole parts of parameter names, with * and [0-9] as
    in file names, such as embed_tokens,layers.[0-7]."""
    vera_d_initial: float = 0.1
    """VeRA: the initial value of the d vector."""
    projection_prng_key: int = 0
    """VeRA: the seed of the shared projections."""
    save_projection: bool = True
    """VeRA: save the shared projections with the adapter instead of generating them again from their seed."""
    num_virtual_tokens: int = 20
    """Prompt methods: the number of trained tokens in front of each row."""
    prompt_tuning_init_text: str | None = None
    """Prompt tuning: initialize with the embeddings of this text, repeated or cut; random if not set."""
    prefix_projection: bool = False
    """Prefix tuning: compute the prefix with a small MLP."""
    encoder_hidden_size: int | None = None
    """The hidden size of that MLP, and of p-tuning's; the model's own if not set."""
    loraplus_lr_ratio: float | None = None
    """LoRA+: the learning rate of the B matrices, as a multiple of `learning_rate`."""
    loraplus_lr_embedding: float = 1e-6
    """LoRA+: the learning rate of adapters on embeddings."""
    neftune_noise_alpha: float | None = option(None, elsewhere=("noise_alpha",))
    """NEFTune: add noise of this strength to the embeddings while training."""

    @property
    def adapter_kind(self) -> str | None:
        """The kind of adapter, by PEFT's name; None for full fine-tuning."""
        return self.peft_type if self.use_peft_lora or self.peft_type != "lora" else None

    @property
    def first_values(self) -> bool | str:
        """`init_lora_weights` as PEFT takes it."""
        return {"true": True, "false": False}.get(self.init_lora_weights.lower(), self.init_lora_weights.lower())

    def check_adapter(self) -> None:
        """Refuse conflicting settings."""
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
            if (text := getattr(self, name)) is not None and not as_list(text):
                raise ConfigError(f"{name} is empty; expected a comma-separated list.")

    def _check_quantization(self) -> None:
        if self.use_4bit_quantization and self.use_8bit_quantization:
            raise ConfigError("use_4bit_quantization and use_8bit_quantization are both on; choose one.")
        if self.use_8bit_quantization:
            raise ConfigError(
                "use_8bit_quantization is on, but bitsandbytes' 8 bits (LLM.int8) are not supported: their outlier "
                "columns are chosen anew for each input, in 16 bits. Use use_4bit_quantization, or base_dtype fp8 for "
                "weights in 8 bits."
            )
        if self.use_nested_quant and not self.use_4bit_quantization:
            raise ConfigError("use_nested_quant quantizes the scales of 4-bit weights; it needs use_4bit_quantization.")
        if self.base_dtype is not None and self.use_4bit_quantization:
            raise ConfigError(f"base_dtype is {self.base_dtype}, and use_4bit_quantization is on; choose one.")
        if self.dequantize and (self.use_4bit_quantization or self.base_dtype is not None):
            other = "use_4bit_quantization is on" if self.use_4bit_quantization else f"base_dtype is {self.base_dtype}"
            raise ConfigError(f"dequantize is on, and {other}; choose one.")

    def _check_start(self) -> None:
        wanted: Any = self
        start = self.init_lora_weights.lower()
        if start in NOT_SUPPORTED:
            raise ConfigError(
                f"init_lora_weights is {start}, which is not supported: {NOT_SUPPORTED[start]}. Expected one of true, "
                f"false, gaussian, orthogonal, pissa, pissa_niter_N, olora, loftq."
            )
        if not (start in (*PLAIN_STARTS, "pissa", "olora", "loftq") or re.fullmatch(r"pissa_niter_\d+", start)):
            raise ConfigError(
                f"init_lora_weights is {self.init_lora_weights!r}; expected true, false, gaussian, orthogonal, pissa, "
                f"pissa_niter_N (with a number), olora or loftq."
            )
        if start == "loftq" and not self.use_4bit_quantization:
            raise ConfigError(
                "init_lora_weights is loftq, which corrects quantization errors; it needs use_4bit_quantization."
            )
        if taken_from_weights(start) and wanted.save_dtype in ("float16", "bfloat16"):
            raise ConfigError(
                f"save_dtype is {wanted.save_dtype}, and init_lora_weights is {start}: the saved adapter is a "
                f"difference of two adapters, which rounding would lose. Leave save_dtype out."
            )
        if taken_from_weights(start) and (self.use_4bit_quantization or self.base_dtype):
            instead = "Leave base_dtype" if self.base_dtype else "Use loftq, or leave use_4bit_quantization"
            raise ConfigError(
                f"init_lora_weights is {start}, and the model is quantized to {self.base_dtype or '4 bits'}: the "
                f"changed base weights would be rounded, so that the saved adapter could not reproduce the trained "
                f"model. {instead} out."
            )

    def _check_kind(self) -> None:
        """Refuse settings of another kind of adapter."""
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
                    adapter = f"peft_type is {kind}" if kind else "there is no adapter"
                    raise ConfigError(f"{name} is a setting of {wanted} adapters, and {adapter}; leave it out.")
        if self.modules_to_save and kind not in ("lora", "vera") and not earlier:
            why = f"{kind} trains only a prompt" if kind else "without an adapter all modules are trained"
            raise ConfigError(f"modules_to_save: {why}; leave it out.")

    def _check_prompt(self) -> None:
        wanted: Any = self
        if self.adapter_kind in PROMPT_TYPES:
            check_prompt(self.peft_type, wanted.packing, wanted.gradient_checkpointing)


def check_prompt(kind: str, packing: bool, checkpointing: bool) -> None:
    """Refuse settings that a prompt adapter cannot be trained with."""
    if packing:
        raise ConfigError(
            f"packing is on, and the adapter is {kind}: documents that share a row would share one prompt and see each "
            f"other. Leave packing out."
        )
    if kind == "prefix_tuning" and checkpointing:
        raise ConfigError(
            "gradient_checkpointing is on, and the adapter is prefix_tuning: the prefix is in the attention cache, "
            "to which a recomputed layer would write twice. Leave gradient_checkpointing out."
        )
