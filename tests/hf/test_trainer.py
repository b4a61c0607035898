"""transformers' Trainer with `fsdp` has the losses of one process, resumes, and saves weights that can be loaded."""

import pytest
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from tests.hf.launched import EXAMPLES, alone, launched, result

SCRIPT = EXAMPLES / "trainer_fsdp.py"


@pytest.fixture(scope="module")
def reference(model, tmp_path_factory):
    """One process, Trainer alone."""
    folder = tmp_path_factory.mktemp("reference")
    alone(SCRIPT, "--model", model, "--output_dir", folder)
    return folder


def same(folder, reference):
    found, expected = result(folder), result(reference)
    for name in ("before", "losses", "eval_losses"):
        assert found[name] == pytest.approx(expected[name], abs=1e-5), name
    assert found["answer"] == expected["answer"]
    saved, whole = (load_file(one / "final" / "model.safetensors") for one in (folder, reference))
    assert saved.keys() == whole.keys() and max((saved[n] - whole[n]).abs().max() for n in whole) < 1e-4
    LlamaForCausalLM.from_pretrained(folder / "final")


def test_training_evaluation_generation_and_the_saved_model_are_those_of_one_process(reference, together):
    folders, text = together
    assert "LlamaForCausalLM: FULL_SHARD on Mesh(fsdp=2): 3 unit(s)" in text
    same(folders["trainer"], reference)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_a_run_resumes_from_its_checkpoint(model, kind, reference, tmp_path):
    words = ["--model", model, "--output_dir", tmp_path, "--state_dict_type", kind]
    assert "served by fullshard" in launched(SCRIPT, *words)
    (tmp_path / "result.json").unlink()
    launched(SCRIPT, *words, "--resume", tmp_path / "checkpoint-3")
    same(tmp_path, reference)


@pytest.mark.slow
def test_a_run_resumes_from_a_checkpoint_of_trainer_alone(model, reference, tmp_path):
    launched(SCRIPT, "--model", model, "--output_dir", tmp_path, "--resume", reference / "checkpoint-3")
    same(tmp_path, reference)
