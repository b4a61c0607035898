"""The same losses as one device, whatever the number of ranks, the strategy, packing, or what trains.

The oracle is a plain loop on an unsharded model that gives every document a row of its own.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import get_scheduler

from fullshard.config.errors import ConfigError, DataError
from fullshard.distributed import runtime
from fullshard.distributed.ranks import exchange
from tests.data.tiny import text_rows
from tests.pool import ranks
from tests.sft.runs import global_batch, losses, plain_losses, settings, train
from tests.sft.tiny import make_trained

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
WHOLE = [(s, kind, packing) for s, kind, packing in itertools.product(STRATEGIES, ("full", "lora"), (False, True))]
FEW = [("FULL_SHARD", "full", True), ("NO_SHARD", "lora", False), ("HYBRID_SHARD", "lora", True)]


def one_device(made: Any, table: Any, order: Any, config: Any) -> list[float]:
    """The plain loop."""
    trained = [p for p in made.parameters() if p.requires_grad]
    decayed = {id(p) for name, p in made.named_parameters() if "norm" not in name}
    groups = [
        {"params": [p for p in trained if id(p) in decayed], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if id(p) not in decayed], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=config.learning_rate)
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=3, num_training_steps=config.max_steps)
    return plain_losses(made, optimizer, schedule, table, order, config)


def check(strategy: str, kind: str, packing: bool, world: int, folder: Path) -> None:
    config = settings(
        folder, packing=packing, lr_scheduler_type="cosine", warmup_steps=3, weight_decay=0.01, **global_batch(world),
        learning_rate=5e-3,
    )  # fmt: skip
    engine: dict[str, Any] = {"sharding_strategy": strategy}
    if strategy.startswith("HYBRID"):
        engine |= {"dp_replicate_size": 2 if world == 4 else world, "dp_shard_size": 2 if world == 4 else 1}
    trainer = train(make_trained(kind), config, engine=engine)
    assert trainer.model.plan.strategy == strategy
    ours = losses(trainer)
    alone = (
        one_device(make_trained(kind), trainer.parts.train, trainer.loop.loader.sampler.order, config)
        if runtime.is_main()
        else None
    )
    alone = exchange(alone, "oracle", watched=False)[0]
    assert alone is not None and alone[0] - alone[-1] > 0.05, "a curve that goes nowhere shows nothing"
    assert ours == pytest.approx(alone, abs=1e-4)


@ranks(2)
@pytest.mark.parametrize(("strategy", "kind", "packing"), FEW[:2])
def test_losses_of_one_device_on_2_ranks(strategy: str, kind: str, packing: bool, tmp_path: Path) -> None:
    check(strategy, kind, packing, 2, tmp_path)


@pytest.mark.slow
@ranks(4)
@pytest.mark.parametrize(("strategy", "kind", "packing"), FEW[2:])
def test_losses_of_one_device_on_4_ranks(strategy: str, kind: str, packing: bool, tmp_path: Path) -> None:
    check(strategy, kind, packing, 4, tmp_path)


@pytest.mark.slow
@ranks(1, 2, 4)
@pytest.mark.parametrize(("strategy", "kind", "packing"), WHOLE)
def test_losses_of_one_device_everywhere(
    strategy: str, kind: str, packing: bool, world_size: int, tmp_path: Path
) -> None:
    check(strategy, kind, packing, world_size, tmp_path)


@ranks(2)
@pytest.mark.parametrize(
    ("changes", "rows", "told"),
    [
        ({"learning_rate": 1e-3}, 60, r"learning_rate is 0\.005 on rank 0, 0\.001 on rank 1\."),
        ({"seed": 7}, 60, r"seed is 42 on rank 0, 7 on rank 1"),
        ({}, 59, "ranks 1 read other data than rank 0"),
    ],
)  # fmt: skip
def test_ranks_with_other_settings_or_data_are_refused_before_the_first_step(
    changes: dict[str, Any], rows: int, told: str, tmp_path: Path
) -> None:
    """As where a learning rate comes from each machine's own environment, or each machine has its own copy of data."""
    other = runtime.rank() == 1
    config = settings(tmp_path, max_steps=1, **(changes if other else {}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "local_rank", lambda: 0)  # each rank reads its own data, as on two machines
        patch.setattr(runtime, "local_world_size", lambda: 1)
        config.cache_dir = str(tmp_path / f"cache-{runtime.rank()}")
        with pytest.raises((ConfigError, DataError), match=told):
            train(make_trained("full"), config, text_rows(rows if other else 60))
