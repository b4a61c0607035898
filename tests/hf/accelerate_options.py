"""Accelerate's options and methods, one after the other: what each gives is written to FOLDER/result.json.

argv: FOLDER. Every entry is the same in one process and on any number of ranks, so batches are divided by their number.
"""

import json
import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.state import AcceleratorState, GradientState
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    find_executable_batch_size,
)
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FOLDER = Path(sys.argv[1])
RANKS = int(os.environ.get("WORLD_SIZE", "1"))


def fresh(**options):
    """Another accelerator, as at the start of a script."""
    AcceleratorState._reset_state(False)
    GradientState._reset_state()
    return Accelerator(**options)


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def loader(batch=8 // RANKS, count=32):
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=batch)


def prepared(accelerator, **options):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    return accelerator.prepare(model, optimizer, loader(**options))


def train(accelerator, model, optimizer, batches, *more):
    losses = []
    for x, y in batches:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            for one in (optimizer, *more):
                one.step()
                one.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


def training(**options):
    """Losses with these options of the accelerator."""
    accelerator = fresh(**options)
    return train(accelerator, *prepared(accelerator))


def several_models_and_optimizers():
    accelerator = fresh()
    first, second = network(0), network(1)
    optimizers = [torch.optim.SGD(first.parameters(), 1e-2), torch.optim.AdamW(second.parameters(), 1e-2)]
    first, second, *optimizers, batches = accelerator.prepare(first, second, *optimizers, loader())
    losses = []
    for x, y in batches:
        loss = nn.functional.mse_loss(first(x) + second(x), y)
        accelerator.backward(loss)
        for one in optimizers:
            one.step()
            one.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


def prepared_twice_and_freed():
    accelerator = fresh()
    train(accelerator, *accelerator.prepare(*prepared(accelerator)))
    accelerator.free_memory()
    return train(accelerator, *prepared(accelerator))


def split_batches():
    accelerator = fresh(dataloader_config=DataLoaderConfiguration(split_batches=True))
    return train(accelerator, *prepared(accelerator, batch=8))


def skipped_batches():
    accelerator = fresh()
    model, optimizer, batches = prepared(accelerator)
    return train(accelerator, model, optimizer, skip_first_batches(batches, 2))


class Count:
    value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def named_checkpoints():
    folder = ProjectConfiguration(str(FOLDER / "project"), automatic_checkpoint_naming=True, total_limit=2)
    accelerator, count, seen = fresh(project_config=folder), Count(), []
    accelerator.register_for_checkpointing(count)
    hook = accelerator.register_save_state_pre_hook(lambda models, weights, place: seen.append(Path(place).name))
    model, optimizer, batches = prepared(accelerator)
    for count.value in range(3):
        train(accelerator, model, optimizer, batches)
        accelerator.save_state()
    hook.remove()
    going_on = train(accelerator, model, optimizer, batches)
    count.value = 9
    accelerator.load_state()
    kept = sorted(one.name for one in (FOLDER / "project" / "checkpoints").iterdir())
    return going_on, train(accelerator, model, optimizer, batches) == going_on, count.value, seen, kept


def saved_in_several_files():
    accelerator = fresh()
    model, optimizer, batches = prepared(accelerator)
    train(accelerator, model, optimizer, batches)
    accelerator.save_model(model, str(FOLDER / "model"), max_shard_size=400)
    accelerator.wait_for_everyone()
    values = [v for file in sorted((FOLDER / "model").glob("*.safetensors")) for v in load_file(file).values()]
    files = sorted(one.name for one in (FOLDER / "model").iterdir())
    whole = accelerator.get_state_dict(model)
    return files, [v.sum().item() for v in values], sorted(whole) if accelerator.is_main_process else None


class Rows(GeneralTracker):
    name, requires_logging_directory, rows = "rows", False, ()

    @property
    def tracker(self):
        return self

    @on_main_process
    def store_init_configuration(self, values):
        self.rows = [values]

    @on_main_process
    def log(self, values, step=None):
        self.rows.append([step, values])


def own_tracker():
    tracker = Rows()
    accelerator = fresh(log_with=tracker)
    accelerator.init_trackers("project", config={"lr": 1})
    accelerator.log({"loss": 2}, step=3)
    accelerator.end_training()
    return tracker.rows


def clipped_values():
    accelerator = fresh()
    model, *_ = prepared(accelerator)
    accelerator.backward(model(torch.ones(2, 8)).sum())
    accelerator.clip_grad_value_(model.parameters(), 0.1)
    grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
    return [grad.sum().item() for grad in grads]


def uneven_inputs():
    """All batches are seen, and no rank is left waiting."""
    accelerator = fresh(dataloader_config=DataLoaderConfiguration(even_batches=False))
    model, optimizer, batches = prepared(accelerator, batch=2, count=9)
    with accelerator.join_uneven_inputs([model], even_batches=False):
        train(accelerator, model, optimizer, batches)
    return len(batches) > 0


def between_ranks():
    accelerator = fresh()
    me, count = accelerator.process_index, accelerator.num_processes
    if me == count - 1:
        accelerator.set_trigger()
    triggered = [accelerator.check_trigger(), accelerator.check_trigger()]
    padded = accelerator.pad_across_processes(torch.ones(1 + me))
    objects = accelerator.gather_for_metrics([me], use_gather_object=True)
    return (
        triggered,
        len(padded) == count,
        objects == list(range(count)),
        accelerator.gather(padded).numel() == count**2,
    )


def batch_size_that_fits():
    tried = []

    @find_executable_batch_size(starting_batch_size=16)
    def attempt(batch):
        tried.append(batch)
        accelerator = fresh()
        model, optimizer, batches = prepared(accelerator, batch=batch)
        if len(tried) == 1:
            raise RuntimeError("CUDA out of memory.")
        return len(train(accelerator, model, optimizer, batches)) > 0

    return attempt(), tried


def accumulating(**options):
    return training(gradient_accumulation_plugin=GradientAccumulationPlugin(**options))


found = {
    "plain": training(),
    "bf16": training(mixed_precision="bf16"),
    "compiled": training(dynamo_backend="eager"),
    "accumulation over the end of the data": accumulating(num_steps=3),
    "accumulation with a sum in each batch": accumulating(num_steps=2, sync_each_batch=True),
    "dispatched batches": training(dataloader_config=DataLoaderConfiguration(dispatch_batches=True)),
    **{
        call.__name__: call()
        for call in (
            split_batches, skipped_batches, several_models_and_optimizers, prepared_twice_and_freed, named_checkpoints,
            saved_in_several_files, own_tracker, clipped_values, uneven_inputs, between_ranks, batch_size_that_fits,
        )
    },
}  # fmt: skip
if fresh().is_main_process:
    (FOLDER / "result.json").write_text(json.dumps(found))
