"""Manifests that someone has written on purpose, with a right digest: every field, one at a time.

A forged manifest is either refused before anything of the state has changed, or harmless: the state can be trained on
and saved, and no weights are others than the checkpoint's.
"""

import copy
import functools
import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from fullshard import load_state, save_state
from fullshard.checkpoint.consolidate import merge_weights
from fullshard.checkpoint.inspect import inspect_checkpoint, lines
from fullshard.checkpoint.manifest import MANIFEST, _digest
from fullshard.config.errors import CheckpointError, UserError
from fullshard.distributed import runtime
from fullshard.sft.training_state import check_progress
from tests.checkpoint.resume_programs import Case, Training, assert_same_bits
from tests.pool import ranks

WRONG = [
    None, True, 0, -1, 1, 2**70, -(2**70), 1.5, 1e300, float("nan"), float("inf"), "", "text", "../../x", "a\0b", [],
    {}, [[]], {"$": "tensor", "name": "nothing"}, {"$": "dtype", "value": "load"}, {"$": "float", "value": "x"},
    {"$": "array", "name": "nothing", "dtype": "O", "shape": [1]}, {"$": "float", "value": "inf"},
]  # fmt: skip
"""What a value is replaced by."""


def places(value, path=()):
    """The path of every value in a manifest; of long lists and of tensors of one form only the first few."""
    yield path
    if isinstance(value, dict):
        keys = list(value)
        few = keys[:3] if len(keys) > 8 and path and path[-1] in ("tensors", "state", "python", "config") else keys
        for key in few if path[-1:] != ("plan",) else ("strategy", "units"):  # `show` alone reads the rest
            yield from places(value[key], (*path, key))
    elif isinstance(value, list) and path[-2:] != ("plan", "units"):
        for i in range(min(len(value), 2)):
            yield from places(value[i], (*path, i))


def forgeries(body, rng, each):
    """Changed copies of a manifest, and what was done. `each`: how many wrong values are tried in a place."""
    for path in places(body):
        for value in rng.sample(WRONG, each):
            yield f"{path} = {value!r}", _changed(body, path, functools.partial(_put, value=value))
        if path:
            yield f"{path} removed", _changed(body, path, lambda parent, key: parent.pop(key))
        yield f"{path} with more", _changed(body, path, _add)


def _changed(body, path, change):
    holder = {"it": copy.deepcopy(body)}
    parent, key = holder, "it"
    for step in path:
        parent, key = parent[key], step
    change(parent, key)
    return holder["it"]


def _put(parent, key, value):
    parent[key] = value


def _add(parent, key):
    value = parent[key]
    if isinstance(value, dict):
        value["an_unknown_field"] = 1
    elif isinstance(value, list):
        value.append(copy.deepcopy(value[0]) if value else 1)
    elif isinstance(value, str):
        parent[key] = value * 2
    elif isinstance(value, int | float):
        parent[key] = value + 1


def write(folder: Path, body) -> None:
    text = json.dumps(body)
    (folder / MANIFEST).write_text(f'{text[:-1]}, "digest": "{_digest(text)}"}}\n' if text.endswith("}") else text)


def read(folder: Path):
    body = json.loads((folder / MANIFEST).read_text())
    del body["digest"]
    return body


def everything(training):
    """All that a restore may change, as plain values."""
    optimizer = [{k: v for k, v in group.items() if k != "params"} for group in training.optimizer.param_groups]
    numpy = np.random.get_state()
    rng = (torch.get_rng_state().tolist(), random.getstate(), numpy[1].tolist(), numpy[2])
    return copy.deepcopy((optimizer, training.scheduler.state_dict(), list(training.losses), rng))


def _refusal(folder, state):
    """Why a checkpoint is refused; None if it is loaded."""
    try:
        load_state(folder, state)
    except CheckpointError as error:
        return str(error)
    return None


def _forge_all(folder, case, rounds, each):
    training = Training(case)
    training.run(2)
    save_state(folder / "good", training.state)
    expected = {n: v for n, v in training.values().items() if n.startswith("model.")}
    body = read(folder / "good")
    victim = Training(case, seed=9)
    victim.run(1)
    cases = list(forgeries(body, random.Random(3), each))
    # A setting of the schedule of a right type is the schedule's own: one of no steps fails in its first step.
    cases = [(what, forged) for what, forged in cases if not what.endswith("'T_max') = 0")]
    if case.optimizer == "factored":  # nobody but its class knows how state of other shapes is laid out
        cases = [(what, forged) for what, forged in cases if "'spec'" not in what]
    chosen = cases if rounds is None else random.Random(4).sample(cases, rounds)
    accepted = []
    shutil.copytree(folder / "good", folder / "forged")
    for what, forged in chosen:
        before, values = everything(victim), victim.values()
        write(folder / "forged", forged)
        refusal = _refusal(folder / "forged", victim.state)
        if refusal is not None:
            assert "midway" not in refusal, (what, refusal)
            assert_same_bits(victim.values(), values)
            assert everything(victim) == before, what
            continue
        accepted.append(what)
        got = {n: v for n, v in victim.values().items() if n.startswith("model.")}
        assert_same_bits(got, expected)
        victim.losses = []
        try:
            victim.run(1)
            save_state(folder / f"again-{len(accepted)}", victim.state)
        except Exception as error:
            raise AssertionError(f"{what} was accepted, and is not harmless: {error!r}") from error
        shutil.rmtree(folder / f"again-{len(accepted)}")
        victim = Training(case, seed=9)
        victim.run(1)
    return accepted, len(chosen)


@ranks(1, timeout=120)
@pytest.mark.parametrize(
    "optimizer", ["adamw", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sgd", "factored"))]
)
def test_forged_manifests_are_refused_first_or_harmless(tmp_path, optimizer):
    accepted, count = _forge_all(tmp_path, Case(optimizer=optimizer), 50, 3)
    print(f"{len(accepted)} of {count} accepted")
    assert accepted, "nothing was tried on"


@pytest.mark.slow
@ranks(1, timeout=3000)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "factored"])
def test_every_field_forged_with_every_value(tmp_path, optimizer):
    accepted, count = _forge_all(tmp_path, Case(optimizer=optimizer), None, len(WRONG))
    print(f"{len(accepted)} of {count} accepted:", *accepted, sep="\n")


@ranks(2)
def test_a_step_beyond_all_steps(tmp_path):
    """The largest hole: numbers of a right type and no sense."""
    training = Training(Case(optimizer="factored"))
    training.run(1)
    save_state(tmp_path / "good", training.state)
    victim = Training(Case(optimizer="factored"), seed=9)
    values = victim.values()
    body = read(tmp_path / "good")
    name = next(iter(body["states"]["optimizer"]["state"]))
    runtime.barrier()
    if runtime.is_main():
        body["states"]["optimizer"]["state"][name]["count"] = 2**70
        write(tmp_path / "good", body)
    runtime.barrier()
    with pytest.raises(CheckpointError, match=r"count is out of range"):
        load_state(tmp_path / "good", victim.state)
    assert_same_bits(victim.values(), values)


def test_commands_take_a_forged_manifest_without_a_traceback(tmp_path):
    """What reads a manifest without a state: inspect and merge."""
    _llama(tmp_path)
    body, rng = read(tmp_path / "good"), random.Random(5)
    cases = list(forgeries(body, rng, 2))
    for what, forged in rng.sample(cases, 60):
        write(tmp_path / "good", forged)
        try:
            for row in lines(inspect_checkpoint(tmp_path / "good")):
                assert len(row) == 2
            if "config" in what or "base" in what or "left_out" in what:
                merge_weights(tmp_path / "good", tmp_path / "out")
                shutil.rmtree(tmp_path / "out")
        except UserError:
            assert not (tmp_path / "out").exists(), what
        except Exception as error:
            raise AssertionError(f"{what}: {error!r}") from error


@ranks(1)
def _llama(folder):
    training = Training(Case(model="llama"))
    training.run(1)
    save_state(folder / "good", training.state)


@pytest.mark.parametrize(
    "change", [{"step": 2**70}, {"step": -1}, {"step": "5"}, {"unknown": 1}, {"window": {"steps": "x"}}, {"window": 5},
               {"position": [1]}, {"epoch": None}, {"tokens": True}, {"callbacks": None}],
)  # fmt: skip
def test_the_progress_of_a_run_is_checked(change):
    from dataclasses import asdict

    from fullshard.sft.training_state import Progress

    good = {**asdict(Progress(step=3, best_value=-0.5, best_step=2)), "window": {"steps": 1, "loss": 2.5}}
    check_progress({"progress": good})
    with pytest.raises(CheckpointError, match="which no run saves"):
        check_progress({"progress": {**good, **change}})
