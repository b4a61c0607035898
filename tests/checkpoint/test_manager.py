"""Checkpoints: what is saved and how, which are kept, and what is refused."""

import json
import os
import pickletools
import threading
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn

from fullshard import CheckpointManager, FSDPv2, load_state, save_state
from fullshard.checkpoint import json_tree, publish
from fullshard.checkpoint.manifest import published_steps, read_manifest
from fullshard.config.errors import CheckpointError
from fullshard.distributed import runtime
from fullshard.weights.source_files import SourceFiles
from tests.checkpoint.resume_programs import Case, Training, assert_same_bits
from tests.fsdp.programs import Block, Stack, mesh_for
from tests.pool import ranks

# --- values ---------------------------------------------------------------------------------------------------------

VALUES = {
    "plain": [None, True, 3, -1.5, "text", {"a": [1, 2]}, 2**70],
    "floats": [float("inf"), float("-inf"), 0.1 + 0.2, 5e-324, -0.0],
    "keys": {1: "one", (2, 3): "pair", "$": "tag", None: 0},
    "types": (1, {2}, frozenset({3}), b"bytes\x00", 2j, OrderedDict(b=1, a=2), Counter("aab")),
    "numpy": [np.float32(1.5), np.int64(7), np.arange(6).reshape(2, 3), np.zeros((0, 2)), np.array(3.0)],
    "torch": [torch.arange(4), torch.tensor(2.5, dtype=torch.bfloat16), torch.float16, torch.Size([2]), torch.empty(0)],
    "deep": {"$": {"value": ({"x": [(1, torch.ones(2))]},)}},
}


def _same(one, other):
    assert type(one) is type(other) or isinstance(one, torch.Size)
    if isinstance(one, torch.Tensor | np.ndarray):
        assert one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            _same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            _same(a, b)
    else:
        assert one == other and repr(one) == repr(other)


def _through_json(value):
    kept = {}

    def put(where, t):
        kept[where] = t
        return {"name": where}

    data = json.loads(json.dumps(json_tree.encode(value, put), allow_nan=False))
    return json_tree.decode(data, lambda noted: kept[noted["name"]])


@pytest.mark.parametrize("name", VALUES)
def test_values_come_back_as_they_were(name):
    _same(VALUES[name], _through_json(VALUES[name]))
    assert np.isnan(_through_json([float("nan")])[0])


@pytest.mark.parametrize("bad", [object(), lambda: 0, {"a": {"b": [0, Block]}}, np.array([object()])])
def test_a_value_that_would_need_pickle_is_refused_with_its_place(bad):
    with pytest.raises(CheckpointError, match="never pickled") as caught:
        json_tree.encode({"outer": bad}, lambda where, t: {})
    assert "outer" in str(caught.value)
    if isinstance(bad, dict):
        assert "outer/a/b/1" in str(caught.value)


class Cursor:
    """A data loader that says where it is."""

    def __init__(self, at=0):
        self.at = at

    def state_dict(self):
        return {"at": self.at, "order": torch.arange(3) + self.at}

    def load_state_dict(self, state):
        self.at, self.order = state["at"], state["order"]


@ranks(1, 2)
def test_objects_and_values_are_saved_once_or_per_rank(tmp_path):
    mine = runtime.rank() * 10
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    off = torch.amp.GradScaler("cpu", enabled=False)
    state = {"shared": Cursor(3), "own": Cursor(mine), "epoch": 4, "seen": {1: (2, 3)}, "scaler": scaler, "off": off}
    save_state(tmp_path / "one", state)
    manifest = read_manifest(tmp_path / "one")
    if runtime.world_size() > 1:
        assert "ranks" in manifest.states["own"] and "own/order" in manifest.per_rank
    assert "ranks" not in manifest.states["shared"] and "shared/order" in manifest.tensors
    fresh = {"shared": Cursor(), "own": Cursor(), "epoch": None, "seen": None,
             "scaler": torch.amp.GradScaler("cpu", init_scale=2.0), "off": off}  # fmt: skip
    assert load_state(tmp_path / "one", fresh) is not None
    assert (
        fresh["shared"].at == 3
        and fresh["own"].at == mine
        and fresh["own"].order.tolist() == [mine, mine + 1, mine + 2]
    )
    assert fresh["epoch"] == 4 and fresh["seen"] == {1: (2, 3)} and fresh["scaler"].get_scale() == 8.0
    values = load_state(tmp_path / "one", epoch=None)
    assert values == {"epoch": 4}


@ranks(2)
def test_no_file_holds_a_pickle(tmp_path):
    training = Training(Case("HYBRID_SHARD"))
    training.run(2)
    with CheckpointManager(tmp_path, 1) as manager:
        manager.save(2, {**training.state, "cursor": Cursor(runtime.rank())})
    if not runtime.is_main():
        return
    files = sorted((tmp_path / "step-2").iterdir())
    assert {f.suffix for f in files} == {".json", ".safetensors"}
    for file in files:
        data = file.read_bytes()
        with pytest.raises(ValueError):
            list(pickletools.genops(data))
        assert b"PK\x03\x04" not in data[:4]
        if file.suffix == ".json":
            json.loads(data)
        else:
            with safe_open(file, "pt") as opened:
                assert all(opened.get_tensor(key) is not None for key in opened.keys())  # noqa: SIM118


@pytest.mark.slow
@ranks(4)
def test_copies_are_written_once_and_by_every_rank(tmp_path):
    for strategy in ("NO_SHARD", "HYBRID_SHARD", "FULL_SHARD"):
        torch.manual_seed(1)
        model = FSDPv2(nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64)), mesh_for(strategy), strategy=strategy)
        save_state(tmp_path / strategy, model=model)
        manifest = read_manifest(tmp_path / strategy)
        whole = sum(p.numel() * 4 for p in model.parameters())
        stored = [t for name, t in manifest.tensors.items() if name.startswith("model/")]
        assert sum(t.bytes for t in stored) == whole
        # Each rank wrote its share, give or take what is too small to split.
        sizes = [file.bytes for file in manifest.files]
        assert {file.name[:9] for file in manifest.files} == {f"rank{r:05d}" for r in range(4)}
        assert max(sizes) < whole / 4 + 16_000 and sum(sizes) < whole + 40_000


# --- the manager ----------------------------------------------------------------------------------------------------


@ranks(2)
def test_the_manager_saves_at_its_interval_and_keeps_what_it_should(tmp_path):
    model = FSDPv2(Stack(), mesh_for("FULL_SHARD"))
    with CheckpointManager(tmp_path, 2, max_to_keep=2, keep_every=6, protect=lambda step: step == 4) as manager:
        assert manager.latest() is None and manager.all_steps() == []
        saved = [step for step in range(1, 13) if manager.save_async(step, {"model": model, "step": step})]
        assert saved == [2, 4, 6, 8, 10, 12]
        manager.join()
        torch.distributed.barrier()
        assert manager.all_steps() == [4, 6, 10, 12] and manager.latest() == 12
        assert not manager.should_save(12) and manager.should_save(14)
        assert manager.save(13, {"model": model}, force=True)
        with pytest.raises(CheckpointError, match="step-13 exists already, and checkpoints are never overwritten"):
            manager.save(13, {"model": model}, force=True)
        state = {"model": model, "step": None}
        assert manager.restore(12, state) == 12 and state["step"] == 12
        with pytest.raises(CheckpointError, match=r"no checkpoint of step 9 in .*; there are \[4, 6, 12, 13\]"):
            manager.restore(9, state)
    torch.distributed.barrier()
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


@ranks(2)
def test_a_closed_manager_is_closed_and_leaves_the_job_as_it_was(tmp_path):
    for i in range(3):
        with CheckpointManager(tmp_path, 1) as manager:
            # Communicators made meanwhile, and others afterwards: torch must not name two of them alike.
            model = FSDPv2(Stack(), mesh_for("FULL_SHARD"), timeout=100.0 + i)
            manager.save(i, {"model": model})
        FSDPv2(Stack(), mesh_for("FULL_SHARD"), timeout=200.0 + i)(torch.randn(2, 8)).sum().backward()
    for call in (
        lambda: manager.save(9, {"model": model}, force=True),
        lambda: manager.restore(None, {"model": model}),
    ):
        with pytest.raises(CheckpointError, match="is closed; create another one"):
            call()


@ranks(2)
def test_an_unfinished_save_is_skipped_and_said(tmp_path):
    if runtime.is_main():
        (tmp_path / ".step-9.0123abcd.tmp").mkdir()
        (tmp_path / "step-7").mkdir()  # no manifest: not published
    model = FSDPv2(Stack(), mesh_for("FULL_SHARD"))
    told = []
    logger = runtime.get_logger()
    logger.addFilter(keep := (lambda record: told.append(record.getMessage()) or True))
    try:
        with CheckpointManager(tmp_path, 1) as manager:
            manager_steps = manager.all_steps()
            with pytest.raises(CheckpointError, match="there is no checkpoint in"):
                manager.restore(None, {"model": model})
            assert manager_steps == []
            manager.save(3, {"model": model})
            torch.distributed.barrier()
            assert published_steps(tmp_path) == [3]
            assert not (tmp_path / ".step-9.0123abcd.tmp").exists()  # removed once a newer one was published
    finally:
        logger.removeFilter(keep)
    assert not runtime.is_main() or any(".step-9.0123abcd.tmp" in line for line in told)


@ranks(2)
def test_what_does_not_fit_is_told_at_once_and_nothing_changes(tmp_path):
    training = Training(Case())
    training.run(1)
    save_state(tmp_path / "one", training.state)
    other = FSDPv2(Stack(width=12), mesh_for("FULL_SHARD"))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    before = {
        n: t._local_tensor.clone() if hasattr(t, "_local_tensor") else t.clone() for n, t in other.state_dict().items()
    }
    with pytest.raises(CheckpointError) as caught:
        load_state(tmp_path / "one", model=other, optimizer=optimizer, extra=None)
    message = str(caught.value)
    for part in (
        "model/blocks.0.up.weight has shape (20, 10) in the checkpoint and (24, 12) here",
        "model: not in the checkpoint: blocks.2", "model: in the checkpoint and not in the model:", "norm.weight",
        "optimizer: its parameter groups differ from those of the checkpoint", "1 group(s) here, 2 there",
        "it holds nothing called 'extra'; it holds losses, model, optimizer, scheduler",
    ):  # fmt: skip
        assert part in message, message
    after = {n: t._local_tensor if hasattr(t, "_local_tensor") else t for n, t in other.state_dict().items()}
    assert_same_bits(after, before)


@ranks(2)
def test_bad_requests_are_told_clearly(tmp_path):
    model = FSDPv2(Stack(), mesh_for("FULL_SHARD"))
    stray = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    for state, words in (
        ({"model": model, "opt": stray}, "belong to no model in the state"),
        ({"opt": stray}, "belong to no model in the state"),
        ({"rng": 1}, "cannot be named 'rng'"),
        ([1, 2], "expected a dict of name"),
        ({"odd": object()}, "odd: a builtins.object cannot be saved"),
        ({"sparse": torch.eye(3).to_sparse()}, "dense tensors"),
    ):
        with pytest.raises(CheckpointError, match=words):
            save_state(tmp_path / "bad", state)
    with pytest.raises(CheckpointError, match="save_interval=0: expected a whole number of 1 or more"):
        CheckpointManager(tmp_path, 0)
    with CheckpointManager(tmp_path, 1) as manager, pytest.raises(CheckpointError, match="ranks save different states"):
        manager.save(1 + runtime.rank(), {"model": model})
    with pytest.raises(CheckpointError, match="rank 1: odd/at"):
        save_state(tmp_path / "bad", odd={"at": object() if runtime.rank() else 1})
    torch.distributed.barrier()
    assert os.listdir(tmp_path) == []


@ranks(2)
def test_state_that_differs_per_rank_needs_as_many_ranks(tmp_path):
    save_state(tmp_path / "one", cursor=Cursor(runtime.rank()))
    torch.distributed.barrier()
    if runtime.is_main():
        states = read_manifest(tmp_path / "one").states
        for state in states.values():
            if "ranks" in state:
                state["ranks"].append(state["ranks"][0])
        _rewrite(tmp_path / "one", world_size=3, states=states)
    torch.distributed.barrier()
    with pytest.raises(CheckpointError, match="the state 'cursor' was saved with a different value on each of 3 ranks"):
        load_state(tmp_path / "one", cursor=Cursor())


def _rewrite(directory, **changes):
    """The manifest with changes, well-formed."""
    import dataclasses

    changed = dataclasses.replace(read_manifest(directory), **changes)
    (directory / "manifest.json").write_text(changed.dumps())


# --- frozen parameters ----------------------------------------------------------------------------------------------


def _with_base(path):
    torch.manual_seed(4)
    model = Stack()
    model.blocks.requires_grad_(False)
    model = FSDPv2(model, mesh_for("FULL_SHARD"), auto_wrap_policy={Block})
    base = SourceFiles(str(path), _fingerprint(path))
    for name, p in model.named_parameters():
        if name.startswith("blocks."):
            base.record([name], p)
    model._fullshard_base = base
    return model


def _fingerprint(path):
    from fullshard.weights.source_files import fingerprint_of

    return fingerprint_of(path)


def _base_files(path, value):
    from safetensors.torch import save_file

    if runtime.is_main():
        path.mkdir(exist_ok=True)
        save_file({"x": torch.full((8,), value)}, path / "model.safetensors")
    torch.distributed.barrier()
    return path


@ranks(2)
def test_frozen_values_of_the_base_are_left_out_and_the_base_is_checked(tmp_path):
    base = _base_files(tmp_path / "base", 1.0)
    model = _with_base(base)
    if runtime.rank() == 1:
        with torch.no_grad():
            model.blocks[1].up.weight._local_tensor.add_(1.0)  # changed on one rank: written by all
    save_state(tmp_path / "one", model=model)
    save_state(tmp_path / "all", {"model": model}, save_frozen=True)
    names = {n for n in read_manifest(tmp_path / "one").tensors if n.startswith("model/")}
    assert names == {"model/out.weight", "model/out.bias", "model/scale", "model/blocks.1.up.weight"}
    assert len([n for n in read_manifest(tmp_path / "all").tensors if n.startswith("model/")]) == 15
    expected = {n: getattr(t, "_local_tensor", t).clone() for n, t in model.state_dict().items()}
    again = _with_base(base)
    load_state(tmp_path / "one", model=again)
    assert_same_bits({n: getattr(t, "_local_tensor", t) for n, t in again.state_dict().items()}, expected)
    with torch.no_grad():
        again.blocks[0].up.weight._local_tensor.add_(1.0)
    with pytest.raises(CheckpointError, match=r"blocks.0.up.weight was left out .* has been changed here"):
        load_state(tmp_path / "one", model=again)
    moved = _base_files(tmp_path / "moved", 1.0)
    load_state(tmp_path / "one", model=_with_base(moved))  # the same files elsewhere are the same base
    other = _base_files(tmp_path / "other", 2.0)
    with pytest.raises(CheckpointError) as caught:
        load_state(tmp_path / "one", model=_with_base(other))
    assert (
        str(base) in str(caught.value) and str(other) in str(caught.value) and "the files differ" in str(caught.value)
    )


@ranks(2)
def test_a_planned_model_without_memory_is_filled(tmp_path):
    torch.manual_seed(0)
    model = FSDPv2(Stack(), mesh_for("FULL_SHARD"), auto_wrap_policy={Block})
    save_state(tmp_path / "one", model=model)
    with torch.device("meta"):
        empty = Stack()
    empty.scale = torch.zeros(8)
    empty = FSDPv2(empty, mesh_for("FULL_SHARD"), auto_wrap_policy={Block})
    with pytest.raises(CheckpointError, match="has no values yet"):
        save_state(tmp_path / "two", model=empty)
    load_state(tmp_path / "one", model=empty)
    expected = {n: getattr(t, "_local_tensor", t) for n, t in model.state_dict().items()}
    assert_same_bits({n: getattr(t, "_local_tensor", t) for n, t in empty.state_dict().items()}, expected)
    x = torch.randn(4, 8)
    assert torch.equal(empty(x), model(x))


@ranks(2)
def test_tied_weights_stay_tied(tmp_path):
    training = Training(Case(model="llama"))
    save_state(tmp_path / "one", model=training.model)
    manifest = read_manifest(tmp_path / "one")
    assert manifest.states["model"]["tied"] == {"lm_head.weight": "model.embed_tokens.weight"}
    other = Training(Case(model="llama"), seed=8)
    load_state(tmp_path / "one", model=other.model)
    assert other.model.lm_head.weight is other.model.model.embed_tokens.weight
    assert torch.equal(other.model.lm_head.weight.full_tensor(), training.model.lm_head.weight.full_tensor())


@ranks(2)
def test_plain_modules_and_torch_s_reader_work_too(tmp_path):
    """A model that is not sharded is saved once; `torch.distributed.checkpoint.load` reads the files."""
    import torch.distributed.checkpoint as dcp

    from fullshard.checkpoint.dcp_storage import CheckpointReader

    torch.manual_seed(2)
    model = nn.Linear(6, 5)
    sharded = FSDPv2(Stack(), mesh_for("FULL_SHARD"))
    save_state(tmp_path / "one", plain=model, sharded=sharded)
    other = nn.Linear(6, 5)
    load_state(tmp_path / "one", plain=other)
    assert torch.equal(other.weight, model.weight)
    wanted = {"plain/weight": torch.zeros(5, 6), "sharded/out.weight": torch.zeros(8, 8)}
    dcp.load(wanted, storage_reader=CheckpointReader(tmp_path / "one"))
    assert torch.equal(wanted["plain/weight"], model.weight)
    assert torch.equal(wanted["sharded/out.weight"], sharded.out.weight.full_tensor())


@ranks(2)
def test_the_best_checkpoint_when_it_was_saved_is_kept(tmp_path):
    """Training finds a better step while a save in the background is being published: what that save names stays."""
    model, best, published = FSDPv2(Block(8), mesh_for("FULL_SHARD")), [1], threading.Event()

    def wait_there(name):
        if name == "publish":
            assert published.wait(30)

    manager = CheckpointManager(tmp_path, 1, max_to_keep=1, protect=lambda step: step == best[0])
    with pytest.MonkeyPatch.context() as patch, manager:
        manager.save(1, {"model": model, "best": 1})
        manager.save(2, {"model": model, "best": 1})
        patch.setattr(publish, "stage", wait_there)
        manager.save_async(3, {"model": model, "best": 1})
        best[0] = 4  # evaluated, not saved yet
        published.set()
        manager.join()
        runtime.barrier()
        assert manager.all_steps() == [1, 3], "the newest names step 1 as the best"
        runtime.barrier()
        manager.save(4, {"model": model, "best": 4})
        runtime.barrier()
        assert manager.all_steps() == [4]
