"""The examples run, and give the same losses at any number of ranks."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from fullshard import runtime
from tests.pool import ranks
from tests.xla import examples

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"


def _run(name, *arguments):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *arguments])
        said = []
        patch.setattr(runtime, "print0", lambda *values, **_: said.append(" ".join(map(str, values))))
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return "\n".join(said)


@ranks(2)
def test_the_guides_examples():
    said = _run("fsdp_train.py")
    losses = set(re.findall(r"loss (\S+ → \S+)", said))
    assert losses == {"5.1190 → 2.8900"}, said
    assert "laid out as ('fsdp', None, None)" in said


@ranks(1, 4)
def test_a_hugging_face_llama():
    said = _run("llama_fsdp.py", "--steps", "3")
    # The seed and the global batch are the same at any number of ranks, so these are, too.
    assert re.findall(r"loss (\S+),", said) == ["5.5599", "5.3292", "5.1909"], said


@ranks(4)
def test_a_hugging_face_llama_with_copies_and_bf16():
    said = _run("llama_fsdp.py", "--steps", "3", "--strategy", "HYBRID_SHARD", "--mixed-precision", "bf16")
    assert said.startswith("HYBRID_SHARD on Mesh(replica=2, fsdp=2)")
    losses = [float(x) for x in re.findall(r"loss (\S+),", said)]
    assert all(abs(a - b) < 5e-3 for a, b in zip(losses, [5.5599, 5.3292, 5.1909], strict=True)), said


@ranks(2)
def test_the_first_sample_of_the_xla_guide():
    said = examples.run("fsdp_usage.py")
    if runtime.is_main():
        assert examples.values(said)["loss ()"][0] == pytest.approx(414.1754, rel=1e-5)


@pytest.mark.slow
@ranks(2, 4)
def test_the_samples_of_the_xla_guides():
    said = {name: examples.run(name) for name in examples.SCRIPTS}
    assert all(bool(text) == runtime.is_main() for text in said.values()) and len(said) == 6
    if runtime.is_main():
        found = {name: examples.values(text) for name, text in said.items()}
        losses = [found["fsdp_auto_wrap.py"][f"loss{step} ()"][0] for step in range(3)]
        assert losses == pytest.approx([4.314327, 4.228589, 4.145386], rel=1e-5)
        assert found["fsdp_gradient_checkpointing.py"]["loss ()"][0] == pytest.approx(4.314327, rel=1e-5)
