"""Evaluation and prediction under transformers' names: metrics over one pass, with what a script computes itself.

The loss is the mean over all trained tokens of the data set, however they are distributed over batches and ranks.
Predictions are gathered only where the script asks for them (`compute_metrics`, `predict`); every rank gets all of them
in the order of the rows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fullshard.config.errors import ConfigError, TrainingError
from fullshard.data.loader import Batch, Collator
from fullshard.data.prepared_rows import PreparedRows, prepared_rows
from fullshard.data.pretokenized import IGNORED
from fullshard.data.token_table import TokenTable
from fullshard.distributed import data_ranks, engines, runtime
from fullshard.distributed.ranks import exchange
from fullshard.distributed.watchdog import watch
from fullshard.models.router_loss import has_router_loss
from fullshard.sft.batches import EVALUATION, ScriptLoader, checked_table, trained_tokens
from fullshard.sft.optimizer import ScriptSchedule
from fullshard.sft.overrides import Calls
from fullshard.sft.run_data import script_source
from fullshard.sft.trainer_context import ShardedRun, TrainerContext


class Evaluation:
    """Evaluates and predicts, before, during and after training."""

    def __init__(self, context: TrainerContext, calls: Calls, loader: Callable[[TokenTable], Any]) -> None:
        """`loader` makes this rank's batches of a table."""
        self._context, self._calls, self._loader = context, calls, loader

    # --- data -------------------------------------------------------------------------------------------------------

    @property
    def dataset(self) -> Any:
        """The rows of the evaluation data, or of each set by name, read like a `datasets.Dataset`."""
        return prepared_rows(self._context.parts.evaluation)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """This rank's batches of a data set: the trainer's own, one of several by name, or other rows."""
        return self._loader(self._table(eval_dataset, "eval_dataset"))

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """The same for `predict`."""
        return self._loader(self._table(test_dataset, "test_dataset"))

    def _table(self, rows: Any, name: str) -> TokenTable:
        """The tokens of rows that a script evaluates: the run's own, one of its sets by name, or other rows."""
        context, own = self._context, self._context.parts.evaluation
        if isinstance(rows, str) and isinstance(own, dict) and rows in own:
            return own[rows]
        rows = own if rows is None else rows
        if rows is None:
            raise ConfigError(f"there is no {name} to evaluate on.")
        if isinstance(rows, TokenTable | PreparedRows):
            return rows.table if isinstance(rows, PreparedRows) else rows
        source = script_source(rows, name, context.args, context.formatting_func)
        model, tokenizer = context.parts.model, context.parts.tokenizer
        return checked_table(context.args, model, tokenizer, context.say, EVALUATION, source)

    def num_examples(self, dataloader: Any) -> int:
        """The number of rows behind a data loader."""
        return len(dataloader.dataset)

    # --- evaluation -------------------------------------------------------------------------------------------------

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Metrics on the evaluation data, before, during or after training. All ranks must call it.

        Several sets, as a dict, are evaluated one after the other: the name of each is in its metrics' names.
        """
        sets = eval_dataset if eval_dataset is not None else self.dataset
        if isinstance(sets, dict):
            all_metrics: dict[str, float] = {}
            for name, rows in sets.items():
                chosen = rows if eval_dataset is not None else name
                prefix = f"{metric_key_prefix}_{name}"
                all_metrics |= self._calls.evaluate(
                    eval_dataset=chosen, ignore_keys=ignore_keys, metric_key_prefix=prefix
                )
            return all_metrics
        run = self._ready()
        began = time.time()
        loader = self._calls.get_eval_dataloader(eval_dataset)
        loss_only = True if self._context.compute_metrics is None else None
        output = self._calls.evaluation_loop(loader, "Evaluation", loss_only, ignore_keys, metric_key_prefix)
        metrics = output.metrics
        metrics |= self._speed(metric_key_prefix, began, output.num_samples)
        self._calls.log(metrics)
        self._context.events("on_evaluate", metrics=metrics)
        run.state.window.pause(time.time() - began)
        return metrics

    def _evaluate(self, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False) -> dict[str, float]:
        """Evaluate during training; a schedule that follows a metric gets it."""
        metrics, schedule = self._calls.evaluate(ignore_keys=ignore_keys_for_eval), self._context.run.state.schedule
        if isinstance(schedule, ScriptSchedule) and schedule.follows_metric and not skip_scheduler:
            schedule.scheduler.step(metrics[self._context.args.best_metric])
        return metrics

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Compare with the best evaluation so far, and stop early if it is time. Returns whether this one is better."""
        config, progress, events = self._context.args, self._context.run.state.progress, self._context.events
        patience, name = config.early_stopping_patience, config.best_metric
        if name not in metrics:
            if config.metric_for_best_model is None and patience is None:
                return False  # several sets, none of which was chosen
            raise TrainingError(f"metric_for_best_model: there is no {name}; evaluation has {', '.join(metrics)}.")
        value, best = metrics[name], progress.best_value
        gain = math.inf if best is None else (value - best) * (1 if config.higher_is_better else -1)
        progress.without_improvement = 0 if gain > config.early_stopping_threshold else progress.without_improvement + 1
        if gain > 0:
            progress.best_value, progress.best_step = value, progress.step
            events.state.best_metric, events.state.best_global_step = value, progress.step
        if patience is not None and progress.without_improvement >= patience:
            events.control.should_training_stop = True
            self._context.say(f"no improvement of {name} in {patience} evaluations: stopping early")
        return gain > 0

    def evaluate_in_training(self) -> dict[str, float]:
        """Evaluate between two steps."""
        metrics: dict[str, float] = self._calls._evaluate(None, self._context.ignored_keys)
        return metrics

    def is_best(self, metrics: dict[str, float]) -> bool:
        """Whether an evaluation is the best so far; stops early if it is time."""
        return bool(self._calls._determine_best_metric(metrics, None))

    def predict(self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test") -> Any:
        """Logits, labels and metrics of other rows, as transformers' `PredictionOutput`. All ranks must call it."""
        from transformers.trainer_utils import PredictionOutput

        self._ready()
        began = time.time()
        loader = self._calls.get_test_dataloader(test_dataset)
        output = self._calls.evaluation_loop(loader, "Prediction", None, ignore_keys, metric_key_prefix)
        output.metrics.update(self._speed(metric_key_prefix, began, output.num_samples))
        self._context.events("on_predict", metrics=output.metrics)
        return PredictionOutput(output.predictions, output.label_ids, output.metrics)

    def _ready(self) -> ShardedRun:
        """The sharded run; outside training, the ranks learn of each other's callbacks first."""
        self._calls.prepare()
        if not self._context.is_in_train:
            self._context.events.meet()
        return self._context.run

    def _speed(self, prefix: str, began: float, rows: int) -> dict[str, float]:
        from transformers.trainer_utils import speed_metrics

        steps = -(-rows // (self._context.args.per_device_eval_batch_size * data_ranks.data_devices()))
        return speed_metrics(prefix, began, num_samples=rows, num_steps=steps)

    def closing_metrics(self, first: int, total: int) -> dict[str, float]:
        """Speed and mean loss of the training that has ended, by transformers' names: of the steps after `first`, in a
        run of `total`."""
        from transformers.trainer_utils import speed_metrics

        args, events, state = self._context.args, self._context.events, self._context.run.state
        steps = state.progress.step - first
        samples = float(steps * state.progress.batch)
        if args.max_steps < 0:
            samples = self._calls.num_examples(events.train_dataloader) * args.num_train_epochs * steps / total
        self._calls.store_flos()
        metrics: dict[str, float] = speed_metrics("train", self._context.began, num_samples=samples, num_steps=steps)
        closing = {"total_flos": events.state.total_flos, "train_loss": state.progress.mean_loss}
        return metrics | closing | state.logged

    # --- one pass over a data set -----------------------------------------------------------------------------------

    def evaluation_loop(
        self, dataloader: Any, description: str, prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval",
    ) -> Any:  # fmt: skip
        """One pass over a data loader, as transformers' `EvalLoopOutput`. All ranks must call it."""
        from transformers.trainer_utils import EvalLoopOutput

        context, run = self._context, self._context.run
        loss_only = context.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        context.events.eval_dataloader = dataloader
        run.state.model.eval()
        context.micro.take_measured()
        results = _Results()
        for batch, rows in _batches(dataloader):
            stands_in = rows == 0
            with run.isolate_documents(batch):
                loss, logits, labels = self._calls.prediction_step(
                    run.state.model, batch, loss_only, ignore_keys=ignore_keys
                )
            results.add(batch, stands_in, loss)
            if not loss_only:
                self._gather(results, _first(logits, rows), _first(labels, rows), stands_in)
            runtime.sync()
            context.events("on_prediction_step")
        if context.is_in_train:
            run.state.model.train()
        metrics = self._metrics_of(results, metric_key_prefix)
        samples = len(dataloader.dataset) if hasattr(getattr(dataloader, "dataset", None), "__len__") else results.rows
        return EvalLoopOutput(results.predictions, results.label_ids, metrics, samples)

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """Loss, logits and labels of a micro-batch; only the loss is computed where that is enough."""
        inputs = self._calls._prepare_inputs(inputs)
        labels = inputs.get("labels")
        with torch.no_grad(), self._calls.compute_loss_context_manager():
            if prediction_loss_only:
                return self._calls.compute_loss(model, inputs).detach(), None, None
            if labels is None:
                loss, outputs = None, model(**inputs, use_cache=False)
            else:
                loss, outputs = self._calls.compute_loss(model, inputs, return_outputs=True)
        ignored = ignore_keys if ignore_keys is not None else _ignored(model)
        kept = tuple(value for key, value in outputs.items() if key not in (*ignored, "loss") and value is not None)
        return None if loss is None else loss.detach().mean(), kept[0] if len(kept) == 1 else kept, labels

    def _gather(self, results: _Results, logits: Any, labels: Any, stands_in: bool) -> None:
        """Add the predictions and labels of all ranks, in the order of the rows."""
        from transformers.trainer_pt_utils import nested_concat, nested_numpify

        if logits is not None and self._context.preprocess_logits_for_metrics is not None:
            logits = self._context.preprocess_logits_for_metrics(logits, labels)
        mine = None if stands_in else (nested_numpify(_float(logits)), nested_numpify(labels))
        for part in data_ranks.of_each_row(exchange(mine, "predictions")):
            if part is not None:
                for name, new in zip(("predictions", "label_ids"), part, strict=True):
                    before = getattr(results, name)
                    joined = new if before is None or new is None else nested_concat(before, new, IGNORED)
                    setattr(results, name, joined)

    def _metrics_of(self, results: _Results, prefix: str) -> dict[str, Any]:
        """The metrics of a pass, over all ranks, each with the prefix."""
        from transformers.trainer_utils import EvalPrediction, denumpify_detensorize

        sums = torch.cat([results.sums.to(runtime.device()), self._context.micro.take_measured()])
        data_ranks.sum_over_rows("sum of the evaluation", sums)
        loss, weight, rows, correct, entropy, router_loss, tokens = sums.tolist()
        results.rows = int(rows)
        watch.raise_failure()
        metrics: dict[str, Any] = {}
        compute, predictions, labels = self._context.compute_metrics, results.predictions, results.label_ids
        if compute is not None and predictions is not None and labels is not None:
            metrics = denumpify_detensorize(compute(EvalPrediction(predictions=predictions, label_ids=labels)))
        if weight:
            metrics["loss"] = loss / weight
        if tokens:
            metrics["mean_token_accuracy"] = correct / tokens
            run = self._context.run
            metrics |= {"entropy": entropy / tokens} if run.head.entropy else {}
            metrics |= {"aux_loss": router_loss / tokens} if has_router_loss(run.state.model) else {}
        return {name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": v for name, v in metrics.items()}


@dataclass
class _Results:
    """The sums of one pass over a data set on this rank, and the predictions of all ranks."""

    sums: torch.Tensor
    """Loss × weight, weight, and rows. The weight of a batch is the number of its trained tokens."""
    predictions: Any = None
    label_ids: Any = None
    rows: int = 0

    def __init__(self) -> None:
        self.sums = torch.zeros(3, dtype=torch.float64, device=runtime.device())

    def add(self, batch: Batch, stands_in: bool, loss: Any) -> None:
        """Add a batch's loss, and its rows."""
        if stands_in:
            return
        labels, rows = batch.get("labels"), len(next(iter(batch.values())))
        weight = trained_tokens(labels) if labels is not None else rows
        self.sums[2] += rows
        if loss is not None and weight:
            self.sums[0] += torch.as_tensor(loss).detach().double().mean() * weight
            self.sums[1] += weight


def _batches(dataloader: Any) -> Iterator[tuple[Batch, int | None]]:
    """This rank's micro-batches, and the number of rows in each, without padding: 0 if one stands in for rows that this
    rank does not have, None for all."""
    loader = dataloader if hasattr(dataloader, "next_epoch") else ScriptLoader(dataloader, 1, "get_eval_dataloader")
    for step in loader.one_epoch():
        for batch, rows in zip(step.batches, step.mine, strict=True):
            padded = engines.current().compiles_steps and isinstance(getattr(loader, "collate_fn", None), Collator)
            yield batch, len(rows) if padded or not rows else None


def _first(values: Any, rows: int | None) -> Any:
    """The first rows of what a model returned for a batch; the others are padding."""
    if not rows or values is None:
        return values
    if isinstance(values, tuple | list):
        return type(values)(_first(value, rows) for value in values)
    return values[:rows]


def _ignored(model: Any) -> list[str]:
    config = getattr(model, "config", None)
    return list(getattr(config, "keys_to_ignore_at_inference", None) or ["past_key_values"])


def _float(values: Any) -> Any:
    """Half-precision values, which numpy does not have, in fp32."""
    if isinstance(values, tuple | list):
        return type(values)(_float(value) for value in values)
    narrow = isinstance(values, torch.Tensor) and values.dtype in (torch.bfloat16, torch.float16)
    return values.float() if narrow else values
