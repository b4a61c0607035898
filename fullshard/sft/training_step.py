"""What one training step consists of, under transformers' names: batches, loss, backward, optimizer, schedule, logging.

`loop.py` calls these methods on the trainer, so a subclass may override each of them; what it inherits is what this
engine does. Batches that a script's own code gets are as transformers gives them, `num_items_in_batch` included: the
number of trained tokens in the global batch of all ranks.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from fullshard.config.errors import ConfigError
from fullshard.data.loader import Batch, Step
from fullshard.data.pretokenized import IGNORED
from fullshard.device.torch_private import version_of
from fullshard.distributed import runtime
from fullshard.distributed.ranks import exchange
from fullshard.models.attention import is_own
from fullshard.models.attention_masks import BLOCK
from fullshard.models.causal_lm import get_causal_lm
from fullshard.models.chunked_loss import whole_cross_entropy
from fullshard.models.router_loss import has_router_loss
from fullshard.models.token_loss import known_count
from fullshard.parallel.prepare import rebind
from fullshard.planner.estimate import Estimate
from fullshard.sft.assemble import Parts
from fullshard.sft.batches import COUNTED, ScriptLoader, Steps, make_collator, make_loader
from fullshard.sft.callbacks import Accelerator, Callbacks
from fullshard.sft.loop import Loop
from fullshard.sft.optimizer import class_and_options, make_from_class, make_optimizer, make_schedule
from fullshard.sft.overrides import SEEN, overridden
from fullshard.sft.read_model import uses_flash
from fullshard.sft.sft_config import SFTConfig


class TrainingStep:
    """The methods of a trainer that make up a training step."""

    args: SFTConfig
    parts: Parts
    estimate: Estimate | None = None
    """What the run was planned to need; on the first rank."""
    loop: Loop
    accelerator: Accelerator
    callback_handler: Callbacks
    optimizer: Any = None
    lr_scheduler: Any = None
    compute_loss_func: Any = None
    compute_metrics: Any = None
    data_collator: Any = None
    optimizer_cls_and_kwargs: Any = None
    loss_is_scaled_for_ga: bool | None = None
    """Whether an overridden `compute_loss` has divided by all tokens of the step; None decides as transformers does."""
    current_flos = 0.0
    current_gradient_accumulation_steps = 1
    _made_schedule = False
    """Whether `lr_scheduler` was made here, so that a second training makes another."""
    _items: tuple[Any, int] = (None, 0)
    """The number of trained tokens that the script's code got, and its value on the host."""

    # --- batches ----------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """This rank's training batches, step by step. An override may return a `DataLoader` of its own: its batches are
        divided over the ranks."""
        data = self.parts.train
        if data is None:
            raise ConfigError("there is no train_dataset to train on.")
        return make_loader(self.args, data, self._collator(seen := self._batches_are_seen), seen)

    def _collator(self, seen: bool) -> Any:
        model, pad = self.parts.model, self.parts.tokenizer.pad_token_id
        block = BLOCK if is_own(get_causal_lm(model).config) else None
        return make_collator(self.args, pad, uses_flash(model), has_router_loss(model), seen, self.data_collator, block)

    def train_steps(self) -> Steps:
        """The steps of what `get_train_dataloader` returns."""
        given = self.get_train_dataloader()
        self.callback_handler.train_dataloader = given
        if hasattr(given, "next_epoch"):
            return given
        return ScriptLoader(given, self.args.gradient_accumulation_steps, "get_train_dataloader")

    @property
    def _batches_are_seen(self) -> bool:
        """Whether code of the script gets the batches."""
        return self.compute_loss_func is not None or any(overridden(self, name) for name in SEEN)

    def planned(self) -> dict[str, Any] | None:
        """The estimate as plain data."""
        return self.estimate.to_json() if self.estimate is not None else None

    @property
    def makes_loss(self) -> bool:
        """Whether loss and batches are the engine's own, not a script's."""
        return self.data_collator is None and not self._batches_are_seen

    @property
    def aux_loss_enabled(self) -> bool:
        """Whether the loss has the auxiliary loss of a mixture of experts."""
        return has_router_loss(self.parts.model)

    def counted(self, step: Step) -> Step:
        """A step with the number of its trained tokens, over all ranks."""
        self.current_gradient_accumulation_steps = len(step.batches)
        known = step.pick.targets != COUNTED and self.data_collator is None
        if known and not any(overridden(self, name) for name in ("get_batch_samples", "_get_num_items_in_batch")):
            return step
        real = [batch for batch, rows in zip(step.batches, step.mine, strict=True) if rows]
        taken, items = self.get_batch_samples(iter(real), len(real), runtime.device())
        others = iter(taken)
        batches = [next(others, batch) if rows else batch for batch, rows in zip(step.batches, step.mine, strict=True)]
        tokens = sum(exchange(sum(map(_tokens_in, taken)), "tokens of the step"))
        pick = replace(step.pick, targets=int(items) if items is not None else 1, tokens=tokens)
        return replace(step, pick=pick, batches=batches)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """The micro-batches of a step on this rank, and the number of trained tokens of all ranks."""
        batches = list(itertools.islice(epoch_iterator, num_batches))
        return batches, self._get_num_items_in_batch(batches, device)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        return sum(exchange(sum(trained_tokens(batch.get("labels")) for batch in batch_samples), "trained tokens"))

    def items(self, step: Step) -> Any:
        """The number of trained tokens of a step, as `training_step` gets it."""
        count = max(1, step.pick.targets)
        if not self.args.average_tokens_across_devices and runtime.world_size() > 1:
            if self._batches_are_seen:
                raise ConfigError(
                    "average_tokens_across_devices is false, and the script computes the loss: it gets the tokens of "
                    "all ranks, and the loss is a mean over them. Leave the setting out."
                )
            mine = [batch for batch, rows in zip(step.batches, step.mine, strict=True) if rows]
            count = max(1, sum(trained_tokens(batch.get("labels")) for batch in mine)) * runtime.world_size()
        if not self._batches_are_seen:
            return count
        if self.compute_loss_func is None and not self.model_accepts_loss_kwargs and overridden(self, "compute_loss"):
            return None
        self._items = (torch.full((), count, device=runtime.device()), count)
        return self._items[0]

    @property
    def model_accepts_loss_kwargs(self) -> bool:
        """Whether the model's own loss can be divided by a given number of tokens."""
        model = get_causal_lm(self.parts.model)
        accepts = getattr(model, "accepts_loss_kwargs", None)
        if accepts is not None:
            return bool(accepts)
        kinds = inspect.signature(type(model).forward).parameters.values()
        return any(each.kind is inspect.Parameter.VAR_KEYWORD for each in kinds)

    def _prepare_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """A batch on this rank's device."""
        labels = inputs.get("labels")
        moved: dict[str, Any] = {name: self._prepare_input(value) for name, value in inputs.items()}
        if isinstance(labels, torch.Tensor) and isinstance(there := moved["labels"], torch.Tensor):
            # Counted on the host, so that the loss need not wait for the device.
            there.trained_tokens = (trained_tokens(labels), version_of(there))
        return moved

    def _prepare_input(self, data: Any) -> Any:
        if isinstance(data, Mapping):
            return {name: self._prepare_input(value) for name, value in data.items()}
        if isinstance(data, tuple | list):
            return type(data)(self._prepare_input(value) for value in data)
        if not isinstance(data, torch.Tensor) or data.device == runtime.device():
            return data
        return runtime.place(data, self.args.dataloader_pin_memory)

    # --- loss and gradients -----------------------------------------------------------------------------------------

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward and backward over a micro-batch; its loss, detached."""
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        scaled = self.loss_is_scaled_for_ga
        if scaled is None:
            scaled = num_items_in_batch is not None or self.compute_loss_func is not None
        if not scaled:
            loss = loss / self.current_gradient_accumulation_steps
        self.accelerator.backward(loss)
        return loss.detach()

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of a micro-batch, with the outputs of the model if they are asked for.

        Without `num_items_in_batch`, it is a mean over the trained tokens of the micro-batch. With it, it is their sum
        × ranks / `num_items_in_batch`: gradients are averaged over the ranks, so the step is the mean over the trained
        tokens of all ranks.
        """
        loop, labels = self.loop, inputs.get("labels")
        if self.compute_loss_func is not None:
            return self._script_loss(model, inputs, return_outputs, num_items_in_batch)
        if labels is None:
            raise ConfigError(
                f"compute_loss: the batch has no labels, only {', '.join(inputs)}; add them, or override compute_loss."
            )
        tokens = trained_tokens(labels)
        scale = runtime.world_size() / self._items_on_host(num_items_in_batch, tokens)
        inputs = {**inputs, "use_cache": False}
        real_tokens = inputs.pop("real_tokens", None)
        with loop.head.loss_pass(scale * loop.scale, tokens, real_tokens, return_outputs) as measured:
            outputs = model(**inputs)
        loop.measured[:3] += measured.sums[1:]
        loop.measured[3] += tokens
        loss = outputs["loss"] if loop.scale == 1 else outputs["loss"] / loop.scale  # exact: a power of two
        return (loss, outputs) if return_outputs else loss

    def _items_on_host(self, items: Any, tokens: int) -> int:
        if items is None:
            return max(1, tokens) * runtime.world_size()
        return self._items[1] if items is self._items[0] else max(1, int(items))

    def _script_loss(self, model: Any, inputs: Any, return_outputs: bool, items: Any) -> Any:
        """The loss of the script's `compute_loss_func`."""
        labels = inputs.get("labels")
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"}, use_cache=False)
        loss = self.compute_loss_func(outputs, labels, num_items_in_batch=items)
        if items is not None:
            loss = loss * runtime.world_size()
        if labels is not None:
            self._measure(outputs, labels)
        return (loss, outputs) if return_outputs else loss

    @torch.no_grad()
    def _measure(self, outputs: Any, labels: torch.Tensor) -> None:
        """Accuracy, entropy if asked for, and the routers' loss of a model's outputs."""
        found, tokens, measured = outputs["logits"][:, -labels.shape[1] :], trained_tokens(labels), self.loop.measured
        measured[:2] += whole_cross_entropy(found, labels, entropy=self.loop.head.entropy).sums[1:]
        if (router_loss := outputs.get("aux_loss")) is not None:
            measured[2] += router_loss.double() * tokens
        measured[3] += tokens

    def compute_loss_context_manager(self) -> contextlib.ExitStack:
        """Surrounds `compute_loss`."""
        stack = contextlib.ExitStack()
        stack.enter_context(self.autocast_smart_context_manager())
        return stack

    def autocast_smart_context_manager(
        self, cache_enabled: bool | None = True
    ) -> contextlib.AbstractContextManager[Any]:
        """Nothing: the engine casts parameters and inputs."""
        return contextlib.nullcontext()

    def _clip_grad_norm(self, model: Any) -> Any:
        """Clip the gradients; returns their norm before that, over all ranks."""
        return model.clip_grad_norm_(self.args.max_grad_norm or float("inf"))

    # --- optimizer and schedule -------------------------------------------------------------------------------------

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Make `optimizer` and `lr_scheduler`, once the model is sharded."""
        self.create_optimizer()
        self.create_scheduler(num_training_steps)

    def create_optimizer(self, model: Any = None) -> Any:
        """Make `optimizer`, unless there is one; one that a script made gets the sharded parameters."""
        model = model if model is not None else self.parts.model
        if self.optimizer is None:
            decayed = set(self.get_decay_parameter_names(model))
            if self.optimizer_cls_and_kwargs is not None:
                kind, options = self.optimizer_cls_and_kwargs
                self.optimizer = make_from_class(model, kind, options, self.args.weight_decay, decayed)
            else:
                self.optimizer = make_optimizer(model, self.args, decayed)
        self.optimizer = rebind(self.optimizer)
        return self.optimizer

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: SFTConfig, model: Any = None) -> tuple[Any, dict[str, Any]]:
        """The class and the options of the optimizer that the settings name."""
        return class_and_options(args)

    @property
    def makes_optimizer(self) -> bool:
        """Whether the optimizer is the one that the settings name."""
        given = self.optimizer is not None or self.optimizer_cls_and_kwargs is not None
        return not given and not overridden(self, "create_optimizer")

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Make `lr_scheduler`, unless there is one."""
        if self.lr_scheduler is None:
            self.lr_scheduler = make_schedule(optimizer or self.optimizer, self.args, num_training_steps)
            self._made_schedule = True
        return self.lr_scheduler

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        """The parameters with weight decay: matrices. Vectors (biases, norms) have none."""
        return [name for name, p in model.named_parameters() if p.dim() > 1]

    # --- counting and logging ---------------------------------------------------------------------------------------

    def floating_point_ops(self, inputs: Any) -> float:
        """Floating-point operations of a step over a batch, by transformers' estimate."""
        if "input_ids" not in inputs:
            return 0.0
        return 6.0 * inputs["input_ids"].numel() * self._dense_parameters

    @property
    def _dense_parameters(self) -> int:
        found = self.__dict__.get("_dense")
        if found is None:
            found = self.__dict__["_dense"] = get_causal_lm(self.parts.model).num_parameters(exclude_embeddings=True)
        return found

    def store_flos(self) -> None:
        """Add the operations since the last call to `state.total_flos`."""
        self.callback_handler.state.total_flos += self.current_flos
        self.current_flos = 0.0

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Record metrics, show them, and call the callbacks."""
        state = self.callback_handler.state
        logs["epoch"] = state.epoch
        self.loop.reporter.log(state.global_step, logs)
        self.callback_handler("on_log", logs=logs)


def trained_tokens(labels: Any) -> int:
    """The number of labels that contribute to the loss."""
    if labels is None:
        return 0
    known = known_count(labels)
    return known if known is not None else int((labels[..., 1:] != IGNORED).sum())


def _tokens_in(batch: Batch) -> int:
    mask = batch.get("attention_mask")
    return int(mask.sum()) if mask is not None else batch["input_ids"].numel()
