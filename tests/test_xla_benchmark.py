"""What `benchmarks/xla_engine.py` reads from the compiler's dump."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import xla_engine

PROGRAM = """
  %all-gather.1 = f32[128,64]{1,0} all-gather(%copy.1), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}
  %all-reduce = (f32[10]{0}, bf16[6]{0}) all-reduce(%a, %b), channel_id=2, replica_groups=[2,2]<=[4], to_apply=%sum
  ROOT %reduce-scatter.3 = f32[8]{0} reduce-scatter(%g), channel_id=3, replica_groups={{0,1,2,3}}, dimensions={0}
  %get = f32[10]{0} get-tuple-element(%all-reduce), index=0
"""


def test_collectives_by_kind_and_bytes(tmp_path: Path) -> None:
    found = list(xla_engine.collectives(PROGRAM))
    assert found == [("all-gather", 32768, 4), ("all-reduce", 52, 2), ("reduce-scatter", 32, 4)]
    (tmp_path / "module_1.cpu_after_optimizations.txt").write_text(PROGRAM)
    (tmp_path / "module_0.cpu_after_optimizations.txt").write_text(PROGRAM.splitlines()[2])
    read = xla_engine.read_dump(tmp_path)
    assert read["collectives"] == {"all-gather": (1, 32768), "reduce-scatter": (1, 128), "all-reduce": (1, 52)}
    assert read["sent"] == pytest.approx(32768 * 3 / 4 + 52 + 32 * 3)
