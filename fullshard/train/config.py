"""The settings of a training run: the one source of flags, YAML keys, `--help`, validation and docs/options.md.

Names and defaults are those of PEFT's training script and of transformers' `TrainingArguments`, so their commands work
as they are. Nothing here imports torch: a wrong setting is found at once. How a model is sharded is in
`parallelize/settings.py`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from fullshard.errors import ConfigError
from fullshard.options import as_list, option, options_of, takes_other_names
from fullshard.train import lr_schedule
from fullshard.train.adapter_options import AdapterOptions

REPORT_TO = ("tensorboard", "wandb")
"""What `report_to` can name; each is called like the package it needs."""

Strategy = Literal["no", "steps", "epoch"]


def _named(default: Any, *others: str, **about: Any) -> Any:
    """An option that has other names as well, alike in files and flags."""
    return option(default, aliases=others, flags=others, **about)


@takes_other_names
@dataclass
class SFTConfig(AdapterOptions):
    """Settings of a fine-tuning run."""

    # --- the model ---
    model_name_or_path: str | None = option(None, given_as="a folder, or a name on the hub")
    """The model to start from."""
    tokenizer_name_or_path: str | None = option(None, given_as="a folder, or a name on the hub")
    """Its tokenizer, if that lies elsewhere."""
    torch_dtype: Literal["auto", "float32", "bfloat16", "float16"] = _named("auto", "dtype")
    """The dtype of the weights as they are read; auto keeps that of the files. What trains is stored in fp32 besides
    when bf16 or fp16 is on."""
    chat_template_format: Literal["none", "chatml", "zephyr", "llama3", "gemma", "mistral", "qwen", "phi"] = "none"
    """How conversations become text: by the tokenizer's own template (none), or by a built-in one."""
    chat_template_path: str | None = option(None, given_as="a Jinja file, or a folder with a tokenizer")
    """A chat template of your own; overrules `chat_template_format`."""
    use_flash_attn: bool = False
    """Use FlashAttention 2. Where it is not installed, or without a GPU, torch's own attention is used, with a note."""
    attn_implementation: str | None = option(None, given_as="sdpa, eager, flash_attention_2, …")
    """The attention implementation by transformers' name; overrules `use_flash_attn`."""
    rope_scaling: Literal["linear", "dynamic", "yarn"] | None = None
    """Scale rotary positions so that documents of `max_seq_len` tokens fit, where that is more than the model has."""
    use_unsloth: bool = False
    """Load the model through Unsloth. Refused: Unsloth does not shard."""

    # --- the data ---
    dataset_name: str | None = option(None, given_as="a file, a folder, or a name on the hub; several with commas")
    """The training data."""
    dataset_config_name: str | None = None
    """Which part of a data set on the hub, where it has several; of a folder, the folder in it."""
    dataset_weights: str | None = option(None, given_as="numbers, one per data set")
    """Shares of several data sets in the mix, by rows; without it they follow one another."""
    stopping_strategy: Literal["all_exhausted", "first_exhausted"] = "all_exhausted"
    """When a weighted mix has been gone through once: when each set has, smaller ones repeating, or when the first
    has."""
    dataset_columns: str | None = option(None, given_as="name=column,…")
    """Columns under other names, such as prompt=question,completion=answer."""
    prompt_format: str | None = option(None, given_as="text with {column} in it")
    """How a prompt is written from a row's columns; the answer is its `completion` or `output`."""
    dataset_settings: dict[str, Any] | None = option(None, given_as="a mapping, or JSON")  # noqa: RUF009 - a field
    """Settings that one of several data sets has for itself, by its name: how its rows are read and written out."""
    sample_by: Literal["line", "paragraph", "document"] = "line"
    """What a row of a .txt file is."""
    splits: str = "train,test"
    """Names of the training and the evaluation split: their files' names in the folder, or those on the hub."""
    val_size: float = 0.0
    """Hold back this many rows of the training data for evaluation, in place of an evaluation split; below 1 it is a
    part of them. Which rows follows from `seed`; when streaming it is the first ones."""
    dataset_text_field: str = "text"
    """The column with running text."""
    on_bad_row: Literal["stop", "skip"] = "stop"
    """What to do with a row that cannot be understood: stop and show it, or leave it out and count it."""
    streaming: bool = False
    """Read and tokenise the data while training instead of before: for sets larger than memory or disk. Rows come in
    the order of the files, shuffled over `shuffle_buffer_size` of them. Needs `max_steps`."""
    shuffle_buffer_size: int = 4096
    """Rows of the data that are tokenised, packed and shuffled together when streaming."""
    packing: bool = False
    """Let documents share rows, so that hardly anything is padding. They never see each other; that is tried first."""
    trust_packing: bool = False
    """Pack although it cannot be tried whether the model keeps documents apart, as with code of your own."""
    max_seq_len: int = _named(1024, "max_seq_length", "max_length")
    """The longest row, in tokens. What becomes of longer documents is said by `overflow`, and counted."""
    overflow: Literal["truncate", "split", "drop"] = "truncate"
    """What happens to documents longer than `max_seq_len`."""
    append_concat_token: bool | None = None
    """End each document with the end-of-text token. If not given, texts and prompts with completions end with it, and
    conversations as their template says."""
    add_special_tokens: bool = False
    """Let the tokenizer add its special tokens (such as the one that begins a text) to each document."""
    assistant_only_loss: bool = False
    """In conversations, learn only what the assistant says."""
    completion_only_loss: bool | None = None
    """Of rows with a prompt, learn only the completion; on if not given."""
    last_turn_only_loss: bool = _named(False, "mask_history")
    """In conversations, learn only the assistant's last turn."""
    preview: bool = False
    """Show a few rows as the model will see them, and the numbers of the data, and stop."""
    preview_rows: int = 3
    """How many rows to show."""
    train_sampling_strategy: Literal["random", "sequential"] = "random"
    """The order of rows: shuffled anew each epoch, or as they stand."""
    data_seed: int | None = None
    """Seed of the order of rows; `seed` if not given."""
    dataloader_drop_last: bool = False
    """Leave out an epoch's last batch if it is not full."""
    dataloader_num_workers: int = 0
    """Processes that tokenise, and threads that prepare coming batches."""
    dataloader_pin_memory: bool = True
    """Hand batches to a GPU through pinned memory."""
    cache_dir: str | None = option(None, given_as="a folder")
    """Where tokenised data is kept; `FULLSHARD_CACHE` or the user's cache folder if not given."""

    # --- where things go ---
    output_dir: str = option("trainer_output", given_as="a folder")
    """Where the run writes: checkpoints, metrics, and at the end the model."""
    overwrite: bool = _named(False, "overwrite_output_dir")
    """Start anew in an `output_dir` that holds an earlier run; what that run wrote is removed once everything is
    loaded, other files stay. A folder with something that the run reads is refused."""
    resume: bool = False
    """Go on from the newest checkpoint in `output_dir`."""
    resume_from_checkpoint: str | None = option(None, given_as="true, or a checkpoint's folder")
    """Go on from this checkpoint; true means the newest in `output_dir`."""

    # --- training ---
    seed: int = 42
    """Seed of new weights, dropout and the order of rows."""
    num_train_epochs: float = 3.0
    """How often the data is gone through."""
    max_steps: int = -1
    """Optimizer steps to take; above 0 it overrules the epochs."""
    per_device_train_batch_size: int = 8
    """Rows per rank in one forward pass."""
    per_device_eval_batch_size: int = 8
    """The same in evaluation."""
    gradient_accumulation_steps: int = 1
    """Forward passes per optimizer step. The loss is the mean over all learnt tokens of all of them, on all ranks."""
    sync_each_batch: bool = True
    """Reduce gradients after each of these passes (least memory) or once per step (least communication)."""
    learning_rate: float = 5e-5
    """The highest learning rate."""
    lr_scheduler_type: lr_schedule.Kind = "linear"
    """How the learning rate goes on from there."""
    lr_scheduler_kwargs: dict[str, Any] | None = option(None, given_as="name=value,…, or JSON")  # noqa: RUF009 - a field
    """Settings of the schedule by transformers' names, such as min_lr_rate=0.1 or num_decay_steps=100."""
    warmup_ratio: float = 0.0
    """The part of all steps over which the learning rate rises from 0."""
    warmup_steps: float = 0
    """The same in steps; overrules `warmup_ratio`. Below 1 it is a part of all steps."""
    optim: Literal["adamw_torch", "adamw_torch_fused", "sgd"] = "adamw_torch_fused"
    """The optimizer. Fused falls back to the plain one where torch has no fused kernel."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices; vectors (biases, norms) never decay."""
    adam_beta1: float = 0.9
    """AdamW's first decay rate."""
    adam_beta2: float = 0.999
    """AdamW's second decay rate."""
    adam_epsilon: float = 1e-8
    """AdamW's epsilon."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm; 0 leaves them alone."""
    bf16: bool = False
    """Compute in bf16, update in fp32."""
    fp16: bool = False
    """Compute in fp16 with a loss scale, update in fp32."""
    gradient_checkpointing: bool = False
    """Compute activations again in backward instead of keeping them."""
    use_reentrant: bool = False
    """Use the re-entrant kind of gradient checkpointing."""
    chunked_loss: bool = True
    """Compute the output head and the loss piece by piece, so that the logits never exist as a whole. The numbers are
    the same."""
    loss_chunk_tokens: int = 0
    """Tokens per piece; 0 chooses pieces of about 64 MiB."""
    torch_compile: bool = False
    """Compile each layer with torch.compile."""
    on_nonfinite_loss: Literal["stop", "skip"] = "stop"
    """What to do when a loss is NaN or infinite: stop before the weights are touched, naming the rows, or leave the
    step out."""
    fsdp: str | None = option(None, given_as="full_shard auto_wrap offload, …")
    """How the model is sharded, in transformers' words; over what the launcher said."""
    fsdp_config: str | dict[str, Any] | None = option(None, given_as="a file")  # noqa: RUF009 - a field
    """The same as a file of `fsdp_*` keys."""
    ddp_timeout: float = 1800
    """Seconds that a rank may be late before the run is given up."""

    # --- evaluation, saving ---
    eval_strategy: Strategy = _named("no", "evaluation_strategy")  # noqa: RUF009 - a field
    """When to evaluate."""
    eval_steps: int | None = None
    """Steps between evaluations; `logging_steps` if not given."""
    eval_on_start: bool = False
    """Evaluate before the first step as well."""
    eval_samples: int = 0
    """At each evaluation, answer this many prompts of the evaluation data and show them: what stands before the last
    part that is learnt."""
    sample_prompts: str | None = option(None, given_as="a file: a prompt per line, or JSON lines with messages")
    """Answer these prompts at each evaluation instead of those of the evaluation data."""
    sample_max_new_tokens: int = 64
    """The longest answer, in tokens."""
    save_strategy: Strategy = "steps"
    """When to save a checkpoint. The last step is always saved unless this is no."""
    save_steps: int = 500
    """Steps between checkpoints."""
    save_total_limit: int | None = None
    """How many checkpoints to keep. The best and the newest always stay."""
    save_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The dtype of the model written at the end; auto is the one its weights were read in."""
    async_save: bool = False
    """Write checkpoints in the background; training waits only for the copy to host memory."""
    load_best_model_at_end: bool = False
    """End with the weights of the best evaluation rather than the last."""
    metric_for_best_model: str | None = option(None, given_as="eval_loss, eval_mean_token_accuracy, …")
    """What best means; eval_loss if not given."""
    greater_is_better: bool | None = None
    """Whether a higher value is better; for losses not, otherwise yes, if not given."""
    early_stopping_patience: int | None = None
    """Stop after this many evaluations in a row without improvement."""
    early_stopping_threshold: float = 0.0
    """What counts as an improvement."""

    # --- what is shown ---
    logging_strategy: Strategy = "steps"
    """When to log."""
    logging_steps: int = 10
    """Steps between log lines."""
    logging_first_step: bool = False
    """Log the first step too."""
    log_level: Literal["passive", "debug", "info", "warning", "error", "critical"] = "passive"
    """How much the libraries say; passive leaves it as it is."""
    progress: Literal["auto", "live", "plain", "json", "quiet"] = "auto"
    """A live display, plain lines, JSON lines, or errors only; auto is live on a terminal and plain elsewhere."""
    report_to: str = option("auto", given_as="auto, tensorboard, wandb, all, none")
    """Where metrics go besides metrics.jsonl. auto is TensorBoard if it is installed, all each that is; one that is
    named must be installed."""
    run_name: str | None = None
    """A name for the run in its report."""
    push_to_hub: bool = False
    """Upload the result, when `hub_strategy` says. If that fails the result stays where it is, and the run counts as
    done."""
    hub_model_id: str | None = option(None, given_as="name or owner/name")
    """The repository to upload to; named after `output_dir` if not given."""
    hub_private_repo: bool | None = None
    """Whether a new repository is private."""
    hub_strategy: Literal["end", "every_save", "checkpoint", "all_checkpoints"] = "every_save"
    """What `push_to_hub` uploads: the result at the end; the model after every save as well, in the background; and
    the newest checkpoint besides, as last-checkpoint; or every checkpoint, which stays until it is uploaded."""

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_route()
        self._check_plan()
        self.check_adapter()
        self.schedule_settings()

    # --- checks -----------------------------------------------------------------------------------------------------

    def _check_numbers(self) -> None:
        at_least_one = ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps",
                        "save_steps", "logging_steps", "lora_r", "lora_alpha", "max_seq_len", "eval_steps",
                        "save_total_limit", "early_stopping_patience", "shuffle_buffer_size", "preview_rows",
                        "sample_max_new_tokens")  # fmt: skip
        not_negative = ("learning_rate", "weight_decay", "max_grad_norm", "warmup_steps", "seed", "data_seed",
                        "dataloader_num_workers", "loss_chunk_tokens", "adam_epsilon",
                        "early_stopping_threshold", "val_size", "eval_samples")  # fmt: skip
        for names, least in ((at_least_one, 1), (not_negative, 0)):
            for name in names:
                value = getattr(self, name)
                if value is not None and not (value >= least and math.isfinite(value)):
                    raise ConfigError(f"{name} is {value}; expected {least} or more.")
        for name in ("warmup_ratio", "lora_dropout", "adam_beta1", "adam_beta2"):
            value = getattr(self, name)
            if not 0 <= value <= 1 or (value == 1 and name != "warmup_ratio"):
                raise ConfigError(f"{name} is {value}; expected a number from 0 to 1.")
        for name in ("num_train_epochs", "ddp_timeout"):
            if not getattr(self, name) > 0 or not math.isfinite(getattr(self, name)):
                raise ConfigError(f"{name} is {getattr(self, name)}; expected more than 0.")
        if self.max_steps == 0 or self.max_steps < -1:
            raise ConfigError(f"max_steps is {self.max_steps}; expected 1 or more, or -1 for num_train_epochs.")
        if self.val_size >= 1 and self.val_size != int(self.val_size):
            raise ConfigError(f"val_size is {self.val_size:g}; expected a whole number of rows, or a part below 1.")
        if self.streaming and 0 < self.val_size < 1:
            raise ConfigError(
                f"val_size is {self.val_size:g}: the part of a stream is not known beforehand; give a number of rows, "
                f"which are then the first."
            )
        if self.max_seq_len < 2:
            raise ConfigError(f"max_seq_len is {self.max_seq_len}; a row needs at least 2 tokens to predict one.")

    def _check_route(self) -> None:
        if self.use_unsloth:
            raise ConfigError("use_unsloth is on, but Unsloth's models cannot be sharded; leave it out.")
        if self.packing and self.rope_scaling == "dynamic":
            raise ConfigError(
                "rope_scaling dynamic follows the longest document of a batch, so packed documents would change each "
                "other; use linear or yarn, or leave packing out."
            )
        if self.bf16 and self.fp16:
            raise ConfigError("bf16 and fp16 are both on; choose one.")
        if (self.resume or self.resumes_newest) and self.overwrite:
            raise ConfigError("resume and overwrite are both on; choose one.")
        unknown = [name for name in as_list(self.report_to) if name not in (*REPORT_TO, "auto", "all", "none")]
        if unknown:
            raise ConfigError(f"report_to names {', '.join(unknown)}; expected auto, tensorboard, wandb, all or none.")

    def _check_plan(self) -> None:
        if self.streaming and self.max_steps < 0:
            raise ConfigError(
                "streaming needs max_steps: how long the data is cannot be known before it has been read."
            )
        for name in ("eval_samples", "sample_prompts"):
            if getattr(self, name) and self.eval_strategy == "no":
                raise ConfigError(f"{name}: samples are made at evaluations, but eval_strategy is no; set it.")
        if self.load_best_model_at_end or self.early_stopping_patience is not None:
            name = "load_best_model_at_end" if self.load_best_model_at_end else "early_stopping_patience"
            if self.eval_strategy == "no":
                raise ConfigError(f"{name} needs evaluations, but eval_strategy is no; set it to steps or epoch.")
        if self.load_best_model_at_end and self.save_strategy != self.eval_strategy:
            raise ConfigError(
                f"load_best_model_at_end needs a checkpoint at each evaluation: eval_strategy is {self.eval_strategy}, "
                f"save_strategy {self.save_strategy}; make them the same."
            )
        if self.load_best_model_at_end and self.eval_strategy == "steps" and self.save_steps % self.evaluates_every:
            raise ConfigError(
                f"load_best_model_at_end needs save_steps to be a multiple of eval_steps; they are {self.save_steps} "
                f"and {self.evaluates_every}."
            )

    # --- what the settings come to ----------------------------------------------------------------------------------

    @property
    def resumes_newest(self) -> bool:
        """Whether `resume_from_checkpoint` asks for the newest checkpoint rather than for one by name."""
        return (self.resume_from_checkpoint or "").strip().lower() in ("true", "yes")

    @property
    def evaluates_every(self) -> int:
        return self.eval_steps or self.logging_steps

    @property
    def best_metric(self) -> str:
        """The metric that says which evaluation is best, with its prefix."""
        name = self.metric_for_best_model or "loss"
        return name if name.startswith("eval_") else f"eval_{name}"

    @property
    def higher_is_better(self) -> bool:
        return "loss" not in self.best_metric if self.greater_is_better is None else self.greater_is_better

    @property
    def precision(self) -> str | None:
        """bf16 or fp16 where asked for; None leaves it to the launcher's settings."""
        return "bf16" if self.bf16 else "fp16" if self.fp16 else None

    def warmup(self, steps: int) -> int:
        """Warm-up steps in a run of so many."""
        if self.warmup_steps:
            return math.ceil(self.warmup_steps * steps) if self.warmup_steps < 1 else int(self.warmup_steps)
        return math.ceil(steps * self.warmup_ratio)

    def schedule_settings(self) -> dict[str, Any]:
        """What the schedule is told, complete."""
        return lr_schedule.check(self.lr_scheduler_type, self.lr_scheduler_kwargs or {}, self.learning_rate)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_checked(cls, values: dict[str, Any]) -> SFTConfig:
        """The settings that `to_dict` gave, in a process that receives them: they are not checked again."""
        made = cls.__new__(cls)
        vars(made).update(values)
        return made

    def changed(self) -> dict[str, Any]:
        """The settings that are not at their default."""
        return {o.name: getattr(self, o.name) for o in options_of(SFTConfig) if getattr(self, o.name) != o.default}


# Changing these in a resumed run does not change what is trained.
HARMLESS = frozenset({
    "output_dir", "overwrite", "resume", "resume_from_checkpoint", "save_strategy", "save_steps", "save_total_limit",
    "logging_strategy", "logging_steps", "logging_first_step", "log_level", "progress", "report_to", "run_name",
    "push_to_hub", "hub_model_id", "hub_private_repo", "hub_strategy", "eval_on_start", "per_device_eval_batch_size",
    "preview", "preview_rows", "eval_samples", "sample_prompts", "sample_max_new_tokens",
    "cache_dir", "ddp_timeout", "dataloader_num_workers", "dataloader_pin_memory", "save_dtype", "async_save",
})  # fmt: skip
