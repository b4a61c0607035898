"""User errors can be caught by fullshard's own type and by the built-in one that they are."""

from __future__ import annotations

import inspect

import pytest

from fullshard import UserError
from fullshard.config import errors

FAMILY = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if cls.__module__ == errors.__name__]


@pytest.mark.parametrize("cls", FAMILY)
def test_every_error_is_a_user_error_that_says_what_it_is_for(cls: type[Exception]) -> None:
    assert issubclass(cls, UserError)
    assert cls.__doc__
    with pytest.raises(UserError, match="what to do"):
        raise cls("what was given, what was expected, what to do")


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("RuntimeSetupError", RuntimeError),
        ("MeshError", ValueError),
        ("SpecError", ValueError),
        ("LayoutError", ValueError),
        ("UnsupportedError", NotImplementedError),
    ],
)
def test_errors_are_also_what_python_would_raise(name: str, builtin: type[Exception]) -> None:
    assert issubclass(getattr(errors, name), builtin)
