"""Scripts for Accelerate and Trainer with tensor parallelism: the losses of one process, and each row counted once."""

from pathlib import Path

import pytest

from tests.hf.launched import EXAMPLES, alone, launched, result, write_llama
from tests.pool import ROOT

SCRIPT = Path(__file__).with_name("tensor_parallel.py")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_llama(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_the_mesh_of_a_script(processes, model, tmp_path):
    for name in ("alone", "ours"):
        (tmp_path / name).mkdir()
    alone(SCRIPT, "--model", model, "--output_dir", tmp_path / "alone")
    text = launched(SCRIPT, "--model", model, "--output_dir", tmp_path / "ours", processes=processes)
    assert f"Mesh(fsdp={processes // 2}, tp=2)" in text and "the model is split when it is prepared" in text
    found, expected = result(tmp_path / "ours"), result(tmp_path / "alone")
    assert found["losses"] == pytest.approx(expected["losses"], abs=1e-5)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    assert (found["answers"], found["rows"]) == (expected["answers"], expected["rows"])


@pytest.mark.slow
def test_trainer_with_the_launcher_s_flag(model, tmp_path):
    """The example divides its batch by the number of processes; here two of them share rows."""
    text = (EXAMPLES / "trainer_fsdp.py").read_text()
    groups = 'int(os.environ.get("WORLD_SIZE", "2")) // 2'
    assert 'int(os.environ.get("WORLD_SIZE", "1"))' in text
    script = tmp_path / "script.py"
    script.write_text(text.replace('int(os.environ.get("WORLD_SIZE", "1"))', groups))
    for name in ("alone", "ours"):
        (tmp_path / name).mkdir()
    alone(script, "--model", model, "--output_dir", tmp_path / "alone")
    flags = ("--tp_size", "2")
    launched(script, "--model", model, "--output_dir", tmp_path / "ours", flags=flags, processes=4)
    found, expected = result(tmp_path / "ours"), result(tmp_path / "alone")
    for name in ("before", "losses", "eval_losses"):
        assert found[name] == pytest.approx(expected[name], abs=1e-5), name
    assert found["answer"] == expected["answer"]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_sft_of_trl_with_an_adapter(processes, tmp_path):
    """Its loss multiplies by the head's weight itself, and its count of tokens divides by the ranks that share rows."""
    script = Path(__file__).with_name("trl_tensor_parallel.py")
    for name in ("alone", "ours"):
        (tmp_path / name).mkdir()
    model = ROOT / "quickstart" / "model"
    alone(script, "--model", model, "--output_dir", tmp_path / "alone")
    flags = ("--tp_size", "2")
    launched(script, "--model", model, "--output_dir", tmp_path / "ours", flags=flags, processes=processes)
    found, expected = result(tmp_path / "ours"), result(tmp_path / "alone")
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-4)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
    assert found["num_tokens"] == expected["num_tokens"]
