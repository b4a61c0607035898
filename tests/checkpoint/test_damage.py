"""Damaged checkpoints: always an error that names the damage, never a wrong weight."""

import dataclasses
import random
import shutil

import pytest
import torch

from fullshard import CheckpointManager, load_state
from fullshard.checkpoint.manifest import FileEntry, TensorEntry, read_manifest
from fullshard.config.errors import CheckpointError
from fullshard.distributed import runtime
from tests.checkpoint.resume_programs import Case, Training, assert_same_bits
from tests.pool import ranks


def _truncate(directory, rng):
    file = rng.choice(sorted(directory.iterdir()))
    size = file.stat().st_size
    with open(file, "r+b") as stream:
        stream.truncate(rng.randrange(size))


def _flip(directory, rng):
    file = rng.choice(sorted(directory.iterdir()))
    data = bytearray(file.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def _swap(directory, rng):
    one, other = rng.sample(sorted(directory.glob("*.safetensors")), 2)
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def _remove(directory, rng):
    rng.choice(sorted(directory.iterdir())).unlink()


def _extend(directory, rng):
    with open(rng.choice(sorted(directory.iterdir())), "ab") as stream:
        stream.write(rng.randbytes(rng.randrange(1, 100)))


def _from_another_step(directory, rng):
    file = rng.choice(sorted(directory.iterdir()))
    shutil.copy(directory.parent / "step-1" / file.name, file)


def _rewritten(directory, rng):
    """A well-formed manifest, with a right digest, that says something wrong."""
    manifest = read_manifest(directory)
    names = sorted(manifest.tensors)
    one = rng.choice(names)
    tensor = manifest.tensors[one]
    kind = rng.choice(["swap", "rename", "drop", "shape", "dtype", "begin", "file", "sum", "size", "version", "step"])
    tensors, files, changes = dict(manifest.tensors), list(manifest.files), {}
    if kind == "swap":
        other = rng.choice([n for n in names if n != one])
        tensors[one], tensors[other] = tensors[other], tensors[one]
        if tensors[one] == tensor:
            tensors.pop(one)
    elif kind == "rename":
        tensors[one + "x"] = tensors.pop(one)
    elif kind == "drop":
        tensors[one] = TensorEntry(tensor.dtype, tensor.shape, tensor.pieces[1:])
        if not tensor.pieces[0].sizes or 0 in tensor.shape:
            tensors.pop(one)
    elif kind == "shape":
        tensors[one] = dataclasses.replace(tensor, shape=(*tensor.shape, 1))
    elif kind == "dtype":
        tensors[one] = dataclasses.replace(tensor, dtype="I32" if tensor.dtype != "I32" else "F32")
    elif kind == "begin":
        first = dataclasses.replace(tensor.pieces[0], begin=tensor.pieces[0].begin + 4)
        tensors[one] = dataclasses.replace(tensor, pieces=(first, *tensor.pieces[1:]))
    elif kind == "file":
        first = dataclasses.replace(tensor.pieces[0], file=1 - tensor.pieces[0].file)
        tensors[one] = dataclasses.replace(tensor, pieces=(first, *tensor.pieces[1:]))
    elif kind == "sum":
        files[0] = FileEntry(files[0].name, files[0].bytes, "0" * 64)
    elif kind == "size":
        files[0] = FileEntry(files[0].name, files[0].bytes + 8, files[0].sha256)
    elif kind == "step":
        changes["step"] = 17
    text = dataclasses.replace(manifest, tensors=tensors, files=tuple(files), **changes).dumps()
    if kind == "version":
        from fullshard.checkpoint.manifest import _digest

        body = text[: text.rindex(', "digest"')].replace('"format_version": 1', '"format_version": 2') + "}"
        text = f'{body[:-1]}, "digest": "{_digest(body)}"}}\n'
    (directory / "manifest.json").write_text(text)


DAMAGE = [_truncate, _flip, _swap, _remove, _extend, _from_another_step, _rewritten]


def _fuzz(folder, rounds):
    training = Training(Case("FULL_SHARD"))
    runtime.seed(3, per_rank=True)
    with CheckpointManager(folder / "saved", 1) as manager:
        for step in (1, 2):
            training.run(1)
            manager.save(step, training.state)
    torch.distributed.barrier()
    victim = Training(Case("FULL_SHARD"), seed=7)
    victim.run(1)
    before = victim.values()
    rng = random.Random(20)
    for number in range(rounds):
        damage = DAMAGE[number % len(DAMAGE)]
        seed = rng.randrange(2**32)
        if runtime.is_main():
            shutil.copytree(folder / "saved", folder / "damaged")
            damage(folder / "damaged/step-2", random.Random(seed))
        torch.distributed.barrier()
        with pytest.raises(CheckpointError) as caught:
            load_state(folder / "damaged/step-2", victim.state)
        assert "step-2" in str(caught.value), (damage, seed, caught.value)
        assert_same_bits(victim.values(), before)
        torch.distributed.barrier()
        if runtime.is_main():
            shutil.rmtree(folder / "damaged")
        torch.distributed.barrier()


@ranks(2)
def test_damage_is_always_found_and_nothing_changes(tmp_path):
    _fuzz(tmp_path, 4 * len(DAMAGE))


@pytest.mark.slow
@ranks(2, timeout=600)
def test_much_damage_is_always_found_and_nothing_changes(tmp_path):
    _fuzz(tmp_path, 100 * len(DAMAGE))


@ranks(2)
def test_a_damaged_file_is_named_and_the_one_before_offered(tmp_path):
    training = Training(Case())
    with CheckpointManager(tmp_path, 1) as manager:
        for step in (1, 2, 3):
            training.run(1)
            manager.save(step, training.state)
        values = training.values()
        torch.distributed.barrier()
        files = {f.name: f for f in read_manifest(tmp_path / "step-3").files}
        if runtime.is_main():
            for step, place in ((3, 400), (2, -1)):
                path = tmp_path / f"step-{step}/rank00001-0.safetensors"
                data = bytearray(path.read_bytes())
                data[place] ^= 1
                path.write_bytes(data)
        torch.distributed.barrier()
        state = Training(Case(), seed=4).state
        with pytest.raises(CheckpointError) as caught:
            manager.restore(None, state)
        message = str(caught.value)
        assert f"{tmp_path}/step-3/rank00001-0.safetensors is damaged: its sha256 is" in message
        assert files["rank00001-0.safetensors"].sha256 in message
        assert "The checkpoint of step 1 is intact: load it with restore(1, …)" in message
        assert manager.restore(None, state, fallback=True) == 1
        assert len(state["losses"]) == 1 and values
