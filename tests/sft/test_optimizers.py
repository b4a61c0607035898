"""Every optimizer that `optim` can name: transformers' choice of class and options, one device's steps on shards, and
checkpoints that continue them on any number of ranks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.optimization import Adafactor
from transformers.training_args import OptimizerNames

import fullshard.spmd as xs
from fullshard import FSDPv2
from fullshard.checkpoint import load_state, save_state
from fullshard.config.errors import CheckpointError, ConfigError, FSDPError
from fullshard.device.torch_private import local_of, spec_of
from fullshard.distributed import runtime
from fullshard.distributed.ranks import exchange
from fullshard.optim.names import REFUSED, SERVED
from fullshard.planner.memory import MemoryOptions, state_memory
from fullshard.planner.optimizer_state import OptimizerMemory, names_apart
from fullshard.sft.optimizer import class_and_options, make_optimizer, optimizer_from_class
from fullshard.sft.sft_config import SFTConfig
from fullshard.spmd.redistribute import layout_of
from fullshard.spmd.tensor import full_of
from tests.pool import ranks
from tests.sft.runs import global_batch, losses, plain_losses, settings, train
from tests.sft.tiny import make_trained

ARGUMENTS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9, "nesterov": True}, "adagrad": {"lr_decay": 0.1, "eps": 1e-9},
    "rmsprop": {"momentum": 0.5, "alpha": 0.9, "eps": 1e-7, "centered": True},
}  # fmt: skip
"""What is given in `optim_args` here."""
KINDS = ("sgd", "adafactor", "muon", "lion_32bit", "adamw_8bit", "paged_adamw_32bit")
"""One of each mechanism, for the tests that are not slow."""
STEPS = 5
EXACT = dict.fromkeys(SERVED, 0.0) | {"adafactor": 1e-6, "adamw_torch_fused": 1e-7}
"""How far steps on shards may be from one device's, with the same gradients: Adafactor adds up means in another order,
and torch's fused kernel rounds the last elements of a tensor, which are not a full vector, in its own way."""
EXACT_ON_GPU = EXACT | {"lion_32bit": 1e-6}
"""The same on GPUs: one device's Lion is bitsandbytes' kernel there, which rounds the factor of the weight decay to
float32 first. A wrong sign would be as large as the learning rate, 1e-2."""


# --- names and options ------------------------------------------------------------------------------------------------


def test_every_name_of_transformers_is_served_or_refused() -> None:
    theirs = {name.value for name in OptimizerNames}
    assert theirs == (SERVED.keys() | REFUSED.keys()) - {"muon"}
    assert not SERVED.keys() & REFUSED.keys()
    for name in REFUSED:
        with pytest.raises(ConfigError, match=rf"optim {name} is not supported: .*; use \w+"):
            SFTConfig(optim=name)


@pytest.mark.parametrize("name", sorted(SERVED.keys() - {"muon"}))
def test_class_and_options_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    given = ARGUMENTS.get(name, {})
    numbers = {"learning_rate": 2e-4, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-7}
    text = ",".join(f"{key}={value}" for key, value in given.items()) or None
    args = TrainingArguments(output_dir=str(tmp_path), optim=name, optim_args=text, use_cpu=True, **numbers)
    their_class, their_options = Trainer.get_optimizer_cls_and_kwargs(args, None)
    kind, options = class_and_options(SFTConfig(optim=name, optim_args=given, **numbers))
    if name == "lion_32bit":  # ours, without bitsandbytes
        their_options = {key: value for key, value in their_options.items() if key in ("lr", "betas")}
    else:
        assert kind is their_class
    assert options == their_options


WRONG = [
    ({"optim": "adamw"}, "optim is 'adamw'.*expected one of adamw_torch, "),
    ({"optim": "sgd", "optim_args": {"momentun": 0.9}}, "sgd has no argument 'momentun'; did you mean momentum"),
    ({"optim": "adafactor", "optim_args": {"beta1": 0.9}}, "adafactor has no argument 'beta1'; it takes none"),
    ({"optim": "sgd", "optim_args": {"momentum": "much"}}, "momentum is 'much'; expected a number"),
    ({"optim": "muon", "optim_args": {"adjust_lr_fn": "none"}}, "adjust_lr_fn is 'none'; expected original or"),
    ({"optim_target_modules": "all-linear"}, "optim_target_modules selects layers for GaLore"),
    ({"optim": "muon", "loraplus_lr_ratio": 16.0, "use_peft_lora": True}, "leave it out with optim muon"),
]


@pytest.mark.parametrize(("given", "message"), WRONG)
def test_wrong_settings(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SFTConfig(**given)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs bitsandbytes, which is not installed: .* or use lion_32bit"):
        SFTConfig(optim="lion_8bit")
    SFTConfig(optim="lion_32bit")


# --- steps on shards --------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Parameters of many shapes. Those of 4,096 elements and more have 8-bit state: shards of `wide`, `uneven` and
    `experts` begin at blocks of 256 values on 2 and 4 ranks, and 17 rows are divided unevenly."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 64)
        self.wide = nn.Linear(64, 96)
        self.uneven = nn.Linear(256, 17)
        self.experts = nn.Parameter(torch.randn(4, 16, 96) * 0.1)
        self.frozen = nn.Parameter(torch.randn(8, 8), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.short = nn.Parameter(torch.randn(3))  # on 4 ranks the last has nothing of it
        self.head = nn.Linear(64, 64, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self) -> None:
        """Gradients are set by hand."""


class Crooked(nn.Module):
    """On 2 ranks the second shard of the weight begins inside a block."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(700, 13) * 0.1)

    def forward(self) -> None:
        """As above."""


def made(kind: type[nn.Module], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return kind()


def wrapped(model: nn.Module, strategy: str = "FULL_SHARD", **options: Any) -> Any:
    n = runtime.world_size()
    groups = 2 if "HYBRID" in strategy and n % 2 == 0 else 1
    mesh = xs.Mesh(np.arange(n), (groups, n // groups), ("replica", "fsdp"))
    return FSDPv2(model, mesh, strategy=strategy, small_parameter_bytes=0, **options)


def config_of(name: str, **more: Any) -> SFTConfig:
    return SFTConfig(optim=name, optim_args=ARGUMENTS.get(name), learning_rate=1e-2, weight_decay=0.1, **more)


def set_gradients(model: nn.Module, step: int) -> None:
    """The same gradients for a whole and for a sharded model."""
    draw = torch.Generator().manual_seed(step)
    for name, p in model.named_parameters():
        whole = torch.randn(p.shape, generator=draw, dtype=p.dtype).to(p.device)
        if not p.requires_grad or (name == "scale" and step == 0):  # a parameter whose first gradient comes late
            continue
        p.grad = torch.zeros_like(p)
        if isinstance(model, FSDPv2):
            local_of(p.grad).copy_(whole[layout_of(spec_of(p)).slices(p.shape, runtime.rank())])
        else:
            p.grad.copy_(whole)


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        set_gradients(model, step)
        optimizer.step()
        optimizer.zero_grad()


def on_one_device(model: nn.Module, config: SFTConfig) -> Any:
    """The optimizer as a script for one device makes it, from the libraries themselves."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decay, rate = config.weight_decay, config.learning_rate
    if config.optim == "muon":
        apart = ("table", "experts", "head", "embed_tokens", "lm_head")
        hidden = [p for name, p in named if p.dim() == 2 and not any(part in name for part in apart)]
        muon = torch.optim.Muon(hidden, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
        rest = [p for name, p in named if p.dim() != 2 or any(part in name for part in apart)]
        return _Both(muon, *([torch.optim.AdamW(_decayed(rest, decay), lr=rate)] if rest else []))
    args = TrainingArguments(
        output_dir="unused", optim=config.optim, learning_rate=rate, use_cpu=True,
        optim_args=",".join(f"{k}={v}" for k, v in (config.optim_args or {}).items()) or None,
    )  # fmt: skip
    kind, options = Trainer.get_optimizer_cls_and_kwargs(args, None)
    if options.get("optim_bits") == 8:
        import bitsandbytes

        manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
        manager.initialize()  # it knows parameters by their address, which another one may have by now
        for module in model.modules():  # as in Trainer.create_optimizer
            if isinstance(module, nn.Embedding):
                manager.override_config(module.weight, "optim_bits", 32)
    return kind(_decayed([p for _, p in named], decay), **options)


def _decayed(parameters: list[nn.Parameter], decay: float) -> list[dict[str, Any]]:
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


class _Both:
    """Two optimizers that are stepped together."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()


def distance(one: nn.Module, sharded: nn.Module) -> float:
    pairs = zip(one.parameters(), sharded.parameters(), strict=True)
    return max(float((p.detach().cpu() - full_of(q).cpu()).abs().max()) for p, q in pairs)


@ranks(2)
def test_steps_are_those_of_one_device() -> None:
    for name in ("adamw_torch", "adafactor", "muon", "adamw_8bit", "lion_32bit"):
        check_steps(name, "FULL_SHARD")


@pytest.mark.slow
@ranks(1, 2, 4)
def test_steps_of_every_optimizer_are_those_of_one_device(world_size: int) -> None:
    for name in SERVED:
        check_steps(name, "FULL_SHARD")


@pytest.mark.slow
@ranks(2, 4)
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"])
def test_steps_with_every_strategy(strategy: str, offload: bool, world_size: int) -> None:
    for name in SERVED:
        check_steps(name, strategy, cpu_offload=offload)


def check_steps(name: str, strategy: str, device: Any = None, **options: Any) -> None:
    """Compare steps on shards with those of one device, which is `device` or the ranks' own."""
    config = config_of(name)
    one = made(Net).to(device or runtime.device())
    start = [p.detach().clone() for p in one.parameters()]
    sharded = wrapped(copy.deepcopy(one), strategy, **options)
    take_steps(one, on_one_device(one, config), range(STEPS))
    take_steps(sharded, make_optimizer(sharded, config), range(STEPS))
    moved = [float((p.detach() - q).abs().max()) for p, q in zip(one.parameters(), start, strict=True)]
    trained = [m for m, p in zip(moved, one.parameters(), strict=True) if p.requires_grad and p.dim() > 0]
    assert min(trained) > 1e-3, (name, moved)
    within = EXACT if next(one.parameters()).device.type == "cpu" else EXACT_ON_GPU
    assert distance(one, sharded) <= within[name], (name, strategy)


@ranks(2)
def test_8_bit_blocks_that_begin_at_shards() -> None:
    """Where shards do not begin at blocks, each shard is updated as a tensor of its own."""
    import bitsandbytes

    config = config_of("adamw_8bit")
    whole = made(Crooked).weight.detach()
    pieces = [nn.Parameter(piece.clone()) for piece in whole.chunk(2)]
    theirs = bitsandbytes.optim.AdamW(pieces, lr=1e-2, optim_bits=8, weight_decay=0.1)
    one, sharded = made(Crooked), wrapped(made(Crooked))
    take_steps(one, on_one_device(one, config), range(STEPS))
    take_steps(sharded, make_optimizer(sharded, config), range(STEPS))
    for step in range(STEPS):
        set_gradients(one, step)
        for piece, grad in zip(pieces, one.weight.grad.chunk(2), strict=True):
            piece.grad = grad.clone()
        theirs.step()
    result = full_of(sharded.weight)
    assert torch.equal(result, torch.cat([piece.detach() for piece in pieces]))
    assert 0 < float((result - one.weight.detach()).abs().max()) < 2e-2


@ranks(2)
def test_overrides_of_bitsandbytes_count_from_the_first_step() -> None:
    """transformers' `Trainer` asks for 32-bit state of embeddings this way."""
    import bitsandbytes

    model = wrapped(made(Crooked))
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    manager.register_module_override(model, "weight", {"optim_bits": 32})
    try:
        optimizer = bitsandbytes.optim.AdamW8bit(model.parameters())
        take_steps(model, optimizer, range(1))
        assert optimizer.state[model.weight]["state1"].dtype == torch.float32
    finally:
        manager.initialize()


# --- whole runs -------------------------------------------------------------------------------------------------------


class _Constant:
    """A schedule that does nothing."""

    def step(self) -> None: ...


def check_losses(name: str, kind: str, folder: Path, engine: dict[str, Any] | None = None, **more: Any) -> None:
    """A run of the trainer has the losses of a plain loop on one device."""
    world = runtime.world_size()
    config = settings(
        folder, max_steps=8, lr_scheduler_type="constant", optim=name, optim_args=ARGUMENTS.get(name),
        learning_rate=RATES.get(name, 5e-3), weight_decay=0.01, **global_batch(world), **more,
    )  # fmt: skip
    trainer = train(make_trained(kind), config, engine=engine)
    ours = losses(trainer)
    alone = None
    if runtime.is_main():
        one = make_trained(kind)
        order = trainer.loop.loader.sampler.order
        alone = plain_losses(one, on_one_device(one, config), _Constant(), trainer.parts.train, order, config)
    alone = exchange(alone, "oracle", watched=False)[0]
    assert alone is not None and alone[0] - min(alone) > 0.02, (name, alone)
    assert ours == pytest.approx(alone, abs=LOSSES.get(name, 1e-4)), name


RATES = {"sgd": 0.1, "adagrad": 0.02, "muon": 0.02, "adafactor": 0.01}
RATES |= dict.fromkeys((name for name in SERVED if "rmsprop" in name), 1e-3)
LOSSES = {"muon": 1e-3}
"""Muon rounds to bf16, so the last bits of gradients, which depend on the order of sums, change its updates."""


@ranks(2)
def test_losses_of_one_device(tmp_path: Path) -> None:
    check_losses("muon", "full", tmp_path / "muon")
    check_losses("adamw_8bit", "lora", tmp_path / "8 bits")


@pytest.mark.slow
@ranks(2)
@pytest.mark.parametrize("name", [name for name in SERVED if "paged" not in name])
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_losses_of_one_device_with_every_optimizer(name: str, kind: str, tmp_path: Path) -> None:
    check_losses(name, kind, tmp_path)


@pytest.mark.slow
@ranks(4)
@pytest.mark.parametrize("name", ["muon", "adafactor", "adamw_8bit", "lion_32bit"])
@pytest.mark.parametrize(
    "engine",
    [
        {"sharding_strategy": "HYBRID_SHARD", "dp_replicate_size": 2, "dp_shard_size": 2},
        {"sharding_strategy": "FULL_SHARD", "offload_params": True},
    ],
    ids=["hybrid", "offload"],
)
def test_losses_of_one_device_on_4_ranks(name: str, engine: dict[str, Any], tmp_path: Path) -> None:
    check_losses(name, "full", tmp_path, engine)


@pytest.mark.slow
@ranks(2)
@pytest.mark.parametrize("changes", [{}, {"fp16": True}, {"use_peft_lora": True, "use_4bit_quantization": True}])
@pytest.mark.parametrize("name", ["muon", "adafactor", "adamw_8bit", "lion_8bit"])
def test_a_resumed_run_continues_bit_for_bit(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    def run(folder: Path, **more: Any) -> Any:
        place = broadcast(folder)
        config = settings(place, max_steps=6, optim=name, save_strategy="steps", save_steps=3, **changes, **more)
        return train(make_trained("full"), config)

    straight = run(tmp_path / "straight")
    values = {key: full_of(p) for key, p in straight.loop.model.named_parameters() if p.requires_grad}
    last = Path(straight.args.output_dir) / "checkpoints" / "step-3"
    resumed = run(tmp_path / "resumed", resume_from_checkpoint=str(last))
    assert losses(resumed)[-3:] == losses(straight)[-3:]
    for key, p in resumed.loop.model.named_parameters():
        if p.requires_grad:
            assert torch.equal(full_of(p), values[key]), key


def broadcast(folder: Path) -> Path:
    """The same folder on every rank."""
    return exchange(folder, "folder")[0]


# --- checkpoints ------------------------------------------------------------------------------------------------------


@ranks(1, 2, 4)
def _save(names: list[str], folder: Path, world_size: int) -> None:
    for name in names:
        model = wrapped(made(Net))
        optimizer = make_optimizer(model, config_of(name))
        take_steps(model, optimizer, range(3))
        save_state(folder / name, model=model, optimizer=optimizer)
        take_steps(model, optimizer, range(3, STEPS))
        values = {key: full_of(p) for key, p in model.named_parameters()}
        if runtime.is_main():
            torch.save(values, folder / f"{name}.pt")


@ranks(1, 2, 4)
def _resume(names: list[str], folder: Path, exact: bool, strategy: str, world_size: int) -> None:
    for name in names:
        model = wrapped(made(Net, seed=9), strategy)
        optimizer = make_optimizer(model, config_of(name))
        load_state(folder / name, model=model, optimizer=optimizer)
        take_steps(model, optimizer, range(3, STEPS))
        values = torch.load(folder / f"{name}.pt")
        limit = 0.0 if exact else EXACT[name]
        for key, p in model.named_parameters():
            assert float((full_of(p) - values[key]).abs().max()) <= limit, (name, key)


@pytest.mark.slow
def test_checkpoints_continue_exactly(tmp_path: Path) -> None:
    _save(list(KINDS), tmp_path, world_size=2)
    _resume(list(KINDS), tmp_path, True, "FULL_SHARD", world_size=2)
    _resume(list(KINDS), tmp_path, False, "NO_SHARD", world_size=1)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(1, 4), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2)])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "HYBRID_SHARD", "NO_SHARD"])
def test_checkpoints_on_other_ranks(before: int, after: int, strategy: str, tmp_path: Path) -> None:
    _save(list(SERVED), tmp_path, world_size=before)
    _resume(list(SERVED), tmp_path, False, strategy, world_size=after)


@ranks(1, 2)
def _save_crooked(folder: Path, world_size: int) -> None:
    model = wrapped(made(Crooked))
    optimizer = make_optimizer(model, config_of("adamw_8bit"))
    take_steps(model, optimizer, range(2))
    save_state(folder / f"on-{world_size}", model=model, optimizer=optimizer)


@ranks(1, 2)
def _load_crooked(folder: Path, saved_on: int, world_size: int) -> None:
    model = wrapped(made(Crooked))
    optimizer = make_optimizer(model, config_of("adamw_8bit"))
    if saved_on == world_size:
        load_state(folder / f"on-{saved_on}", model=model, optimizer=optimizer)
        return
    message = rf"8-bit state of weight was quantized in blocks that .*resume on {saved_on} rank\(s\)"
    with pytest.raises(CheckpointError, match=message):
        load_state(folder / f"on-{saved_on}", model=model, optimizer=optimizer)


def test_8_bit_state_that_fits_one_number_of_ranks_only(tmp_path: Path) -> None:
    for world in (1, 2):
        _save_crooked(tmp_path, world_size=world)
    for saved_on, world in ((1, 2), (2, 1), (2, 2)):
        _load_crooked(tmp_path, saved_on, world_size=world)


class Single(nn.Module):
    """One value: the second of two ranks holds nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self) -> None: ...


@ranks(2)
def test_a_rank_that_holds_nothing_counts_steps_too(tmp_path: Path) -> None:
    model = wrapped(made(Single))
    optimizer = make_optimizer(model, config_of("adamw_8bit"))
    take_steps(model, optimizer, range(2))
    assert optimizer.state[model.weight]["step"] == 2
    save_state(tmp_path / "saved", model=model, optimizer=optimizer)


# --- memory -----------------------------------------------------------------------------------------------------------


@ranks(2)
@pytest.mark.parametrize("names", [KINDS, pytest.param(tuple(SERVED), marks=pytest.mark.slow)], ids=["few", "all"])
def test_predicted_state_is_what_a_step_allocates(names: tuple[str, ...]) -> None:
    for name in names:
        config = config_of(name)
        model = wrapped(made(Net))
        optimizer = make_optimizer(model, config)
        take_steps(model, optimizer, range(2))
        memory = OptimizerMemory(name, config.optimizer_arguments(), names_apart(model, name))
        predicted = state_memory(model.plan, MemoryOptions(accelerator=False, optimizer=memory))
        tensors = [t for state in optimizer.state.values() for key, t in state.items() if "qmap" not in key]
        held = sum(
            local.nbytes for t in tensors if isinstance(t, torch.Tensor) and t.dim() > 0
            for local in [local_of(t) if hasattr(t, "placements") else t]
        )  # fmt: skip
        most = max(exchange(held, "bytes"))
        assert predicted.optimizer == pytest.approx(most, abs=64, rel=0.01), name


# --- classes of the user's --------------------------------------------------------------------------------------------


class ByNorm(torch.optim.Optimizer):
    """Scales updates by the norm of the parameter, of which it sees the piece in memory or, with `whole`, all."""

    def __init__(self, params: Any, lr: float = 0.1, weight_decay: float = 0.0, whole: bool = False) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.whole = whole

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            seen = p if self.whole or not hasattr(p, "placements") else local_of(p)
            size = seen.norm()
            p.add_(p.grad * (float(size) if not self.whole else size), alpha=-0.1)


@ranks(2)
def test_a_class_is_tried_on_shards() -> None:
    model = wrapped(made(Net))
    for kind, options in ((torch.optim.NAdam, {"lr": 0.1}), (ByNorm, {"whole": True})):
        optimizer = optimizer_from_class(model, kind, options, weight_decay=0.1)
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
        take_steps(model, optimizer, range(1))
    refusals = [
        (ByNorm, {}, "ByNorm does not treat a sharded parameter as one: a matrix"),
        (torch.optim.LBFGS, {}, "LBFGS cannot update these parameters .*closure"),
        (torch.optim.Adafactor, {}, "Adafactor cannot update sharded parameters .*transformers' Adafactor"),
        (torch.optim.AdamW, {"beta": 1}, "AdamW cannot update these parameters .*unexpected keyword argument 'beta'"),
        ("adamw", {}, "got 'adamw'; expected a class of optimizers"),
    ]
    for kind, options, message in refusals:
        with pytest.raises(ConfigError, match=message):
            optimizer_from_class(model, kind, options, weight_decay=0.0)


@pytest.mark.slow
@ranks(2)
def test_optimizers_of_a_script(tmp_path: Path) -> None:
    """Made before the model is sharded, they have the losses of one device; what cannot work is refused at once."""
    share = {"max_steps": 6, "lr_scheduler_type": "constant", **global_batch(2)}
    for i, make in enumerate(SCRIPTS):
        model = make_trained("full")
        config = settings(tmp_path / str(i), **share)
        trainer = train(model, config, optimizers=(make(model.parameters()), None))
        ours, one = losses(trainer), make_trained("full")
        order = trainer.loop.loader.sampler.order
        alone = plain_losses(one, make(one.parameters()), _Constant(), trainer.parts.train, order, config)
        assert ours == pytest.approx(alone, abs=1e-4) and alone[0] - min(alone) > 0.02
    for kind, message in (
        (torch.optim.LBFGS, "LBFGS needs a closure"),
        (torch.optim.Adafactor, "Adafactor needs means"),
    ):
        model = make_trained("full")
        with pytest.raises((ConfigError, FSDPError), match=message):
            train(model, settings(tmp_path / kind.__name__, **share), optimizers=(kind(model.parameters()), None))


def _adamw_8bit(parameters: Any) -> torch.optim.Optimizer:
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(parameters, lr=1e-2)


def _adafactor(parameters: Any) -> torch.optim.Optimizer:
    return Adafactor(parameters, lr=0.3, scale_parameter=True, relative_step=False)


SCRIPTS = (_adamw_8bit, _adafactor)


@ranks(2)
def test_kinds_of_bitsandbytes_that_cannot_be_sharded() -> None:
    import bitsandbytes

    for kind, message in (
        (bitsandbytes.optim.LAMB, "norm of the whole parameter"),
        (bitsandbytes.optim.AdEMAMix, "two averages"),
    ):
        model = wrapped(made(Net))
        with pytest.raises(FSDPError, match=message):
            take_steps(model, kind(model.parameters()), range(1))
