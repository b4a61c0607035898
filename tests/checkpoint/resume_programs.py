"""Trainings that are interrupted and resumed: small models with dropout, so that random generators matter too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

import fullshard.spmd as xs
from fullshard import FSDPv2
from fullshard.distributed import runtime
from tests.fsdp.programs import Block, llama, mesh_for

WIDTH = 10


@dataclass(frozen=True)
class Case:
    """One way to train and save."""

    strategy: str = "FULL_SHARD"
    model: str = "stack"
    optimizer: str = "adamw"
    offload: bool = False
    background: bool = False
    precision: str | None = None

    def __str__(self) -> str:
        marks = [self.strategy, self.model, self.optimizer]
        marks += [word for word, on in (("offload", self.offload), ("async", self.background)) if on]
        return "-".join([*marks, *([self.precision] if self.precision else [])])


class Noisy(nn.Module):
    """Blocks with dropout, uneven sizes, a scalar, a frozen parameter, and a buffer that differs from rank to rank."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.drop = nn.Dropout(0.2)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.out = nn.Linear(WIDTH, 7)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.table = nn.Parameter(torch.randn(3, WIDTH), requires_grad=not frozen)
        if frozen:
            self.blocks[0].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.drop(block(x)) * self.scale
        return self.out(self.norm(x) + self.table.sum(0))


class Parallel(nn.Module):
    """Two linear layers split over a tensor-parallel axis."""

    def __init__(self, mesh: xs.Mesh) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, 7)
        if mesh.get_axis_name_idx("model") is not None:
            xs.mark_sharding(self.up.weight, mesh, ("model", None))
            xs.mark_sharding(self.down.weight, mesh, (None, "model"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def _mesh(strategy: str) -> xs.Mesh:
    if strategy.startswith("HYBRID") and runtime.world_size() == 1:
        return xs.Mesh([0], (1, 1), ("replica", "fsdp"))
    return mesh_for(strategy)


def build(case: Case, seed: int) -> nn.Module:
    """The model of a case, wrapped."""
    torch.manual_seed(seed)
    mesh = _mesh(case.strategy)
    policy: Any = {Block}
    if case.model == "parallel":
        world = runtime.world_size()
        mesh = xs.Mesh(np.arange(world), (world // 2, 2) if world > 1 else (1, 1), ("fsdp", "model"))
        model: nn.Module = Parallel(mesh)
        policy = None
    elif case.model in ("llama", "lora"):
        model = llama(tied=True)
        policy = {"LlamaDecoderLayer"}
        if case.model == "lora":
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.1))
    else:
        model = Noisy(frozen=case.model == "frozen")
    return FSDPv2(
        model, mesh, auto_wrap_policy=policy, strategy=case.strategy, cpu_offload=case.offload,
        mixed_precision=case.precision, small_parameter_bytes=256,
    )  # fmt: skip


class Factored(torch.optim.Optimizer):
    """Keeps state of other shapes than its parameters', a number, and fp64 beside fp32."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["rows"] = torch.zeros_like(p[..., 0] if p.dim() > 1 else p)
                    state["wide"] = torch.zeros_like(p, dtype=torch.float64)
                    state["count"] = 0
                state["count"] += 1
                square = p.grad.square()
                state["rows"].lerp_(square.mean(-1) if p.dim() > 1 else square, 0.1)
                state["wide"].add_(p.grad)
                scale = state["rows"].sqrt().add(1e-6)
                p.sub_(group["lr"] * p.grad / (scale.unsqueeze(-1) if p.dim() > 1 else scale))
                p.sub_(1e-3 * state["wide"].to(p.dtype))


def optimizer_for(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": trained[::2]}, {"params": trained[1::2], "weight_decay": 0.0}]
    if case.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=1e-2, momentum=0.9)
    if case.optimizer == "factored":
        return Factored(trained, lr=1e-2)
    return torch.optim.AdamW(groups, lr=1e-2, fused=case.optimizer == "fused", foreach=case.optimizer == "foreach")


class Training:
    """A model, its optimizer and schedule, and the losses so far."""

    def __init__(self, case: Case, seed: int = 5):
        self.case = case
        self.model = build(case, seed)
        self.optimizer = optimizer_for(case, self.model)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.losses: list[float] = []

    @property
    def state(self) -> dict[str, Any]:
        return {
            "model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "losses": self.losses,
        }  # fmt: skip

    def run(self, steps: int) -> None:
        """Train; batches are drawn from this rank's generator, so that it has to be right."""
        for _ in range(steps):
            if self.case.model in ("llama", "lora"):
                ids = torch.randint(3, 60, (2, 6))
                loss = self.model(input_ids=ids, labels=ids).loss
            elif self.case.model == "parallel":
                loss = self.model(xs.mark_sharding(torch.randn(4, WIDTH), self.model.mesh, ("fsdp", None)))
                loss = loss.square().mean()
            else:
                loss = self.model(torch.randn(4, WIDTH)).square().mean()
            loss.backward()
            self.model.clip_grad_norm_(1.0)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.full_tensor().item() if hasattr(loss, "full_tensor") else loss.item())

    def values(self) -> dict[str, torch.Tensor]:
        """Every parameter, buffer and piece of optimizer state, as this rank holds it."""
        found = {f"model.{n}": t for n, t in self.model.state_dict().items()}
        names = {id(p): n for n, p in self.model.named_parameters()}
        for p, state in self.optimizer.state.items():
            found |= {f"{names[id(p)]}.{k}": torch.as_tensor(v) for k, v in state.items()}
        return {n: getattr(t, "_local_tensor", t).detach().clone() for n, t in found.items()}

    def whole_values(self) -> dict[str, torch.Tensor]:
        """The same as whole tensors."""
        found = {f"model.{n}": t for n, t in self.model.state_dict().items()}
        names = {id(p): n for n, p in self.model.named_parameters()}
        for p, state in self.optimizer.state.items():
            found |= {f"{names[id(p)]}.{k}": torch.as_tensor(v) for k, v in state.items()}
        return {n: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone() for n, t in found.items()}


def assert_same_bits(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].dtype == value.dtype and got[name].shape == value.shape, name
        assert got[name].device == value.device, name
        assert torch.equal(got[name], value), name
