"""The exceptions of fullshard.

Each one is a mistake of the user, or a limit that they reached, in one message: what was given, what was expected, what
to do. The command line prints the message without a traceback. Broken invariants inside the library are plain `assert`s
and keep their traceback.
"""

from __future__ import annotations

import re

from fullshard.config.redaction import hide


def first_line(error: BaseException) -> str:
    """The first line of an exception's message; its class name if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def one_line(error: BaseException, most: int = 300) -> str:
    """An exception's message on one line of at most `most` characters; its class name if the message is empty."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= most else f"{text[:most]}…"


def for_people(error: BaseException) -> str:
    """An exception's message as it is printed: without secrets, and with the middle of very long words left out."""
    return re.sub(r"\S{500,}", lambda word: f"{word[0][:200]}…{word[0][-100:]}", hide(str(error)))


class UserError(Exception):
    """An error that the user can correct; the message tells how."""

    exit_code = 2
    """The exit code of a process that this error ends."""


class RuntimeSetupError(UserError, RuntimeError):
    """Processes that cannot be set up (launcher variables, devices, rendezvous)."""


class RanksMissingError(RuntimeSetupError):
    """Other ranks did not arrive at the rendezvous: not this rank's fault, and a restart may help."""

    exit_code = 69


class MeshError(UserError, ValueError):
    """A mesh that is invalid, or does not fit the available devices."""


class SpecError(UserError, ValueError):
    """A partition spec that does not fit its tensor or its mesh."""


class LayoutError(UserError, ValueError):
    """A tensor whose layout does not allow the operation."""


class LossLayoutError(LayoutError, TypeError):
    """A rank's loss and a sharded tensor as arguments of one operator. A `TypeError`, so that Python goes on from
    `loss += penalty` to `loss + penalty`."""


class UnsupportedError(UserError, NotImplementedError):
    """A valid request that this version of torch, or this backend, cannot execute exactly."""


class NameMissingError(UserError, AttributeError):
    """A name of PyTorch/XLA that does not exist here; the message names the replacement."""


class BatchError(UserError, ValueError):
    """A batch that does not fit the loader's sharding."""


class BatchKeyError(UserError, KeyError):
    """A batch whose keys differ from those of the loader's sharding."""

    __str__ = Exception.__str__  # KeyError would print the message in quotes


class FSDPError(UserError, RuntimeError):
    """A module that cannot be wrapped, or a wrapped module that is used incorrectly."""


class WeightsError(UserError, RuntimeError):
    """Weight files that cannot be read, do not fit the model, or cannot be written."""


class CheckpointError(UserError, RuntimeError):
    """A checkpoint that cannot be written, is damaged, or does not fit what it is loaded into."""


class RankLostError(FSDPError, CheckpointError):
    """Another rank is gone, or does not respond: not this rank's fault, and a restart may help."""

    exit_code = 69

    def __init__(self, message: str, at: str = ""):
        super().__init__(message)
        self.at = at
        """The position of a rank that waited for it."""


class RanksDivergedError(FSDPError, CheckpointError):
    """Ranks entered different collectives: the program takes different branches on them."""


class QuantizationError(UserError, ValueError):
    """An unknown quantization, or weights that cannot be quantized."""


class DataError(UserError, ValueError):
    """Training data that cannot be read or used."""


class ConfigError(UserError, ValueError):
    """Settings that are unknown, contradict each other, or are not supported."""


class CapacityError(UserError, ValueError):
    """A run whose needs cannot be planned, or a machine that cannot exist."""


class TrainingError(UserError, RuntimeError):
    """A training run that cannot continue."""
