"""What scripts and callbacks call on a trainer's `args`, under the names of transformers' `TrainingArguments`: places
of the ranks, batch sizes, log levels, and the settings as JSON.

Part of `SFTConfig`. torch and transformers are imported when they are needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from fullshard.config.redaction import hide_in

PLAIN = (bool, int, float, str, type(None))


@dataclass
class ArgumentMethods:
    """Methods and properties of `TrainingArguments`."""

    _given: Any = field(default=None, repr=False, compare=False)
    """The object that a script gave as `args`, if it is one of another library."""

    def __getattr__(self, name: str) -> Any:
        """`set_training` and its like are transformers' own; other names are those of the object that a script gave as
        `args`, whose class may have fields of the script's own."""
        if name.startswith("set_"):
            from transformers import TrainingArguments

            if hasattr(TrainingArguments, name):
                return functools.partial(getattr(TrainingArguments, name), self)
        given = vars(self).get("_given")
        if given is None or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no setting or method {name!r}")
        return getattr(given, name)

    # --- ranks ------------------------------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        from fullshard.distributed import runtime

        return runtime.world_size()

    @property
    def process_index(self) -> int:
        from fullshard.distributed import runtime

        return runtime.rank()

    @property
    def local_process_index(self) -> int:
        from fullshard.distributed import runtime

        return runtime.local_rank()

    @property
    def device(self) -> Any:
        """This rank's device."""
        import torch

        from fullshard.distributed import runtime

        return torch.device("cpu") if self._on_cpu and not runtime.is_spmd() else runtime.device()

    @property
    def n_gpu(self) -> int:
        """The number of GPUs of this process."""
        from fullshard.device import accelerator

        return int(accelerator.is_accelerator(self.device))

    _n_gpu = n_gpu

    @property
    def parallel_mode(self) -> Any:
        """transformers' name for one process per device, or for one process alone."""
        from transformers.training_args import ParallelMode

        alone = ParallelMode.NOT_PARALLEL
        return ParallelMode.DISTRIBUTED if self.world_size > 1 else alone

    @property
    def should_log(self) -> bool:
        """Whether this rank logs: the first one."""
        return self.process_index == 0

    should_save = should_log

    @contextlib.contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Inside, the first rank (of each node, if `local`) runs before the others."""
        from fullshard.distributed import runtime

        runtime.use_spmd(device="cpu" if self._on_cpu else None)
        first = (self.local_process_index if local else self.process_index) == 0
        try:
            if not first:
                runtime.barrier()
            yield
        finally:
            if first:
                runtime.barrier()

    @property
    def _on_cpu(self) -> bool:
        from fullshard.parallel.settings import EngineSettings

        settings: Any = self
        return bool(settings.use_cpu or EngineSettings.from_environment().use_cpu)

    # --- derived values ---------------------------------------------------------------------------------------------

    @property
    def train_batch_size(self) -> int:
        settings: Any = self
        return settings.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        settings: Any = self
        return settings.per_device_eval_batch_size

    @property
    def ddp_timeout_delta(self) -> timedelta:
        settings: Any = self
        return timedelta(seconds=settings.ddp_timeout)

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """The number of warmup steps in a run of this many steps."""
        settings: Any = self
        return settings.warmup(num_training_steps)

    def get_process_log_level(self) -> int:
        """The log level of this rank, as a number of Python's `logging`."""
        from transformers.utils import logging

        settings: Any = self
        name = settings.log_level if self.should_log else settings.log_level_replica
        return logging.get_verbosity() if name == "passive" else logging.log_levels[name]

    # --- the settings as JSON ---------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Every setting, as JSON takes it, without secrets."""
        fields = dataclasses.fields(self)
        values = {one.name: _plain(getattr(self, one.name)) for one in fields if one.init and one.name[0] != "_"}
        hidden: dict[str, Any] = hide_in(values)
        return hidden

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """The same with text for everything that is neither a number nor true or false, for loggers."""
        values = {**self.to_dict(), "train_batch_size": self.train_batch_size, "eval_batch_size": self.eval_batch_size}
        return {name: value if type(value) in PLAIN[:4] else str(value) for name, value in values.items()}


def _plain(value: Any) -> Any:
    """A value as JSON takes it."""
    if hasattr(value, "to_dict"):
        value = value.to_dict()
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(each) for each in value]
    return value if isinstance(value, PLAIN) else str(value).removeprefix("torch.")
