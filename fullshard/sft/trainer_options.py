"""Settings that scripts written for transformers' and TRL's trainers use beside the main ones.

Part of `SFTConfig`. Names and values are those of `TrainingArguments` and TRL's `SFTConfig`. Nested settings
(`model_init_kwargs`, `accelerator_config`) become settings of the run's own. Nothing here imports torch.
"""

# ruff: noqa: RUF009 - options are fields

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from fullshard.config.configfile import read_file
from fullshard.config.errors import ConfigError
from fullshard.config.options import as_bool, option, shown

PLACED = ("device_map", "low_cpu_mem_usage", "use_cache", "tp_plan", "max_memory")
"""Arguments of `from_pretrained` without a meaning here: the engine places the model, and training uses no cache."""
BNB = {
    "load_in_4bit": "use_4bit_quantization", "load_in_8bit": "use_8bit_quantization",
    "bnb_4bit_use_double_quant": "use_nested_quant", "bnb_4bit_quant_type": "bnb_4bit_quant_type",
    "bnb_4bit_compute_dtype": "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage": "bnb_4bit_quant_storage_dtype",
}  # fmt: skip
"""Fields of `BitsAndBytesConfig`, and our settings."""
ACCELERATOR = {
    "dispatch_batches": "", "even_batches": "", "use_seedable_sampler": "", "non_blocking": "",
    "use_configured_state": "", "split_batches": "per_device_train_batch_size is the batch of one rank",
}  # fmt: skip
"""Fields of `AcceleratorConfig`, and why a true value is refused; empty where any value trains on the same rows."""


def _mapping() -> Any:
    return option(None, kind=dict, metavar="name=value,…, or JSON")


@dataclass
class TrainerOptions:
    """Settings of the trainers of transformers and TRL."""

    model_init_kwargs: dict[str, Any] | str | None = _mapping()
    """Arguments of `from_pretrained` for a model that is given by name: dtype, attn_implementation,
    quantization_config (bitsandbytes in 4 bits), trust_remote_code, revision, and settings of the model's
    configuration."""
    trust_remote_code: bool = False
    """Run the code of a model or tokenizer that brings its own."""
    loss_type: Literal["nll", "dft", "chunked_nll"] = "nll"
    """The loss of a token: nll is the cross-entropy (chunked_nll is the same), dft weighs it with the token's
    probability (Dynamic Fine-Tuning)."""
    label_smoothing_factor: float = 0.0
    """Label smoothing: this fraction of the loss is the mean cross-entropy with all tokens of the vocabulary."""
    average_tokens_across_devices: bool = True
    """Weight all trained tokens of a step equally. If false, each rank's mean loss counts the same, whatever the number
    of its tokens."""
    torch_compile_backend: str | None = option(None, metavar="a backend of torch.compile")
    """The backend of torch.compile; turns `torch_compile` on."""
    torch_compile_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = (
        None
    )
    """The mode of torch.compile; turns `torch_compile` on."""
    torch_empty_cache_steps: int | None = None
    """Return unused GPU memory to the driver after every so many steps."""
    tf32: bool | None = None
    """Whether float32 matrix products may be computed in TF32; torch's setting if not set."""
    full_determinism: bool = False
    """Use deterministic algorithms only; slower. An operation without one is an error."""
    use_cpu: bool = option(False, script_only=True)
    """Train on CPUs even if there are GPUs."""
    accelerator_config: dict[str, Any] | str | None = option(None, kind=object, metavar="a mapping, or JSON")
    """Accelerate's settings: `gradient_accumulation_kwargs` may hold `sync_each_batch`; the others change nothing, or
    are refused."""
    eval_delay: float = 0
    """Skip evaluations before this many steps (or epochs, if `eval_strategy` is epoch)."""
    prediction_loss_only: bool = False
    """Compute the loss alone in evaluations, without predictions: `compute_metrics` is then not called."""
    include_num_input_tokens_seen: str = option("no", metavar="no, non_padding")
    """Log the number of tokens seen so far, padding excluded, as `num_input_tokens_seen` too."""
    save_only_model: bool = False
    """Save checkpoints without the optimizer. A run that resumes from one starts with a new optimizer."""
    disable_tqdm: bool | None = None
    """Show plain lines instead of the live display."""
    logging_dir: str | None = option(None, metavar="a folder")
    """The folder for TensorBoard's files; `runs` in `output_dir` if not set."""
    hub_token: str | None = None
    """The token for uploads; that of `hf auth login` if not set. It is not written anywhere."""
    hub_revision: str | None = None
    """The branch to upload to; main if not set."""
    hub_always_push: bool = False
    """Wait for the upload of an earlier save instead of skipping one while it runs."""
    project: str = "huggingface"
    """The project in Trackio."""
    trackio_space_id: str | None = None
    """Trackio: the Space to deploy to; local if not set."""
    trackio_bucket_id: str | None = None
    """Trackio: the bucket of the Space."""
    trackio_static_space_id: str | None = option(None, kind=object)
    """Trackio: the static Space to publish at the end; false publishes none."""

    # --- nested settings --------------------------------------------------------------------------------------------

    def take_nested(self) -> None:
        """Make nested settings the run's own. Refuses what has no meaning here."""
        run: Any = self
        self._take_model_arguments()
        self._take_accelerator()
        if self.torch_compile_backend or self.torch_compile_mode:
            run.torch_compile = True
        if self.loss_type == "chunked_nll":
            self.loss_type = "nll"
        seen = str(self.include_num_input_tokens_seen).lower()
        if seen in ("true", "all"):
            raise ConfigError(
                f"include_num_input_tokens_seen is {self.include_num_input_tokens_seen}; tokens are counted without "
                f"padding: set non_padding."
            )
        self.include_num_input_tokens_seen = "no" if seen in ("false", "no") else seen
        if self.include_num_input_tokens_seen not in ("no", "non_padding"):
            raise ConfigError(f"include_num_input_tokens_seen is {seen}; expected no or non_padding.")

    def _take_model_arguments(self) -> None:
        run, given = cast(Any, self), dict(self.model_init_kwargs or {})  # type: ignore[arg-type]
        dtype = given.get("dtype", given.get("torch_dtype"))
        if dtype is not None:
            run.torch_dtype = _dtype_name(dtype)
        if given.get("attn_implementation") is not None:
            run.attn_implementation = given["attn_implementation"]
        self.trust_remote_code = bool(given.get("trust_remote_code", self.trust_remote_code))
        if (packed := given.get("quantization_config")) is not None:
            for name, value in quantization_settings(packed).items():
                setattr(self, name, value)

    @property
    def config_changes(self) -> dict[str, Any]:
        """The arguments in `model_init_kwargs` that are settings of the model's configuration."""
        taken = ("dtype", "torch_dtype", "attn_implementation", "trust_remote_code", "quantization_config", "revision")
        given = dict(self.model_init_kwargs or {})  # type: ignore[arg-type]
        return {name: value for name, value in given.items() if name not in (*taken, *PLACED)}

    @property
    def revision(self) -> str | None:
        """The revision of the model on the hub; None is its main branch."""
        return dict(self.model_init_kwargs or {}).get("revision")  # type: ignore[arg-type]

    def _take_accelerator(self) -> None:
        run, given = cast(Any, self), self.accelerator_config
        if given is None or given == "":
            return
        if isinstance(given, str):
            given = _from_json(given) if given.lstrip().startswith("{") else read_file(given).values
        if not isinstance(given, Mapping) and not hasattr(given, "__dict__"):
            raise ConfigError(f"accelerator_config is {shown(given)}; expected a mapping, JSON or a file.")
        given = dict(given) if isinstance(given, Mapping) else dict(vars(given))
        accumulation = dict(given.pop("gradient_accumulation_kwargs", None) or {})
        if "sync_each_batch" in accumulation:
            run.sync_each_batch = as_bool(accumulation.pop("sync_each_batch"))
        for name, value in (*given.items(), *accumulation.items()):
            if name not in ACCELERATOR or (value and ACCELERATOR[name]):
                why = ACCELERATOR.get(name) or f"expected {', '.join(ACCELERATOR)} or gradient_accumulation_kwargs"
                raise ConfigError(f"accelerator_config: {name} is {value!r}, which is not supported: {why}.")


def quantization_settings(given: Any) -> dict[str, Any]:
    """Our settings of a `BitsAndBytesConfig`, or of one as a mapping."""
    values = dict(given) if isinstance(given, Mapping) else given.to_dict()
    if not (values.get("load_in_4bit") or values.get("load_in_8bit")):
        kind = values.get("quant_method") or type(given).__name__
        raise ConfigError(f"quantization_config is {kind}; expected a BitsAndBytesConfig with load_in_4bit.")
    found = {ours: values[theirs] for theirs, ours in BNB.items() if values.get(theirs) is not None}
    return {name: _dtype_name(value) if name.endswith("_dtype") else value for name, value in found.items()}


def _from_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"accelerator_config: not JSON: {error}") from None


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
