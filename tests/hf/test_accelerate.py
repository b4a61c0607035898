"""Scripts for Accelerate and for transformers' Trainer give the losses of one process, and their checkpoints go both
ways."""

import json
from pathlib import Path
from unittest import mock

import pytest
from safetensors.torch import load_file
from torch.distributed.fsdp import StateDictType
from transformers import LlamaForCausalLM

from fullshard.config.errors import CheckpointError
from fullshard.hf import accelerate_checkpoints as checkpoints
from tests.hf.launched import EXAMPLES, ORACLE, alone, launched, result, write_llama
from tests.pool import ROOT

LOOP, TRAINER = EXAMPLES / "accelerate_loop.py", EXAMPLES / "trainer_fsdp.py"
SERVED = "Accelerate's FSDP is served by fullshard (FULL_SHARD)"
SECOND_EPOCH = slice(8, None)


SCRIPTS = {
    "loop": LOOP,
    "idioms": Path(__file__).with_name("fsdp1_idioms.py"),
    "trainer": TRAINER,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_llama(folder)
    return folder


@pytest.fixture(scope="module")
def together(model, tmp_path_factory):
    """The scripts, one after another on two ranks of one launch: the folder of each by name, and all they printed."""
    folder = tmp_path_factory.mktemp("together")
    runs = []
    for name, script in SCRIPTS.items():
        (folder / name).mkdir()
        more = ["--model", str(model)] if name == "trainer" else []
        runs.append([str(script), *more, "--output_dir", str(folder / name)])
    text = launched(Path(__file__).with_name("in_turn.py"), json.dumps(runs))
    return {name: folder / name for name in SCRIPTS}, text


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """One process, Accelerate alone."""
    folder = tmp_path_factory.mktemp("reference")
    alone(LOOP, "--output_dir", folder)
    return folder


def same(found, expected, part=slice(None)):
    assert found["losses"] == pytest.approx(expected["losses"][part], abs=1e-5)
    assert found["norms"] == pytest.approx(expected["norms"][part.start and part.start // 2 :], rel=1e-5)
    assert (found["rows"], found["right"]) == (expected["rows"], expected["right"])


def test_a_loop_has_the_losses_of_one_process(reference, together):
    folders, text = together
    assert text.count(SERVED) == 1 and "FULL_SHARD on Mesh(fsdp=2): 4 unit(s)" in text
    same(result(folders["loop"]), result(reference))
    expected, found = (load_file(folder / "model" / "model.safetensors") for folder in (reference, folders["loop"]))
    assert {k: v.shape for k, v in found.items()} == {k: v.shape for k, v in expected.items()}
    assert max((found[name] - expected[name]).abs().max() for name in expected) < 1e-4


@pytest.mark.slow
def test_a_learning_rate_of_one_ranks_own_is_refused(tmp_path):
    script = tmp_path / "loop.py"
    script.write_text(
        "import os, torch\nfrom accelerate import Accelerator\nmodel = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + int(os.environ['RANK'])))\n"
        "Accelerator().prepare(model, optimizer)\n"
    )
    with pytest.raises(AssertionError, match=r"lr of group 0 of SGD .* is 0\.1 on rank 0, 0\.2 on rank 1\. Start all"):
        launched(script)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
@pytest.mark.parametrize("writer", ["fullshard", "accelerate"])
def test_a_checkpoint_of_either_engine_is_resumed_by_either(kind, writer, reference, tmp_path):
    """The reader is set to the other type: which one a checkpoint has is found on disk, except by Accelerate."""
    kinds = ("--fsdp_state_dict_type", kind)
    other = ("--fsdp_state_dict_type", "FULL_STATE_DICT" if kind[0] == "S" else "SHARDED_STATE_DICT")
    written = ["--output_dir", tmp_path]
    resumed = ["--output_dir", tmp_path, "--resume", tmp_path / "checkpoint"]
    if writer == "accelerate":
        assert SERVED not in launched(ORACLE, LOOP, *written, flags=("--no_integrations", *kinds))
        same(result(tmp_path), result(reference))
        assert SERVED in launched(LOOP, *resumed, flags=other)
    else:
        launched(LOOP, *written, flags=kinds)
        same(result(tmp_path), result(reference))
        launched(LOOP, *resumed, flags=other)
        same(result(tmp_path), result(reference), SECOND_EPOCH)
        launched(ORACLE, LOOP, *resumed, flags=("--no_integrations", *kinds))
    same(result(tmp_path), result(reference), SECOND_EPOCH)


@pytest.mark.parametrize("patch", [checkpoints.load_model, checkpoints.load_optimizer])
def test_a_folder_that_cannot_be_loaded_is_refused_by_every_rank(patch, tmp_path):
    """Accelerate reads on the first rank only, or reports that `metadata is None`."""
    plugin = mock.Mock(fullshard=True, state_dict_type=StateDictType.SHARDED_STATE_DICT)
    name, objects = (checkpoints.MODEL, 1) if patch is checkpoints.load_model else (checkpoints.OPTIMIZER, 2)
    load = patch(lambda *args: pytest.fail("it is not complete"))
    with pytest.raises(CheckpointError, match=f"has neither {name}_0/ nor {name}.bin"):
        load(plugin, None, *[None] * objects, tmp_path)
    (tmp_path / f"{name}_0").mkdir()
    with pytest.raises(CheckpointError, match=f"{name}_0 has no .metadata: its save was interrupted"):
        load(plugin, None, *[None] * objects, tmp_path)


@pytest.mark.slow
def test_a_save_that_was_interrupted_is_not_taken_for_the_one_before(tmp_path):
    """The first save is complete; a rank is lost in the middle of the second, into the same folder."""
    script, flags = (
        ROOT / "tests" / "hf" / "interrupted_save.py",
        ("--fsdp_state_dict_type", "SHARDED_STATE_DICT"),
    )
    with pytest.raises(AssertionError, match=r"rank 1 .*was ended by SIGKILL"):
        launched(script, tmp_path, "lose a rank", flags=flags)
    for folder in (tmp_path / "pytorch_model_fsdp_0", tmp_path / "optimizer_0"):
        assert list(folder.glob("*.distcp")) and not (folder / ".metadata").exists()
    with pytest.raises(AssertionError, match=r"pytorch_model_fsdp_0 has no \.metadata: its save was interrupted"):
        launched(script, tmp_path, "load", flags=flags)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_a_checkpoint_of_a_run_without_fsdp_is_resumed_at_any_number_of_ranks(processes, reference, tmp_path):
    launched(LOOP, "--output_dir", tmp_path, "--resume", reference / "checkpoint", processes=processes)
    same(result(tmp_path), result(reference), SECOND_EPOCH)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"])
def test_every_strategy_reaches_the_engine(strategy, reference, tmp_path):
    flags = ("--fsdp_sharding_strategy", strategy)
    if strategy.startswith("HYBRID"):
        flags += ("--parallelism_config_dp_replicate_size", "2", "--parallelism_config_dp_shard_size", "2")
    text = launched(LOOP, "--output_dir", tmp_path, flags=flags, processes=4 if "HYBRID" in strategy else 2)
    assert f"served by fullshard ({strategy})" in text and f"{strategy} on Mesh(" in text
    same(result(tmp_path), result(reference))


@pytest.mark.slow
def test_the_integrations_can_be_turned_off(reference, tmp_path):
    """Accelerate then runs DDP on CPU ranks, with the same losses."""
    text = launched(LOOP, "--output_dir", tmp_path, flags=("--no_integrations",))
    assert "fullshard (" not in text and "Mesh(" not in text
    same(result(tmp_path), result(reference))


def flat(value):
    """Nested lists as one; numbers to the precision that is compared."""
    if isinstance(value, list):
        return [one for part in value for one in flat(part)]
    return [pytest.approx(value, abs=1e-5) if isinstance(value, float) else value]


@pytest.mark.slow
def test_options_and_methods_give_what_they_give_in_one_process(tmp_path):
    script = ROOT / "tests" / "hf" / "accelerate_options.py"
    for name in ("alone", "ours"):
        (tmp_path / name).mkdir()
    alone(script, tmp_path / "alone")
    text = launched(script, tmp_path / "ours")
    expected, found = result(tmp_path / "alone"), result(tmp_path / "ours")
    assert found.keys() == expected.keys() and len(found) == 17
    for name in expected:
        assert flat(found[name]) == flat(expected[name]), name
    assert text.count("join_uneven_inputs: every rank takes part") == 1


def test_a_script_may_use_the_static_methods_of_torch_s_fsdp(together):
    found = result(together[0]["idioms"])
    assert found["kinds"] == ["Tensor"] and found["same"] and found["summoned"] and found["untouched"] == []
    assert "optim_state_dict() of torch's FSDP is not served by FSDPv2: use" in found["refused"]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["TRANSFORMER_BASED_WRAP", "NO_WRAP"])
@pytest.mark.parametrize("library", ["trainer", "accelerate"])
def test_a_model_that_names_no_layers_needs_no_class(library, policy, tmp_path):
    """The layers that repeat become units, as `run_mlm` and `nlp_example` leave it to the configuration."""
    script = ROOT / "tests" / "hf" / "distilbert.py"
    for name in ("alone", "sharded"):
        (tmp_path / name).mkdir()
    if library == "accelerate":
        alone(script, library, "--output_dir", tmp_path / "alone")
    else:  # by itself Trainer doubles the loss on two processes where a model does not use `num_items_in_batch`
        launched(script, library, "--output_dir", tmp_path / "alone", flags=("--no_integrations",))
    text = launched(
        script, library, "--output_dir", tmp_path / "sharded", flags=("--fsdp_auto_wrap_policy", policy)
    )  # fmt: skip
    assert f"DistilBertForMaskedLM: FULL_SHARD on Mesh(fsdp=2): {3 if policy[0] == 'T' else 1} unit(s)" in text
    found, expected = result(tmp_path / "sharded"), result(tmp_path / "alone")
    assert found["losses"] == pytest.approx(expected["losses"], abs=1e-5)
    assert expected["losses"][0] - expected["losses"][-1] > 1.0
    assert found["right"] == expected["right"]
    saved, whole = (load_file(tmp_path / name / "model.safetensors") for name in ("sharded", "alone"))
    assert saved.keys() == whole.keys()
    # Attention does not depend on the biases of keys: their gradient is rounding, which Adam makes as large as any.
    compared = [name for name in whole if not name.endswith("k_lin.bias")]
    assert max((saved[name] - whole[name]).abs().max() for name in compared) < 1e-4


# --- transformers' Trainer -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trainer_reference(model, tmp_path_factory):
    """One process, Trainer alone."""
    folder = tmp_path_factory.mktemp("trainer")
    alone(TRAINER, "--model", model, "--output_dir", folder)
    return folder


def same_as_trainer(folder, reference):
    found, expected = result(folder), result(reference)
    for name in ("before", "losses", "eval_losses"):
        assert found[name] == pytest.approx(expected[name], abs=1e-5), name
    assert found["answer"] == expected["answer"]
    saved, whole = (load_file(one / "final" / "model.safetensors") for one in (folder, reference))
    assert saved.keys() == whole.keys() and max((saved[n] - whole[n]).abs().max() for n in whole) < 1e-4
    LlamaForCausalLM.from_pretrained(folder / "final")


def test_training_evaluation_generation_and_the_saved_model_are_those_of_one_process(trainer_reference, together):
    folders, text = together
    assert "LlamaForCausalLM: FULL_SHARD on Mesh(fsdp=2): 3 unit(s)" in text
    same_as_trainer(folders["trainer"], trainer_reference)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_a_run_resumes_from_its_checkpoint(model, kind, trainer_reference, tmp_path):
    words = ["--model", model, "--output_dir", tmp_path, "--state_dict_type", kind]
    assert "served by fullshard" in launched(TRAINER, *words)
    (tmp_path / "result.json").unlink()
    launched(TRAINER, *words, "--resume", tmp_path / "checkpoint-3")
    same_as_trainer(tmp_path, trainer_reference)


@pytest.mark.slow
def test_a_run_resumes_from_a_checkpoint_of_trainer_alone(model, trainer_reference, tmp_path):
    launched(TRAINER, "--model", model, "--output_dir", tmp_path, "--resume", trainer_reference / "checkpoint-3")
    same_as_trainer(tmp_path, trainer_reference)
