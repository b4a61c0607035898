"""The errors a user of fullshard sees.

Each one is a user's mistake, or a limit they ran into, told in one message: what was given, what was
expected, what to do. The command line prints the message alone; broken invariants inside the library are
plain `assert`s and keep their traceback.
"""

from __future__ import annotations


def first_line(error: BaseException) -> str:
    """What another library's error says, in one line; its kind where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class UserError(Exception):
    """Something the user can put right; the message says how."""

    exit_code = 2
    """The exit code of a process that ends with this error."""


class RuntimeSetupError(UserError, RuntimeError):
    """The processes cannot be set up as asked (launcher variables, devices, rendezvous)."""


class RanksMissingError(RuntimeSetupError):
    """Other ranks did not come to the rendezvous: not this rank's mistake, and a restart may help."""

    exit_code = 69


class MeshError(UserError, ValueError):
    """A mesh that cannot exist, or that does not fit the devices there are."""


class SpecError(UserError, ValueError):
    """A partition spec that does not fit its tensor or its mesh."""


class LayoutError(UserError, ValueError):
    """A tensor whose layout does not allow what was asked of it."""


class UnsupportedError(UserError, NotImplementedError):
    """A right request that this version of torch, or this backend, cannot carry out exactly."""


class NameMissingError(UserError, AttributeError):
    """A name of another library that has no meaning here; the message says what stands for it."""


class BatchError(UserError, ValueError):
    """A batch that the loader's sharding does not fit."""


class BatchKeyError(UserError, KeyError):
    """A batch whose keys are not those of the loader's sharding."""

    __str__ = Exception.__str__  # KeyError would print the message in quotes


class FSDPError(UserError, RuntimeError):
    """A module that cannot be wrapped as asked, or a wrapped one used in a way that cannot work."""


class WeightsError(UserError, RuntimeError):
    """Weight files that cannot be read, do not fit the model, or cannot be written."""


class CheckpointError(UserError, RuntimeError):
    """A checkpoint that cannot be written, is damaged, or does not fit what it is loaded into."""


class RankLostError(FSDPError, CheckpointError):
    """Another rank is gone, or does not answer: not this rank's mistake, and a restart may help."""

    exit_code = 69

    def __init__(self, message: str, at: str = ""):
        super().__init__(message)
        self.at = at
        """Where in the program a rank was that waited for it."""


class RanksDivergedError(FSDPError, CheckpointError):
    """Ranks entered different collectives: the program takes different branches on them."""


class QuantizationError(UserError, ValueError):
    """A quantisation that does not exist, or weights it cannot be applied to."""


class DataError(UserError, ValueError):
    """Training data that cannot be read or used as it is."""


class ConfigError(UserError, ValueError):
    """Settings that do not exist, do not fit together, or cannot be carried out here."""


class TrainingError(UserError, RuntimeError):
    """A training run that cannot go on."""
