"""TRL's trainers have the losses of one process, and leave files that PEFT and transformers load."""

import pytest
from safetensors.torch import load_file

from tests.integrations.launched import EXAMPLES, alone, launched, result
from tests.pool import ROOT

pytest.importorskip("trl")
pytestmark = pytest.mark.slow

DATA = ROOT / "quickstart" / "data" / "train.jsonl"
MODEL = ROOT / "quickstart" / "model"


def test_sft_with_an_adapter_and_resuming(tmp_path):
    """The script of PEFT's guide; resumed from a checkpoint of ours, and from one of TRL alone."""
    words = ["--model", MODEL, "--data", DATA, "--output_dir"]
    script, reference, ours = EXAMPLES / "peft_sft.py", tmp_path / "reference", tmp_path / "ours"
    alone(script, *words, reference)
    for resume in (None, ours / "checkpoint-3", reference / "checkpoint-3"):
        flags = ("--fsdp_state_dict_type", "SHARDED_STATE_DICT")
        text = launched(script, *words, ours, *(["--resume", resume] if resume else []), flags=flags)
        assert "PeftModel: FULL_SHARD on Mesh(fsdp=2)" in text
        found, expected = result(ours), result(reference)
        assert found["losses"] == pytest.approx(expected["losses"], abs=1e-4)
        assert found["eval_losses"] == pytest.approx(expected["eval_losses"], abs=1e-4)
        assert found["answer"] == expected["answer"]
        saved, whole = (load_file(one / "final" / "adapter_model.safetensors") for one in (ours, reference))
        assert saved.keys() == whole.keys() and max((saved[n] - whole[n]).abs().max() for n in whole) < 1e-3


@pytest.mark.parametrize("how", ["adapter", "reference"])
def test_dpo(how, tmp_path):
    script = ROOT / "tests" / "integrations" / "preference.py"
    alone(script, MODEL, DATA, tmp_path / "reference", how)
    launched(script, MODEL, DATA, tmp_path / "ours", how)
    for name in ("losses", "margins"):
        found, expected = (result(tmp_path / one)[name] for one in ("ours", "reference"))
        assert found == pytest.approx(expected, abs=1e-4), name
