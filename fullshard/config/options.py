"""Options from typed configuration classes: names, types, defaults, choices, help texts.

A configuration is a dataclass. The docstring under a field is its help text, and `option(...)` adds what a type hint
cannot express. Files, flags, environment variables, `--help` and `docs/options.md` all use the same class.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import difflib
import enum
import inspect
import json
import math
import operator
import re
import reprlib
import textwrap
import types
import typing
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fullshard.config.errors import ConfigError

Config = typing.TypeVar("Config", bound=typing.Any)
TRUE, FALSE = ("true", "yes", "on", "1", "y", "t"), ("false", "no", "off", "0", "n", "f")
_short = reprlib.Repr()
_short.maxstring = _short.maxother = 200
_NOT_TEXT = re.compile("[\0\ud800-\udfff]")
"""NUL and halves of surrogate pairs: no file name, text file or tokenizer takes them."""


@dataclass(frozen=True)
class Option:
    """One option of a configuration class."""

    name: str
    """The field's name."""
    kind: type
    """`bool`, `int`, `float`, `str`, `tuple` or `list` (of text), `dict`, or `object` for a value that is kept as it
    is."""
    default: Any
    help: str
    optional: bool
    """Whether None (unset) is a value."""
    choices: tuple[str, ...] = ()
    numbers_from: int | None = None
    """The number of the first choice, if choices can also be given by number."""
    section: str = ""
    """The section of the file that contains the option; empty for the top level."""
    prefix: str = ""
    """Prefix of the key in the file and of the flag; optional inside the section."""
    aliases: tuple[str, ...] = ()
    """Other valid names of the key."""
    wrong: tuple[str, ...] = ()
    """Wrong names that appear in guides: accepted, with a note."""
    flags: tuple[str, ...] = ()
    """Other names of the flag."""
    elsewhere: tuple[str, ...] = ()
    """Names of the same setting in other tools: not accepted, but answered with this one."""
    env: str = ""
    """The environment variable that passes the value to the processes."""
    no_op: str = ""
    """Why the option has no effect; empty if it has."""
    refused: str = ""
    """Why every value but the default is refused; empty if other values are accepted."""
    script_only: bool = False
    """Whether it is for scripts alone: no flag of a command and no key of its file, since the launcher has its own."""
    in_file: bool = True
    metavar: str = ""
    """The placeholder for the value in help and documentation, such as `PATH`."""
    besides: Callable[[str], str] | None = None
    """For a true-or-false option that takes other values too: reads one of them, or raises `ValueError`."""

    @property
    def key(self) -> str:
        """Its name in the file."""
        return self.prefix + self.name

    @property
    def names(self) -> tuple[str, ...]:
        """Every valid name of its key inside its section."""
        return tuple(dict.fromkeys((self.key, self.name, *self.aliases, *(self.prefix + a for a in self.aliases))))

    @property
    def values(self) -> str:
        """A description of the accepted values."""
        if self.choices and self.numbers_from is not None:
            return ", ".join(f"{c} ({i})" for i, c in enumerate(self.choices, self.numbers_from))
        if self.choices:
            return ", ".join(self.choices)
        words = {
            bool: "true or false", int: "a whole number", float: "a number", str: "text",
            list: "a comma-separated list", tuple: "a comma-separated list", dict: "a mapping", object: "a value",
        }  # fmt: skip
        return self.metavar or words[self.kind]


_about: dict[Any, dict[str, Any]] = {}
"""What `option` was given, by field. Not in the field's metadata: `HfArgumentParser` hands that on to argparse."""


def option(default: Any = None, **about: Any) -> Any:
    """A dataclass field; the keywords are fields of `Option`."""
    field: Any = dataclasses.field(default_factory=default) if callable(default) else dataclasses.field(default=default)
    _about[field] = about
    return field


class _Fields:
    """The fields of a configuration class: on an instance all of them; on the class, those that are not for parsers
    count as no arguments of its constructor."""

    def __init__(self, fields: dict[str, Any], hidden: Container[str]) -> None:
        self.all, self.offered, self.hidden = fields, dict(fields), hidden
        for name, field in fields.items():
            if name in hidden:
                self.offered[name] = copy.copy(field)
                self.offered[name].init = False

    def __get__(self, instance: Any, owner: type) -> dict[str, Any]:
        return self.offered if instance is None else self.all

    def extended(self, fields: dict[str, Any]) -> _Fields:
        """The fields of a class that inherits these."""
        whole = {name: self.all[name] if field is self.offered.get(name) else field for name, field in fields.items()}
        return _Fields(whole, self.hidden)


class TakesOtherNames(type):
    """Metaclass: the constructor accepts every name of each option, as files do; the argument without a name is
    `output_dir`, as in transformers. Dataclasses that inherit from such a class accept the names too."""

    def __call__(cls, *args: Any, **settings: Any) -> Any:
        if len(args) > 1 or (args and "output_dir" in settings):
            raise ConfigError(f"{cls.__name__} takes one value without a name, output_dir; name the other settings.")
        fields: Any = dataclasses.fields(cls)  # type: ignore[arg-type]
        names = names_of(cls) | {field.name: field.name for field in fields if field.name.startswith("_")}
        values: dict[str, Any] = {"output_dir": args[0]} if args else {}
        for name, value in settings.items():
            if name not in names:
                raise ConfigError(f"unknown setting {name!r}{nearest_option(name, options_of(cls), names)}")
            if names[name] in values:
                raise ConfigError(f"{name} and another name of {names[name]} are both set; keep one.")
            values[names[name]] = value
        kind: Any = cls
        instance, takes = kind.__new__(kind), inspect.signature(kind.__init__).parameters
        vars(instance).update({name: value for name, value in values.items() if name not in takes})
        kind.__init__(instance, **{name: value for name, value in values.items() if name in takes})
        return instance

    def __setattr__(cls, name: str, value: Any) -> None:
        if name == "__dataclass_fields__" and isinstance(value, dict):  # set by `dataclass`
            above = (vars(base).get(name) for base in cls.__mro__[1:])
            value = next((fields.extended(value) for fields in above if isinstance(fields, _Fields)), value)
        super().__setattr__(name, value)


def names_of(config: type) -> dict[str, str]:
    """Every valid name of each option, and the field it belongs to."""
    return {name: one.name for one in options_of(config) for name in (*one.names, one.name)}


def for_scripts(offered: Container[str]) -> Callable[[Config], Config]:
    """Class decorator: every name of an option can be read and set on an instance, and transformers' `HfArgumentParser`
    takes the class. It offers the options in `offered` with their help texts; others would clash with those of a
    script's own classes."""

    def decorate(config: Config) -> Config:
        fields = config.__dataclass_fields__
        for one in options_of(config):
            text = one.help or one.no_op or one.refused
            fields[one.name].metadata = types.MappingProxyType({"help": text.replace("%", "%%")})
            for name in one.names:
                if name != one.name:
                    setattr(config, name, _other_name(one.name))
        config.__dataclass_fields__ = _Fields(fields, {name for name in fields if name not in offered})
        return config

    return decorate


def _other_name(name: str) -> property:
    return property(operator.attrgetter(name), lambda self, value: setattr(self, name, value), doc=f"`{name}`.")


_known: dict[type, tuple[Option, ...]] = {}


def options_of(config: type) -> tuple[Option, ...]:
    """The options of a configuration class, in the order of its fields."""
    if config not in _known:
        _known[config] = _read_options(config)
    return _known[config]


def _read_options(config: type) -> tuple[Option, ...]:
    hints, texts = typing.get_type_hints(config), _field_texts(config)
    options = []
    order = {name: place for place, base in enumerate(config.__mro__) for name in inspect.get_annotations(base)}
    fields = [field for field in dataclasses.fields(config) if not field.name.startswith("_")]
    for field in sorted(fields, key=lambda field: order[field.name]):  # inherited ones last
        kind, optional, choices = _kind_of(hints[field.name])
        factory: Any = field.default_factory
        default = factory() if factory is not dataclasses.MISSING else field.default
        about = {"kind": kind, "choices": choices, **_about_field(config, field.name)}
        options.append(
            Option(name=field.name, default=default, help=texts.get(field.name, ""), optional=optional, **about)
        )
    return tuple(options)


def _about_field(config: type, name: str) -> dict[str, Any]:
    """What `option` was given for a field, by the class itself or by the base class whose default it changes."""
    for base in config.__mro__:
        fields = vars(base).get("__dataclass_fields__", {})
        field = (fields.all if isinstance(fields, _Fields) else fields).get(name)
        if field in _about:
            return _about[field]
    return {}


def _kind_of(hint: Any) -> tuple[type, bool, tuple[str, ...]]:
    """A type hint as (kind, may be None, choices)."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        kinds = [a for a in arguments if a is not type(None)]
        kind, _, choices = _kind_of(kinds[0]) if len(kinds) == 1 else (str, False, ())
        return kind, type(None) in arguments, choices
    if typing.get_origin(hint) is typing.Literal:
        return type(arguments[0]), False, tuple(str(a) for a in arguments)
    return typing.get_origin(hint) or hint, False, ()


def _field_texts(config: type) -> dict[str, str]:
    """The docstring under each field, base classes included."""
    texts: dict[str, str] = {}
    for base in reversed(config.__mro__):
        if "__dataclass_fields__" not in vars(base):
            continue
        try:
            (body,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except (OSError, TypeError, SyntaxError):
            continue  # a class of a notebook
        assert isinstance(body, ast.ClassDef)
        for field, after in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(after, ast.Expr):
                if isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
                    texts[field.target.id] = " ".join(after.value.value.split())
    return texts


def convert(option: Option, value: Any, origin: str) -> Any:
    """A value from a file, a flag or a variable, as the option's type; `origin` names its source in errors."""
    value = value.value if isinstance(value, enum.Enum) else value
    if isinstance(value, str) and (wrong := _NOT_TEXT.search(value)):
        raise ConfigError(f"{origin}: {shown(value)} has the character {wrong[0]!r}, which is not part of a text")
    if value is None or (option.optional and isinstance(value, str) and value.strip().lower() in ("", "none", "null")):
        if value is None and not option.optional:
            return option.default  # a key without a value is ignored
        return None
    try:
        if option.choices:
            return _choice(option, value)
        if option.besides is not None and str(value).strip().lower() not in (*TRUE, *FALSE):
            return option.besides(_as_text(value))
        return _KINDS[option.kind](value)
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise ConfigError(f"{origin}: expected {option.values}, got {shown(value)}") from None


def shown(value: Any) -> str:
    """A value for messages: as Python writes it, with the middle of a long one left out."""
    return _short.repr(value)


def _choice(option: Option, value: Any) -> Any:
    if isinstance(value, bool):
        value = "yes" if value else "no"  # YAML reads a bare `no` as false
    text = str(value).strip()
    plain = {_normalized(c): c for c in option.choices}
    if option.numbers_from is not None:
        plain |= {str(number): c for number, c in enumerate(option.choices, option.numbers_from)}
    return option.kind(plain[_normalized(text)]) if _normalized(text) in plain else _refuse()


def _normalized(text: str) -> str:
    return text.lower().replace("-", "_").replace(" ", "_")


def _refuse() -> Any:
    raise ValueError


def as_bool(value: Any) -> bool:
    """A true-or-false value from its text; `ValueError` for any other text."""
    text = str(value).strip().lower()
    if text not in (*TRUE, *FALSE):
        raise ValueError
    return text in TRUE


def as_int(value: Any) -> int:
    """A whole number, also as `1e8`, `100_000_000` or `2.0`."""
    if isinstance(value, bool):
        raise ValueError
    try:
        return int(value) if not isinstance(value, float) else _whole(value)
    except ValueError:
        return _whole(float(value))


def _whole(value: float) -> int:
    if value != int(value):
        raise ValueError
    return int(value)


def counting_number(text: str) -> int | None:
    """The number that a text of digits is; None for other texts, and for more digits than a count has."""
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def as_list(value: Any) -> list[str]:
    """A list of texts from a sequence or from text with commas."""
    parts = value if isinstance(value, list | tuple | set) else str(value).split(",")
    return [str(part).strip() for part in parts if str(part).strip()]


def _as_tuple(value: Any) -> tuple[str, ...]:
    return tuple(as_list(value))


def _as_float(value: Any) -> float:
    number = _refuse() if isinstance(value, bool) else float(value)
    return number if math.isfinite(number) else _refuse()


def _as_text(value: Any) -> str:
    if isinstance(value, dict | list):
        raise ValueError
    return str(value).lower() if isinstance(value, bool) else str(value)


def _as_mapping(value: Any) -> dict[str, Any]:
    """A mapping, also as JSON or as `name=value,…`."""
    if not isinstance(value, str):
        return dict(value)
    if value.strip().startswith("{"):
        return dict(json.loads(value))
    pairs = [part.partition("=") for part in as_list(value)]
    if not all(name.strip() and equals for name, equals, _ in pairs):
        raise ValueError
    return {name.strip(): _number_or_text(text.strip()) for name, _, text in pairs}


def _number_or_text(text: str) -> Any:
    try:
        return int(text)
    except ValueError:
        with contextlib.suppress(ValueError):
            return float(text)
        return text


_KINDS: dict[type, Callable[[Any], Any]] = {
    bool: as_bool, int: as_int, float: _as_float, str: _as_text, list: as_list, tuple: _as_tuple, dict: _as_mapping,
    object: lambda value: value,
}  # fmt: skip


def nearest(name: str, names: Iterable[str]) -> str:
    """`; did you mean X?` if a name is spelled similarly, else nothing."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def nearest_option(name: str, options: Iterable[Option], names: Iterable[str]) -> str:
    """`; did you mean X?` for the option that has this name in another tool, or whose name is spelled similarly."""
    plain = name.replace("-", "_").lower()
    same = next((one.key for one in options if plain in one.elsewhere), None)
    return f"; did you mean {same}?" if same is not None else nearest(name, names)


@dataclass(frozen=True)
class Parsed:
    """A parsed command line."""

    values: dict[str, Any]
    """By the option's name, converted."""
    rest: list[str]
    """The words from the first one that is not a flag."""


def parse_flags(words: Sequence[str], options: Iterable[Option], command: str) -> Parsed:
    """Parse flags up to the first other word: with hyphens or underscores, `--flag value` or `--flag=value`.

    A true-or-false flag needs no value; `--no_…` turns it off.
    """
    by_name: dict[str, Option] = {}
    for one in options:
        for name in (one.key, *one.flags):
            by_name[name] = one
    values: dict[str, Any] = {}
    left = list(words)
    while left and left[0].startswith("-") and left[0] != "-":
        word = left.pop(0)
        if word == "--":
            break
        flag, equals, value = word.partition("=")
        name = flag.lstrip("-").replace("-", "_")
        flag_option, negated = by_name.get(name), False
        if (
            flag_option is None
            and name.startswith("no_")
            and (flag_option := by_name.get(name[3:]))
            and flag_option.kind is bool
        ):
            negated = True
        if flag_option is None or (negated and equals):
            hint = nearest_option(name, by_name.values(), by_name) or "."
            raise ConfigError(f"{command}: unknown flag {flag}{hint} See fullshard {command} --help.")
        if negated:
            values[flag_option.name] = False
            continue
        if not equals:
            follows = left and (flag_option.besides is not None or left[0].lower() in (*TRUE, *FALSE))
            alone = flag_option.kind is bool and not (follows and not left[0].startswith("-"))
            if alone:
                value = "true"
            elif not left:
                raise ConfigError(f"{command}: {flag} needs a value: {flag_option.values}")
            else:
                value = left.pop(0)
        values[flag_option.name] = convert(flag_option, value, flag)
    return Parsed(values, left)
