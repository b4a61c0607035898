"""TRL's preference trainers have the losses of one process. (`SFTTrainer`: `test_guides.py`.)"""

import pytest

from tests.integrations.launched import alone, launched, result
from tests.pool import ROOT

pytest.importorskip("trl")
pytestmark = pytest.mark.slow

DATA = ROOT / "quickstart" / "data" / "train.jsonl"
MODEL = ROOT / "quickstart" / "model"


@pytest.mark.parametrize("how", ["adapter", "reference"])
def test_dpo(how, tmp_path):
    script = ROOT / "tests" / "integrations" / "preference.py"
    alone(script, MODEL, DATA, tmp_path / "reference", how)
    launched(script, MODEL, DATA, tmp_path / "ours", how)
    for name in ("losses", "margins"):
        found, expected = (result(tmp_path / one)[name] for one in ("ours", "reference"))
        assert found == pytest.approx(expected, abs=1e-4), name
