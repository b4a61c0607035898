"""What `SFTConfig` has of transformers' `TrainingArguments` and TRL's `SFTConfig` beside the main settings: settings of
memory, nested settings (`model_init_kwargs`, `accelerator_config`), and the methods and properties that scripts and
callbacks use.

Names and values are theirs. Nothing here imports torch or transformers before it is needed.
"""

# ruff: noqa: RUF009 - options are fields

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, cast

from fullshard.config.byte_size import parse_size
from fullshard.config.configfile import read_file
from fullshard.config.errors import ConfigError
from fullshard.config.options import as_bool, option, shown
from fullshard.config.redaction import hide_in

IGNORED_ARGUMENTS = ("device_map", "low_cpu_mem_usage", "use_cache", "tp_plan", "max_memory")
"""Arguments of `from_pretrained` without a meaning here: the engine places the model, and training uses no cache."""
BNB_FIELDS = {
    "load_in_4bit": "use_4bit_quantization", "load_in_8bit": "use_8bit_quantization",
    "bnb_4bit_use_double_quant": "use_nested_quant", "bnb_4bit_quant_type": "bnb_4bit_quant_type",
    "bnb_4bit_compute_dtype": "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage": "bnb_4bit_quant_storage_dtype",
}  # fmt: skip
"""Fields of `BitsAndBytesConfig`, and our settings."""
ACCELERATOR_FIELDS = {
    "dispatch_batches": "", "even_batches": "", "use_seedable_sampler": "", "non_blocking": "",
    "use_configured_state": "", "split_batches": "per_device_train_batch_size is the batch of one rank",
}  # fmt: skip
"""Fields of `AcceleratorConfig`, and why a true value is refused; empty where any value trains on the same rows."""
JSON_TYPES = (bool, int, float, str, type(None))
"""Types of values that JSON takes as they are."""


# --- memory ---------------------------------------------------------------------------------------------------------


def memory_budget(text: str) -> str:
    """A value of `gradient_checkpointing` besides true and false: auto, or a size with its unit."""
    text = text.strip()
    if text.lower() == "auto":
        return "auto"
    parse_size(text)
    return text


def number_of_slices(text: str) -> str:
    """A value of `sequence_slices`: auto, or a number."""
    text = text.strip()
    if text.lower() == "auto":
        return "auto"
    if int(text) < 1:
        raise ValueError(text)
    return str(int(text))


@dataclass
class ActivationOptions:
    """Settings of activation memory."""

    skip_plan: bool = False
    """Start without planning the run: one that cannot fit is not stopped, and plan.json is not written."""
    gradient_checkpointing: bool | str = option(
        True, kind=bool, besides=memory_budget, metavar="true, false, auto, or a size such as 40GiB"
    )
    """Recompute activations in the backward pass instead of keeping them: in all layers (true), in none (false), or in
    no more than needed for the free memory of the GPU (auto) or for a peak of allocated memory (a size)."""
    use_reentrant: bool = False
    """Use the reentrant variant of gradient checkpointing."""
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = option(
        None, kind=dict, metavar="use_reentrant=true or false, or JSON"
    )
    """Options of gradient checkpointing, as transformers takes them: `use_reentrant`."""
    activation_offloading: bool = False
    """Keep the inputs of recomputed layers on the host until the backward pass. Needs `gradient_checkpointing`."""
    sequence_slices: str = option(
        "auto", kind=str, besides=number_of_slices, metavar="auto, or a number of slices; 1 for none"
    )
    """Compute MLPs, experts, norms and other parts of a layer that see each token alone in so many slices of the
    sequence, forward and backward: what lies inside them never has the full length. auto: where rows are long and
    layers are recomputed."""

    @property
    def activation_budget(self) -> int | Literal["auto"] | None:
        """The bytes that a rank may allocate on its device, or auto for what is free; None if `gradient_checkpointing`
        is simply on or off."""
        setting = self.gradient_checkpointing
        return None if isinstance(setting, bool) else "auto" if setting == "auto" else parse_size(setting)

    @property
    def slices(self) -> int | None:
        """The number of slices of the sequence; None for auto."""
        return None if self.sequence_slices == "auto" else int(self.sequence_slices)

    def flatten_checkpointing(self) -> None:
        """Make the nested settings of gradient checkpointing the run's own, and check what excludes another."""
        options: dict[str, Any] = dict(self.gradient_checkpointing_kwargs or {})  # type: ignore[arg-type]
        if "use_reentrant" in options:
            self.use_reentrant = as_bool(options.pop("use_reentrant"))
        unknown = [name for name, value in options.items() if name != "selective" or value]
        if unknown:
            raise ConfigError(f"gradient_checkpointing_kwargs has {', '.join(unknown)}; expected use_reentrant alone.")
        try:
            self.sequence_slices = number_of_slices(self.sequence_slices)
        except ValueError:
            raise ConfigError(
                f"sequence_slices: expected auto, or a number of slices; 1 for none, got {self.sequence_slices!r}"
            ) from None
        if self.activation_offloading and not self.gradient_checkpointing:
            raise ConfigError(
                "activation_offloading keeps the inputs of recomputed layers on the host; it needs "
                "gradient_checkpointing."
            )


# --- settings -------------------------------------------------------------------------------------------------------


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

    def flatten_nested(self) -> None:
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
        run, arguments = cast(Any, self), dict(self.model_init_kwargs or {})  # type: ignore[arg-type]
        dtype = arguments.get("dtype", arguments.get("torch_dtype"))
        if dtype is not None:
            run.torch_dtype = _dtype_name(dtype)
        if arguments.get("attn_implementation") is not None:
            run.attn_implementation = arguments["attn_implementation"]
        self.trust_remote_code = bool(arguments.get("trust_remote_code", self.trust_remote_code))
        if (packed := arguments.get("quantization_config")) is not None:
            for name, value in quantization_settings(packed).items():
                setattr(self, name, value)

    @property
    def config_changes(self) -> dict[str, Any]:
        """The arguments in `model_init_kwargs` that are settings of the model's configuration."""
        taken = ("dtype", "torch_dtype", "attn_implementation", "trust_remote_code", "quantization_config", "revision")
        arguments = dict(self.model_init_kwargs or {})  # type: ignore[arg-type]
        return {name: value for name, value in arguments.items() if name not in (*taken, *IGNORED_ARGUMENTS)}

    @property
    def revision(self) -> str | None:
        """The revision of the model on the hub; None is its main branch."""
        return dict(self.model_init_kwargs or {}).get("revision")  # type: ignore[arg-type]

    def _take_accelerator(self) -> None:
        run, settings = cast(Any, self), self.accelerator_config
        if settings is None or settings == "":
            return
        if isinstance(settings, str):
            settings = _from_json(settings) if settings.lstrip().startswith("{") else read_file(settings).values
        if not isinstance(settings, Mapping) and not hasattr(settings, "__dict__"):
            raise ConfigError(f"accelerator_config is {shown(settings)}; expected a mapping, JSON or a file.")
        settings = dict(settings) if isinstance(settings, Mapping) else dict(vars(settings))
        accumulation = dict(settings.pop("gradient_accumulation_kwargs", None) or {})
        if "sync_each_batch" in accumulation:
            run.sync_each_batch = as_bool(accumulation.pop("sync_each_batch"))
        for name, value in (*settings.items(), *accumulation.items()):
            if name not in ACCELERATOR_FIELDS or (value and ACCELERATOR_FIELDS[name]):
                why = (
                    ACCELERATOR_FIELDS.get(name)
                    or f"expected {', '.join(ACCELERATOR_FIELDS)} or gradient_accumulation_kwargs"
                )
                raise ConfigError(f"accelerator_config: {name} is {value!r}, which is not supported: {why}.")


def quantization_settings(quantization: Any) -> dict[str, Any]:
    """Our settings of a `BitsAndBytesConfig`, or of one as a mapping."""
    values = dict(quantization) if isinstance(quantization, Mapping) else quantization.to_dict()
    if not (values.get("load_in_4bit") or values.get("load_in_8bit")):
        kind = values.get("quant_method") or type(quantization).__name__
        raise ConfigError(f"quantization_config is {kind}; expected a BitsAndBytesConfig with load_in_4bit.")
    settings = {ours: values[theirs] for theirs, ours in BNB_FIELDS.items() if values.get(theirs) is not None}
    return {name: _dtype_name(value) if name.endswith("_dtype") else value for name, value in settings.items()}


def _from_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"accelerator_config: not JSON: {error}") from None


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


# --- methods --------------------------------------------------------------------------------------------------------


@dataclass
class ArgumentMethods:
    """Methods and properties of `TrainingArguments`."""

    _script_args: Any = field(default=None, repr=False, compare=False)
    """The `args` of a script, if they are an object of another library."""

    def __getattr__(self, name: str) -> Any:
        """`set_training` and its like are transformers' own; other names are those of the script's own
        `args`, whose class may have fields of its own."""
        if name.startswith("set_"):
            from transformers import TrainingArguments

            if hasattr(TrainingArguments, name):
                return functools.partial(getattr(TrainingArguments, name), self)
        script_args = vars(self).get("_script_args")
        if script_args is None or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no setting or method {name!r}")
        return getattr(script_args, name)

    # --- ranks ------------------------------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        from fullshard.distributed import runtime

        return runtime.world_size()

    @property
    def process_index(self) -> int:
        """This rank."""
        from fullshard.distributed import runtime

        return runtime.rank()

    @property
    def local_process_index(self) -> int:
        """This rank's number on its node."""
        from fullshard.distributed import runtime

        return runtime.local_rank()

    @property
    def device(self) -> Any:
        """This rank's device."""
        import torch

        from fullshard.distributed import runtime

        return torch.device("cpu") if self._on_cpu and not runtime.is_spmd() else runtime.device()

    @property
    def n_gpu(self) -> int:
        """The number of GPUs of this process."""
        from fullshard.device import accelerator

        return int(accelerator.is_accelerator(self.device))

    _n_gpu = n_gpu

    @property
    def parallel_mode(self) -> Any:
        """transformers' name for one process per device, or for one process alone."""
        from transformers.training_args import ParallelMode

        alone = ParallelMode.NOT_PARALLEL
        return ParallelMode.DISTRIBUTED if self.world_size > 1 else alone

    @property
    def should_log(self) -> bool:
        """Whether this rank logs: the first one."""
        return self.process_index == 0

    should_save = should_log

    @contextlib.contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Inside, the first rank (of each node, if `local`) runs before the others."""
        from fullshard.distributed import runtime

        runtime.use_spmd(device="cpu" if self._on_cpu else None)
        first = (self.local_process_index if local else self.process_index) == 0
        try:
            if not first:
                runtime.barrier()
            yield
        finally:
            if first:
                runtime.barrier()

    @property
    def _on_cpu(self) -> bool:
        from fullshard.parallel.settings import EngineSettings

        settings: Any = self
        return bool(settings.use_cpu or EngineSettings.from_environment().use_cpu)

    # --- derived values ---------------------------------------------------------------------------------------------

    @property
    def train_batch_size(self) -> int:
        """Rows per rank in a training micro-batch."""
        settings: Any = self
        return settings.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        """Rows per rank in an evaluation batch."""
        settings: Any = self
        return settings.per_device_eval_batch_size

    @property
    def ddp_timeout_delta(self) -> timedelta:
        """`ddp_timeout` as a time span."""
        settings: Any = self
        return timedelta(seconds=settings.ddp_timeout)

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """The number of warmup steps in a run of this many steps."""
        settings: Any = self
        return settings.warmup(num_training_steps)

    def get_process_log_level(self) -> int:
        """The log level of this rank, as a number of Python's `logging`."""
        from transformers.utils import logging

        settings: Any = self
        name = settings.log_level if self.should_log else settings.log_level_replica
        return logging.get_verbosity() if name == "passive" else logging.log_levels[name]

    # --- the settings as JSON ---------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Every setting, as JSON takes it, without secrets."""
        fields = dataclasses.fields(self)
        values = {one.name: _plain(getattr(self, one.name)) for one in fields if one.init and one.name[0] != "_"}
        hidden: dict[str, Any] = hide_in(values)
        return hidden

    def to_json_string(self) -> str:
        """Every setting as JSON text, without secrets."""
        return json.dumps(self.to_dict(), indent=2)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """The same with text for everything that is neither a number nor true or false, for loggers."""
        values = {**self.to_dict(), "train_batch_size": self.train_batch_size, "eval_batch_size": self.eval_batch_size}
        return {name: value if type(value) in JSON_TYPES[:4] else str(value) for name, value in values.items()}


def _plain(value: Any) -> Any:
    """A value as JSON takes it."""
    if hasattr(value, "to_dict"):
        value = value.to_dict()
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(each) for each in value]
    return value if isinstance(value, JSON_TYPES) else str(value).removeprefix("torch.")
