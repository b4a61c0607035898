"""What an optimizer step consists of, under transformers' names: batches, loss, gradients, optimizer, logging.

A subclass of the trainer may override these methods (`overrides.py`); what it inherits is what this engine does.
Batches that a script's own code gets are as transformers gives them, `num_items_in_batch` included: the number of
trained tokens in the global batch of all ranks.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from fullshard.config.errors import ConfigError
from fullshard.data.loader import Batch, Step
from fullshard.data.token_table import TokenTable
from fullshard.device.torch_private import version_of
from fullshard.distributed import data_ranks, runtime
from fullshard.distributed.ranks import exchange
from fullshard.models.attention import is_own
from fullshard.models.attention_masks import BLOCK
from fullshard.models.causal_lm import get_causal_lm
from fullshard.models.chunked_loss import whole_cross_entropy
from fullshard.models.router_loss import has_router_loss
from fullshard.parallel.prepare import rebind
from fullshard.sft.base_model import uses_flash
from fullshard.sft.batches import (
    UNKNOWN_COUNT,
    ScriptLoader,
    StepLoader,
    Steps,
    make_collator,
    make_evaluation_loader,
    make_loader,
    trained_tokens,
)
from fullshard.sft.optimizer import make_optimizer, make_schedule, optimizer_from_class
from fullshard.sft.overrides import Calls
from fullshard.sft.trainer_context import TrainerContext


class TrainingStep:
    """The batches of a step, their loss and gradients, and what is logged of them."""

    def __init__(self, context: TrainerContext, calls: Calls, backward: Callable[[torch.Tensor], None]) -> None:
        self._context, self._calls, self._backward = context, calls, backward
        self._items: tuple[Any, int] = (None, 0)
        """The number of trained tokens that the script's code got, and its value on the host."""
        self._dense: tuple[Any, int] = (None, 0)
        """A model, and the number of its parameters without embeddings."""

    # --- batches ----------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """This rank's training batches, step by step. An override may return a `DataLoader` of its own: its batches are
        divided over the ranks."""
        data = self._context.parts.train
        if data is None:
            raise ConfigError("there is no train_dataset to train on.")
        return make_loader(self._context.args, data, self._collator(seen := self.batches_are_seen), seen)

    def evaluation_loader(self, table: TokenTable) -> StepLoader:
        """This rank's batches of the rows of an evaluation, in order."""
        seen = self.batches_are_seen or self._context.compute_metrics is not None
        return make_evaluation_loader(self._context.args, table, self._collator(seen), seen)

    def _collator(self, seen: bool) -> Any:
        model, pad = self._context.parts.model, self._context.parts.tokenizer.pad_token_id
        block = BLOCK if is_own(get_causal_lm(model).config) else None
        return make_collator(
            self._context.args, pad, uses_flash(model), has_router_loss(model), seen, self._context.data_collator, block
        )

    def train_steps(self) -> Steps:
        """The steps of what `get_train_dataloader` returns."""
        loader = self._calls.get_train_dataloader()
        self._context.events.train_dataloader = loader
        if hasattr(loader, "next_epoch"):
            return loader
        return ScriptLoader(loader, self._context.args.gradient_accumulation_steps, "get_train_dataloader")

    @property
    def batches_are_seen(self) -> bool:
        """Whether code of the script gets the batches."""
        return self._context.compute_loss_func is not None or self._calls.batches_are_seen

    @property
    def is_own_loss(self) -> bool:
        """Whether loss and batches are the engine's own, not a script's."""
        return self._context.data_collator is None and not self.batches_are_seen

    def count_tokens(self, step: Step) -> Step:
        """A step with the number of its trained tokens, over all ranks."""
        self._context.current_gradient_accumulation_steps = len(step.batches)
        is_counted = step.pick.targets != UNKNOWN_COUNT and self._context.data_collator is None
        if is_counted and not self._calls.is_overridden("get_batch_samples", "_get_num_items_in_batch"):
            return step
        real = [batch for batch, rows in zip(step.batches, step.mine, strict=True) if rows]
        samples, items = self._calls.get_batch_samples(iter(real), len(real), runtime.device())
        others = iter(samples)
        batches = [next(others, batch) if rows else batch for batch, rows in zip(step.batches, step.mine, strict=True)]
        tokens = sum(data_ranks.of_each_row(exchange(sum(map(_tokens_in, samples)), "tokens of the step")))
        pick = replace(step.pick, targets=int(items) if items is not None else 1, tokens=tokens)
        return replace(step, pick=pick, batches=batches)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """The micro-batches of a step on this rank, and the number of trained tokens of all ranks."""
        batches = list(itertools.islice(epoch_iterator, num_batches))
        return batches, self._calls._get_num_items_in_batch(batches, device)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        mine = sum(trained_tokens(batch.get("labels")) for batch in batch_samples)
        return sum(data_ranks.of_each_row(exchange(mine, "trained tokens")))

    def num_items(self, step: Step) -> Any:
        """The number of trained tokens of a step, as `training_step` gets it."""
        count = max(1, step.pick.targets)
        if not self._context.args.average_tokens_across_devices and data_ranks.data_size() > 1:
            if self.batches_are_seen:
                raise ConfigError(
                    "average_tokens_across_devices is false, and the script computes the loss: it gets the tokens of "
                    "all ranks, and the loss is a mean over them. Leave the setting out."
                )
            mine = [batch for batch, rows in zip(step.batches, step.mine, strict=True) if rows]
            count = max(1, sum(trained_tokens(batch.get("labels")) for batch in mine)) * data_ranks.data_size()
        if not self.batches_are_seen:
            return count
        if (
            self._context.compute_loss_func is None
            and not self._calls.value("model_accepts_loss_kwargs")
            and self._calls.is_overridden("compute_loss")
        ):
            return None
        self._items = (torch.full((), count, device=runtime.device()), count)
        return self._items[0]

    @property
    def model_accepts_loss_kwargs(self) -> bool:
        """Whether the model's own loss takes the number of tokens to divide by."""
        model = get_causal_lm(self._context.parts.model)
        accepts = getattr(model, "accepts_loss_kwargs", None)
        if accepts is not None:
            return bool(accepts)
        kinds = inspect.signature(type(model).forward).parameters.values()
        return any(each.kind is inspect.Parameter.VAR_KEYWORD for each in kinds)

    def _prepare_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """A batch on this rank's device."""
        labels = inputs.get("labels")
        moved: dict[str, Any] = {name: self._calls._prepare_input(value) for name, value in inputs.items()}
        if isinstance(labels, torch.Tensor) and isinstance(on_device := moved["labels"], torch.Tensor):
            # Counted on the host, so that the loss need not wait for the device.
            on_device.trained_tokens = (trained_tokens(labels), version_of(on_device))
        return moved

    def _prepare_input(self, data: Any) -> Any:
        if isinstance(data, Mapping):
            return {name: self._calls._prepare_input(value) for name, value in data.items()}
        if isinstance(data, tuple | list):
            return type(data)(self._calls._prepare_input(value) for value in data)
        if not isinstance(data, torch.Tensor) or data.device == runtime.device():
            return data
        return runtime.place(data, self._context.args.dataloader_pin_memory)

    # --- loss and gradients -----------------------------------------------------------------------------------------

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward and backward over a micro-batch; its loss, detached."""
        inputs = self._calls._prepare_inputs(inputs)
        with self._calls.compute_loss_context_manager():
            loss = self._calls.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        scaled = self._calls.value("loss_is_scaled_for_ga")
        if scaled is None:
            scaled = num_items_in_batch is not None or self._context.compute_loss_func is not None
        if not scaled:
            loss = loss / self._context.current_gradient_accumulation_steps
        self._backward(loss)
        return loss.detach()

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of a micro-batch, and with `return_outputs` the outputs of the model.

        Without `num_items_in_batch`, it is a mean over the trained tokens of the micro-batch. With it, it is their sum
        × ranks / `num_items_in_batch`: gradients are averaged over the ranks, so the step is the mean over the trained
        tokens of all ranks.
        """
        head, labels = self._context.run.head, inputs.get("labels")
        if self._context.compute_loss_func is not None:
            return self._script_loss(model, inputs, return_outputs, num_items_in_batch)
        if labels is None:
            raise ConfigError(
                f"compute_loss: the batch has no labels, only {', '.join(inputs)}; add them, or override compute_loss."
            )
        tokens = trained_tokens(labels)
        scale = data_ranks.data_size() / self._items_on_host(num_items_in_batch, tokens)
        inputs = {**inputs, "use_cache": False}
        micro, real_tokens = self._context.micro, inputs.pop("real_tokens", None)
        with head.loss_pass(scale * micro.scale, tokens, real_tokens, return_outputs) as measured:
            outputs = model(**inputs)
        micro.measured[:3] += measured.sums[1:]
        micro.measured[3] += tokens
        loss = outputs["loss"] if micro.scale == 1 else outputs["loss"] / micro.scale  # exact: a power of two
        return (loss, outputs) if return_outputs else loss

    def _items_on_host(self, items: Any, tokens: int) -> int:
        if items is None:
            return max(1, tokens) * data_ranks.data_size()
        return self._items[1] if items is self._items[0] else max(1, int(items))

    def _script_loss(self, model: Any, inputs: Any, return_outputs: bool, items: Any) -> Any:
        """The loss of the script's `compute_loss_func`."""
        labels = inputs.get("labels")
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"}, use_cache=False)
        loss = self._context.compute_loss_func(outputs, labels, num_items_in_batch=items)
        if items is not None:
            loss = loss * data_ranks.data_size()
        if labels is not None:
            self._measure(outputs, labels)
        return (loss, outputs) if return_outputs else loss

    @torch.no_grad()
    def _measure(self, outputs: Any, labels: torch.Tensor) -> None:
        """Accuracy, entropy if it is logged, and the routers' loss of a model's outputs."""
        logits, tokens = outputs["logits"][:, -labels.shape[1] :], trained_tokens(labels)
        measured, head = self._context.micro.measured, self._context.run.head
        measured[:2] += whole_cross_entropy(logits, labels, entropy=head.entropy).sums[1:]
        if (router_loss := outputs.get("aux_loss")) is not None:
            measured[2] += router_loss.double() * tokens
        measured[3] += tokens

    def compute_loss_context_manager(self) -> contextlib.ExitStack:
        """Surrounds `compute_loss`."""
        stack = contextlib.ExitStack()
        stack.enter_context(self._calls.autocast_smart_context_manager())
        return stack

    def autocast_smart_context_manager(
        self, cache_enabled: bool | None = True
    ) -> contextlib.AbstractContextManager[Any]:
        """Nothing: the engine casts parameters and inputs."""
        return contextlib.nullcontext()

    def _clip_grad_norm(self, model: Any) -> Any:
        """Clip the gradients; returns their norm before that, over all ranks."""
        return model.clip_grad_norm_(self._context.args.max_grad_norm or float("inf"))

    # --- counting and logging ---------------------------------------------------------------------------------------

    def floating_point_ops(self, inputs: Any) -> float:
        """Floating-point operations of a step over a batch, by transformers' estimate."""
        if "input_ids" not in inputs:
            return 0.0
        return 6.0 * inputs["input_ids"].numel() * self._dense_parameters

    @property
    def _dense_parameters(self) -> int:
        model = self._context.parts.model
        if self._dense[0] is not model:
            self._dense = model, get_causal_lm(model).num_parameters(exclude_embeddings=True)
        return self._dense[1]

    def add_flos(self, flos: float) -> None:
        """Count the operations of a step."""
        self._context.current_flos += flos

    def store_flos(self) -> None:
        """Add the operations since the last call to `state.total_flos`."""
        self._context.events.state.total_flos += self._context.current_flos
        self._context.current_flos = 0.0

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Record metrics, show them, and call the callbacks."""
        state = self._context.events.state
        logs["epoch"] = state.epoch
        self._context.run.reporter.log(state.global_step, logs)
        self._context.events("on_log", logs=logs)

    def log_in_training(self, logs: dict[str, float]) -> None:
        """Log the metrics of steps, with the operations so far."""
        self._calls.store_flos()
        self._calls.log(logs, self._context.began)


class Optimizers:
    """Makes a run's optimizer and schedule, once the model is sharded."""

    def __init__(self, context: TrainerContext, calls: Calls) -> None:
        self._context, self._calls = context, calls
        self.made_schedule = False
        """Whether `lr_scheduler` is one of these, so that a second training makes another."""

    def make(self, num_training_steps: int) -> tuple[Any, Any]:
        """The optimizer and the schedule of a run of this many steps."""
        self._calls.create_optimizer_and_scheduler(num_training_steps)
        return self._context.optimizer, self._context.lr_scheduler

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Make `optimizer` and `lr_scheduler`, once the model is sharded."""
        self._calls.create_optimizer()
        self._calls.create_scheduler(num_training_steps)

    def create_optimizer(self, model: Any = None) -> Any:
        """Make `optimizer`, unless there is one; a script's own gets the sharded parameters."""
        context, model = self._context, model if model is not None else self._context.parts.model
        if context.optimizer is None:
            decayed = set(self._calls.get_decay_parameter_names(model))
            if context.optimizer_cls_and_kwargs is not None:
                kind, options = context.optimizer_cls_and_kwargs
                context.optimizer = optimizer_from_class(model, kind, options, context.args.weight_decay, decayed)
            else:
                context.optimizer = make_optimizer(model, context.args, decayed)
        context.optimizer = rebind(context.optimizer)
        return context.optimizer

    @property
    def are_own(self) -> bool:
        """Whether the optimizer is the one that the settings name."""
        context = self._context
        from_script = context.optimizer is not None or context.optimizer_cls_and_kwargs is not None
        return not from_script and not self._calls.is_overridden("create_optimizer")

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Make `lr_scheduler`, unless there is one."""
        context = self._context
        if context.lr_scheduler is None:
            context.lr_scheduler = make_schedule(optimizer or context.optimizer, context.args, num_training_steps)
            self.made_schedule = True
        return context.lr_scheduler

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        """The parameters with weight decay: matrices. Vectors (biases, norms) have none."""
        return [name for name, p in model.named_parameters() if p.dim() > 1]

    def get_learning_rates(self) -> list[float]:
        """The learning rate of each parameter group."""
        return [group["lr"] for group in self._groups()]

    def get_optimizer_group(self, param: Any = None) -> Any:
        """The parameter group of a parameter, or the parameters of all groups."""
        groups = self._groups()
        if param is None:
            return [group["params"] for group in groups]
        return next((group for group in groups if any(param is each for each in group["params"])), None)

    def _groups(self) -> list[dict[str, Any]]:
        if self._context.optimizer is None:
            raise ConfigError("there is no optimizer yet; call trainer.prepare() or train() first.")
        return self._context.optimizer.param_groups


def _tokens_in(batch: Batch) -> int:
    mask = batch.get("attention_mask")
    return int(mask.sum()) if mask is not None else batch["input_ids"].numel()
