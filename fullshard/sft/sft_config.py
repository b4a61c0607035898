"""The settings of a training run: the one source of flags, YAML keys, `--help`, validation and docs/options.md.

Names are those of PEFT's training script, of transformers' `TrainingArguments` and of TRL's `SFTConfig`. Defaults are
TRL's, so that a script means the same when its imports change; `fullshard sft` has some of PEFT's script instead
(`sft/cli_args.py`). Nothing here imports torch: a wrong setting is reported at once. How a model is sharded is in
`parallel/settings.py`.
"""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass
from typing import Any, Literal, Self

from fullshard.config import redaction
from fullshard.config.errors import ConfigError
from fullshard.config.options import TakesOtherNames, as_list, convert, for_scripts, nearest, option, options_of
from fullshard.optim import lr_schedule
from fullshard.optim import names as optimizer_names
from fullshard.report.loggers import LOGGER_PACKAGES
from fullshard.sft.adapter_options import AdapterOptions
from fullshard.sft.data_options import DataOptions
from fullshard.sft.training_arguments import ActivationOptions, ArgumentMethods, TrainerOptions
from fullshard.sft.unused_options import PEER_NAMES, UnusedOptions

Strategy = Literal["no", "steps", "epoch"]
PERIODS = ("logging_steps", "eval_steps", "save_steps")
"""Settings that are a number of steps, or below 1 a fraction of all steps."""
LOG_LINES, MOST_BETWEEN_LOGS = 20, 10
"""Where the length of a run decides: the log lines of a short one, and the most steps between two."""


def _named(default: Any, *others: str, **about: Any) -> Any:
    """An option with other names, in files and as flags."""
    return option(default, aliases=others, flags=others, **about)


@for_scripts(PEER_NAMES)
@dataclass
class SFTConfig(
    TrainerOptions, ActivationOptions, AdapterOptions, DataOptions, UnusedOptions, ArgumentMethods,
    metaclass=TakesOtherNames,
):  # fmt: skip
    """Settings of a fine-tuning run."""

    # --- the model ---
    model_name_or_path: str | None = option(
        None, metavar="a folder, or a name on the hub", elsewhere=("model", "model_name", "base_model")
    )
    """The model to start from."""
    tokenizer_name_or_path: str | None = option(
        None, metavar="a folder, or a name on the hub", elsewhere=("tokenizer", "tokenizer_name")
    )
    """The tokenizer, if it is not in the model's folder."""
    torch_dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = _named(None, "dtype")
    """The dtype in which weights are loaded; auto keeps that of the files. With bf16 or fp16, trainable parameters are
    also kept in fp32. If not set: that of the files with bf16 or fp16, else float32."""
    chat_template_format: Literal["none", "chatml", "zephyr", "llama3", "gemma", "mistral", "qwen", "phi"] = option(
        "none", elsewhere=("template", "chat_template")
    )
    """The chat template: the tokenizer's own (none), or a built-in one."""
    chat_template_path: str | None = option(None, metavar="a Jinja file, or a folder with a tokenizer")
    """A custom chat template; overrides `chat_template_format`."""
    use_flash_attn: bool = option(False, elsewhere=("flash_attn", "flash_attention", "use_flash_attention"))
    """Use FlashAttention 2. If it is not installed, or without a GPU, PyTorch's attention is used, with a note."""
    attn_implementation: str | None = option(None, metavar="fullshard, sdpa, eager, flash_attention_2, …")
    """The attention implementation, by transformers' name; overrides `use_flash_attn`. If not set: on GPUs fullshard,
    the fastest kernel that is right for each batch (docs/speed.md); else transformers' choice."""
    rope_scaling: Literal["linear", "dynamic", "yarn"] | None = None
    """Scale rotary position embeddings so that documents of `max_length` tokens fit, if that is longer than the
    model's context."""
    use_unsloth: bool = False
    """Load the model through Unsloth. Refused if true: Unsloth does not shard."""

    # --- where things go ---
    output_dir: str = option("trainer_output", metavar="a folder", elsewhere=("output", "out", "out_dir", "save_dir"))
    """The folder for checkpoints, metrics and the final model."""
    overwrite: bool = _named(False, "overwrite_output_dir")
    """Replace an earlier run in `output_dir`. Its files are removed once everything is loaded; other files stay. A
    folder that the run also reads from is refused."""
    resume: bool = False
    """Resume from the newest checkpoint in `output_dir`."""
    resume_from_checkpoint: str | None = option(
        None, metavar="true, or a checkpoint's folder", elsewhere=("resume_from",)
    )
    """Resume from this checkpoint; true means the newest in `output_dir`."""

    # --- training ---
    seed: int = 42
    """The seed for new weights, dropout and the order of rows."""
    num_train_epochs: float = option(3.0, elsewhere=("epochs", "num_epochs"))
    """The number of epochs."""
    max_steps: int = option(-1, elsewhere=("steps", "num_steps", "max_train_steps"))
    """The number of optimizer steps; if positive, it overrides `num_train_epochs`."""
    per_device_train_batch_size: int = option(
        8, elsewhere=("batch_size", "micro_batch_size", "train_batch_size", "per_gpu_train_batch_size")
    )
    """The micro-batch size: rows per rank in one forward pass."""
    per_device_eval_batch_size: int = option(8, elsewhere=("eval_batch_size", "per_gpu_eval_batch_size"))
    """The same for evaluation."""
    gradient_accumulation_steps: int = option(
        1, elsewhere=("gradient_accumulation", "grad_accum", "accumulate_grad_batches", "grad_accumulation_steps")
    )
    """Micro-batches per optimizer step. The loss is the mean over the trained tokens of all of them, on all ranks."""
    sync_each_batch: bool = True
    """Reduce gradients after each micro-batch (least memory) or once per step (least communication)."""
    learning_rate: float = option(2e-5, elsewhere=("lr",))
    """The peak learning rate."""
    lr_scheduler_type: lr_schedule.Kind = option(  # noqa: RUF009 - a field
        "linear", elsewhere=("lr_scheduler", "scheduler", "lr_schedule")
    )
    """The learning-rate schedule."""
    lr_scheduler_kwargs: dict[str, Any] | str | None = option(  # noqa: RUF009 - a field
        None, kind=dict, metavar="name=value,…, or JSON"
    )
    """Options of the schedule, by transformers' names, such as min_lr_rate=0.1 or num_decay_steps=100."""
    warmup_ratio: float = 0.0
    """The fraction of all steps used for warmup, in which the learning rate rises from 0."""
    warmup_steps: float = option(0, elsewhere=("warmup", "num_warmup_steps"))
    """The number of warmup steps; overrides `warmup_ratio`. Below 1 it is a fraction of all steps."""
    optim: str = option("adamw_torch_fused", metavar=", ".join(optimizer_names.SERVED), elsewhere=("optimizer",))
    """The optimizer, by transformers' name. adamw_torch_fused uses plain AdamW where torch has no fused kernel."""
    optim_args: dict[str, Any] | str | None = option(  # noqa: RUF009 - a field
        None, kind=dict, metavar="name=value,…, or JSON"
    )
    """Arguments of the optimizer beside those below, such as momentum=0.9 for sgd."""
    optim_target_modules: str | None = None
    """Layers for GaLore and APOLLO. Refused if set: these optimizers are not supported."""
    weight_decay: float = 0.0
    """Weight decay of matrices; vectors (biases, norms) have none."""
    adam_beta1: float = 0.9
    """Beta1 of AdamW and Lion."""
    adam_beta2: float = 0.999
    """Beta2 of AdamW and Lion."""
    adam_epsilon: float = 1e-8
    """AdamW's epsilon."""
    max_grad_norm: float = option(1.0, elsewhere=("max_norm", "clip_grad", "gradient_clipping", "gradient_clip_val"))
    """Clip gradients to this norm; 0 turns clipping off."""
    bf16: bool | None = None
    """Mixed precision: compute in bf16, update in fp32. If not set: on GPUs that compute in bf16, unless the launcher's
    settings name another precision."""
    fp16: bool = False
    """Mixed precision: compute in fp16 with loss scaling, update in fp32."""
    chunked_loss: bool = True
    """Compute output head and loss in chunks, so that the full logits are never in memory. The loss is the same."""
    router_aux_loss_coef: float | None = None
    """The coefficient of the routers' auxiliary loss in a mixture of experts; the model's own if not set, 0 leaves the
    auxiliary loss out."""
    loss_chunk_tokens: int = 0
    """Tokens per chunk; 0 chooses: on GPUs an eighth of the tokens, at least 256, in at most 256 MiB of logits (more
    if the head trains)."""
    log_entropy: bool = False
    """Log the mean entropy of the predictions too, as TRL does: `entropy` and `eval_entropy`."""
    torch_compile: bool | None = None
    """Compile each layer with torch.compile. If not set: on GPUs, for runs that are long enough to pay for it."""
    on_nonfinite_loss: Literal["stop", "skip"] = "stop"
    """What to do on a NaN or infinite loss: stop before the update and name the rows, or skip the step."""
    fsdp: str | None = option(None, metavar="full_shard auto_wrap offload, …")
    """Sharding options in transformers' format; override the launcher's."""
    fsdp_config: dict[str, Any] | str | None = option(None, kind=object, metavar="a file")  # noqa: RUF009 - a field
    """A file with `fsdp_*` keys; overrides the launcher's."""
    ddp_timeout: float = 1800
    """Seconds that the other ranks wait for a rank before the run fails."""

    # --- evaluation, saving ---
    eval_strategy: Strategy = _named("no", "evaluation_strategy")  # noqa: RUF009 - a field
    """When to evaluate."""
    eval_steps: float | None = option(None, elsewhere=("eval_every",))
    """Steps between evaluations; `logging_steps` if not set, or 10. Below 1 it is a fraction of all steps."""
    eval_on_start: bool = False
    """Evaluate before the first step too."""
    eval_samples: int = 0
    """At each evaluation, generate answers to this many prompts of the evaluation data and show them. A prompt is the
    text before the last trained part of a document."""
    sample_prompts: str | None = option(None, metavar="a file: a prompt per line, or JSON lines with messages")
    """Generate answers to these prompts at each evaluation, instead of prompts of the evaluation data."""
    sample_max_new_tokens: int = 64
    """The maximum number of tokens in an answer."""
    save_strategy: Literal["no", "steps", "epoch", "best"] = "steps"
    """When to save a checkpoint; best: after each evaluation that is the best so far. The last step is always saved
    unless this is no or best."""
    save_steps: float = option(500, elsewhere=("save_every",))
    """Steps between checkpoints. Below 1 it is a fraction of all steps."""
    save_total_limit: int | None = None
    """The number of checkpoints to keep. The best and the newest are always kept."""
    save_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The dtype of the final model; auto is the dtype its weights were loaded in."""
    async_save: bool = False
    """Write checkpoints in the background; training waits only for a copy to host memory."""
    load_best_model_at_end: bool = False
    """Finish with the weights of the best evaluation instead of the last step."""
    metric_for_best_model: str | None = option(None, metavar="eval_loss, eval_mean_token_accuracy, …")
    """The metric that decides the best evaluation; eval_loss if not set."""
    greater_is_better: bool | None = None
    """Whether a higher value of that metric is better. If not set: false for losses, else true."""
    early_stopping_patience: int | None = None
    """Stop after this many evaluations in a row without improvement."""
    early_stopping_threshold: float = 0.0
    """The smallest change that counts as an improvement."""

    # --- what is shown ---
    logging_strategy: Strategy = "steps"
    """When to log."""
    logging_steps: float | None = option(10, elsewhere=("log_every", "log_steps"))
    """Steps between log lines. Below 1 it is a fraction of all steps. If not set: a twentieth of them, from 1 to 10."""
    logging_first_step: bool = False
    """Log the first step too."""
    log_level: Literal["passive", "debug", "info", "warning", "error", "critical"] = "passive"
    """The log level of fullshard and transformers; passive leaves it unchanged."""
    progress: Literal["auto", "live", "plain", "json", "quiet"] = "auto"
    """Output on the terminal: a live display, plain lines, JSON lines, or errors only. auto is live on a terminal, else
    plain."""
    report_to: str = option(
        "none",
        metavar="none, auto, all, or tensorboard, wandb, mlflow, trackio, …",
        elsewhere=("wandb", "use_wandb", "logger"),
    )
    """Where to log metrics besides metrics.jsonl: TensorBoard, Weights & Biases, and every logger that transformers
    supports. auto is TensorBoard if it is installed, all every logger that is installed; a logger that is named must be
    installed."""
    run_name: str | None = option(None, elsewhere=("wandb_name",))
    """The name of the run in its report and in loggers."""
    push_to_hub: bool = False
    """Upload the result to the hub, as `hub_strategy` asks. If an upload fails, the result stays in `output_dir` and
    the run succeeds."""
    hub_model_id: str | None = option(None, metavar="name or owner/name")
    """The repository to upload to; named after `output_dir` if not set."""
    hub_private_repo: bool | None = None
    """Whether a new repository is private."""
    hub_strategy: Literal["end", "every_save", "checkpoint", "all_checkpoints"] = "every_save"
    """What to upload: the result at the end; also the model after every save, in the background; also the newest
    checkpoint, as last-checkpoint; or every checkpoint, which is kept until it is uploaded."""

    def __post_init__(self) -> None:
        self._convert()
        self.flatten_nested()
        self.flatten_checkpointing()
        self.check_unused()
        self._check_numbers()
        self.check_data()
        self._check_conflicts()
        self._check_evaluation()
        self.check_adapter()
        self.schedule_settings()
        self.optimizer_arguments()

    # --- checks -----------------------------------------------------------------------------------------------------

    def _convert(self) -> None:
        """Give every value its option's type, as in files: scripts and `HfArgumentParser` pass text and enums too."""
        self.report_to = _names(self.report_to)
        self.pad_to_multiple_of = None if str(self.pad_to_multiple_of) == "auto" else self.pad_to_multiple_of
        modules: Any = self.optim_target_modules
        self.optim_target_modules = ",".join(modules) if isinstance(modules, list | tuple) else modules
        self.fsdp = _flags(self.fsdp)
        for one in options_of(SFTConfig):
            setattr(self, one.name, convert(one, getattr(self, one.name), one.name))
        redaction.learn(self.values())
        for name in PERIODS:
            value = getattr(self, name)
            if value is not None and value >= 1:
                if value != int(value):
                    raise ConfigError(f"{name} is {value:g}; expected a whole number, or a fraction of all steps.")
                setattr(self, name, int(value))
        if self.local_rank < 0 and (text := os.environ.get("LOCAL_RANK", "")).isdecimal():
            self.local_rank = int(text[:9])  # the runtime refuses a wrong one
        if self.disable_tqdm and self.progress == "auto":
            self.progress = "plain"

    def _check_numbers(self) -> None:
        at_least_one = ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps",
                        "lora_r", "lora_alpha", "max_length", "torch_empty_cache_steps", "save_total_limit",
                        "early_stopping_patience", "shuffle_buffer_size", "preview_rows",
                        "sample_max_new_tokens", "dataset_num_proc")  # fmt: skip
        not_negative = ("learning_rate", "weight_decay", "max_grad_norm", "warmup_steps", "seed", "data_seed",
                        "dataloader_num_workers", "loss_chunk_tokens", "adam_epsilon",
                        "early_stopping_threshold", "val_size", "eval_samples", "eval_delay")  # fmt: skip
        for names, least in ((at_least_one, 1), (not_negative, 0)):
            for name in names:
                value = getattr(self, name)
                if value is not None and not (value >= least and math.isfinite(value)):
                    raise ConfigError(f"{name} is {value}; expected {least} or more.")
        for name in PERIODS:
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{name} is {value:g}; expected 1 or more, or a fraction of all steps.")
        for name in ("warmup_ratio", "lora_dropout", "adam_beta1", "adam_beta2", "label_smoothing_factor"):
            value = getattr(self, name)
            if value is not None and (not 0 <= value <= 1 or (value == 1 and name != "warmup_ratio")):
                raise ConfigError(f"{name} is {value}; expected a number from 0 to 1.")
        for name in ("num_train_epochs", "ddp_timeout"):
            if not getattr(self, name) > 0 or not math.isfinite(getattr(self, name)):
                raise ConfigError(f"{name} is {getattr(self, name)}; expected more than 0.")
        if self.max_steps == 0 or self.max_steps < -1:
            raise ConfigError(f"max_steps is {self.max_steps}; expected 1 or more, or -1 for num_train_epochs.")

    def _check_conflicts(self) -> None:
        if self.use_unsloth:
            raise ConfigError("use_unsloth is on, but Unsloth's models cannot be sharded; leave it out.")
        if self.rope_scaling is not None and self.max_length is None:
            raise ConfigError(
                f"rope_scaling is {self.rope_scaling}, but max_length is none; give the length that must fit."
            )
        if self.keeps_apart and self.rope_scaling == "dynamic":
            raise ConfigError(
                "rope_scaling dynamic depends on the longest document of a batch, so packed documents would influence "
                "each other; use linear or yarn, or leave packing out."
            )
        if self.optim == "muon" and self.loraplus_lr_ratio is not None:
            raise ConfigError("loraplus_lr_ratio sets learning rates of AdamW; leave it out with optim muon.")
        if self.bf16 and self.fp16:
            raise ConfigError("bf16 and fp16 are both on; choose one.")
        if (self.resume or self.resumes_newest) and self.overwrite:
            raise ConfigError("resume and overwrite are both on; choose one.")
        unknown = [name for name in as_list(self.report_to) if name not in (*LOGGER_PACKAGES, "auto", "all", "none")]
        if unknown:
            hint = nearest(unknown[0], LOGGER_PACKAGES) or f"; expected auto, all, none, {', '.join(LOGGER_PACKAGES)}"
            raise ConfigError(f"report_to names {', '.join(unknown)}{hint}.")
        if self.loss_type == "dft" and self.label_smoothing_factor:
            raise ConfigError("label_smoothing_factor is for loss_type nll, and loss_type is dft; choose one.")

    def _check_evaluation(self) -> None:
        if self.streaming and self.max_steps < 0:
            raise ConfigError("streaming needs max_steps: the length of the data is unknown until it has been read.")
        for name in ("eval_samples", "sample_prompts"):
            if getattr(self, name) and self.eval_strategy == "no":
                raise ConfigError(f"{name}: samples are generated at evaluations, but eval_strategy is no; set it.")
        if self.load_best_model_at_end or self.early_stopping_patience is not None:
            name = "load_best_model_at_end" if self.load_best_model_at_end else "early_stopping_patience"
            if self.eval_strategy == "no":
                raise ConfigError(f"{name} needs evaluations, but eval_strategy is no; set it to steps or epoch.")
        if self.save_strategy == "best" and self.eval_strategy == "no":
            raise ConfigError("save_strategy is best, which needs evaluations, but eval_strategy is no; set it.")
        if self.load_best_model_at_end and self.save_strategy not in (self.eval_strategy, "best"):
            raise ConfigError(
                f"load_best_model_at_end needs a checkpoint at each evaluation: eval_strategy is {self.eval_strategy}, "
                f"save_strategy {self.save_strategy}; make them the same."
            )
        steps = self.save_strategy == "steps" and self.save_steps >= 1 <= self.evaluates_every
        if self.load_best_model_at_end and steps and self.save_steps % self.evaluates_every:
            raise ConfigError(
                f"load_best_model_at_end needs save_steps to be a multiple of eval_steps; they are {self.save_steps} "
                f"and {self.evaluates_every}."
            )

    # --- derived settings ------------------------------------------------------------------------------------------

    @property
    def resumes_newest(self) -> bool:
        """Whether `resume_from_checkpoint` asks for the newest checkpoint instead of naming one."""
        return (self.resume_from_checkpoint or "").strip().lower() in ("true", "yes")

    @property
    def evaluates_every(self) -> float:
        """Steps between evaluations."""
        return self.eval_steps or self.logging_steps or MOST_BETWEEN_LOGS

    @property
    def best_metric(self) -> str:
        """The metric that decides the best evaluation, with its prefix."""
        name = self.metric_for_best_model or "loss"
        return name if name.startswith("eval_") else f"eval_{name}"

    @property
    def measures_entropy(self) -> bool:
        """Whether the entropy is computed: for the log, or because it decides the best evaluation."""
        return self.log_entropy or self.best_metric.endswith("entropy")

    @property
    def higher_is_better(self) -> bool:
        """Whether a higher value of `best_metric` is better."""
        return "loss" not in self.best_metric if self.greater_is_better is None else self.greater_is_better

    @property
    def precision(self) -> str | None:
        """bf16 or fp16 if set; None leaves it to the launcher's settings."""
        return "bf16" if self.bf16 else "fp16" if self.fp16 else None

    def logs_every(self, steps: int) -> int:
        """Steps between log lines in a run of this many steps, where `logging_steps` leaves it open."""
        return max(1, min(MOST_BETWEEN_LOGS, steps // LOG_LINES))

    def warmup(self, steps: int) -> int:
        """The number of warmup steps in a run of this many steps."""
        if self.warmup_steps:
            return math.ceil(self.warmup_steps * steps) if self.warmup_steps < 1 else int(self.warmup_steps)
        return math.ceil(steps * self.warmup_ratio)

    def schedule_settings(self) -> dict[str, Any]:
        """The options of the learning-rate schedule, with defaults filled in."""
        return lr_schedule.check_schedule(self.lr_scheduler_type, self.lr_scheduler_kwargs or {}, self.learning_rate)  # type: ignore[arg-type]

    def optimizer_arguments(self) -> dict[str, Any]:
        """The arguments of the optimizer in `optim_args`, converted; an error if the optimizer is not supported."""
        return optimizer_names.check_arguments(self.optim, self.optim_args or {}, self.optim_target_modules)  # type: ignore[arg-type]

    @classmethod
    def from_checked(cls, values: dict[str, Any]) -> Self:
        """The settings that `values` gave, in a process that receives them: they are not checked again."""
        redaction.learn(values)
        config = cls.__new__(cls)
        vars(config).update(values)
        return config

    def values(self) -> dict[str, Any]:
        """Every setting, by its field."""
        names = [field.name for field in dataclasses.fields(self) if not field.name.startswith("_")]
        return {name: getattr(self, name) for name in names}

    def changed(self) -> dict[str, Any]:
        """The settings that are not at their default, as they may be written."""
        shown = self.to_dict()
        return {o.name: shown[o.name] for o in options_of(type(self)) if getattr(self, o.name) != o.default}


def _names(names: Any) -> str:
    """`report_to` as text: transformers has a list, which is empty for none."""
    if names is None or (isinstance(names, list | tuple) and not names):
        return "none"
    return ",".join(map(str, names)) if isinstance(names, list | tuple) else str(names)


def _flags(flags: Any) -> str | None:
    """`fsdp` as text: transformers also has lists, and true where everything is in `fsdp_config`."""
    if isinstance(flags, list | tuple):
        flags = " ".join(str(getattr(one, "value", one)) for one in flags)
    return flags if isinstance(flags, str) and flags else None
