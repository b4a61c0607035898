"""Programs that are compiled during a run. `train/step_record.py` takes the names in `REPLACES` from here."""

from __future__ import annotations

from typing import Any

from fullshard import runtime

REPLACES = ("step_watchers",)

WARM_UP = 3
"""Steps in which programs are compiled as a matter of course: the first makes the optimizer's state."""


def compilations() -> int:
    """The number of programs that were compiled so far in this process."""
    import torch_xla.debug.metrics as metrics

    return int(metrics.counter_value("UncachedCompile") or 0)


class CompileWatch:
    """Warns where a step after the first ones compiles another program. A callback of the run."""

    def __init__(self) -> None:
        self._steps, self._before = 0, 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        self._before = compilations()

    def on_step_end(self, args: Any, state: Any, control: Any, **facts: Any) -> None:
        self._steps += 1
        if self._steps > WARM_UP and (new := compilations() - self._before) > 0:
            runtime.warn_once(
                "recompiled",
                f"step {state.global_step} compiled {new} new program(s), which takes long on XLA: batches or code "
                f"differ from those of the steps before",
            )


def step_watchers(folder: Any, loop: Any) -> list[Any]:
    """The callbacks of a run that watch its steps."""
    return [CompileWatch()]
