"""TRL's preference trainers have the losses of one process. (`SFTTrainer`: `test_guides.py`.)"""

import pytest
from safetensors.torch import load_file

from tests.hf.launched import alone, launched, result
from tests.pool import ROOT

pytestmark = pytest.mark.slow

DATA = ROOT / "quickstart" / "data" / "train.jsonl"
MODEL = ROOT / "quickstart" / "model"


@pytest.mark.parametrize("how", ["adapter", "reference"])
def test_dpo(how, tmp_path):
    script = ROOT / "tests" / "hf" / "preference.py"
    alone(script, MODEL, DATA, tmp_path / "reference", how)
    launched(script, MODEL, DATA, tmp_path / "ours", how)
    for name in ("losses", "margins"):
        found, expected = (result(tmp_path / one)[name] for one in ("ours", "reference"))
        assert found == pytest.approx(expected, abs=1e-4), name


ALIKE = {"rel": 1e-4, "abs": 1e-4}


def test_grpo_with_fixed_completions(tmp_path):
    """Every kind of loss, from the same completions: nothing is left to what was sampled."""
    script = ROOT / "tests" / "hf" / "grpo_fixed.py"
    alone(script, MODEL, tmp_path / "reference")
    launched(script, MODEL, tmp_path / "ours")
    found, expected = result(tmp_path / "ours"), result(tmp_path / "reference")
    assert len(expected) == 16 and found.keys() == expected.keys()
    for case, values in expected.items():
        assert found[case].keys() == values.keys() and min(values["grad_norm"]) > 1
        for name, numbers in values.items():
            if case == "accumulated" and name in ("kl", "entropy"):
                continue  # the mean over micro-batches, each of which has another mean on other numbers of processes
            assert found[case][name] == pytest.approx(numbers, **ALIKE), (case, name)
        files = [next((tmp_path / one / case / "final").glob("*.safetensors")) for one in ("ours", "reference")]
        saved, whole = map(load_file, files)
        assert saved.keys() == whole.keys() and max((saved[n] - whole[n]).abs().max() for n in whole) < 1e-3, case


PREFERENCES = ("DPO_adapter", "DPO_sync", "DPO_before", "KTO_plain")
REWARDS = ("Reward_plain",)
GENERATING = ("GRPO_judged", "GRPO_adapter", "RLOO_plain")


@pytest.mark.parametrize("cases", [PREFERENCES, REWARDS, GENERATING], ids=lambda cases: cases[0].split("_")[0])
def test_other_trainers(cases, tmp_path):
    """With a reference model, a reward model that is sharded too, and completions that the trained model generates."""
    script = ROOT / "tests" / "hf" / "trl_trainers.py"
    alone(script, MODEL, tmp_path / "reference", *cases)
    text = launched(script, MODEL, tmp_path / "ours", *cases)
    found, expected = result(tmp_path / "ours"), result(tmp_path / "reference")
    assert found.keys() == expected.keys() and len(found) == len(cases) + 1
    for case, values in expected.items():
        assert found[case].keys() == values.keys() and "loss" in values
        for name, numbers in values.items():
            assert found[case][name] == pytest.approx(numbers, abs=1e-4), (case, name)
    for case in cases:
        files = [next((tmp_path / one / case / "final").glob("*.safetensors")) for one in ("ours", "reference")]
        saved, whole = map(load_file, files)
        assert saved.keys() == whole.keys() and max((saved[n] - whole[n]).abs().max() for n in whole) < 1e-3, case
    if cases == GENERATING:
        assert text.count("LlamaForSequenceClassification: FULL_SHARD on Mesh(fsdp=2)") == 2  # trained and resumed
