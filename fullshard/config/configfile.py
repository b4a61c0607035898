"""Configuration files: reads YAML or JSON with line numbers, and maps keys to options.

Every key must belong to an option of a typed configuration class (`config/options.py`). An unknown key is an error that
suggests the nearest one. Known misspellings of guides, and sections that lost their indentation, are accepted with a
note.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from fullshard.config.errors import ConfigError
from fullshard.config.options import Option, convert, nearest, nearest_option, shown
from fullshard.config.paths import replace_text

SUFFIXES = (".yaml", ".yml", ".json")


class _Loader(yaml.SafeLoader):
    """PyYAML's loader, whose errors about values that do not fit their type have a line too."""

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            what = f"{node.value!r:.60} is not a value of type {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, what, node.start_mark) from None


@dataclass(frozen=True)
class ConfigFile:
    """A file's keys and values, and the line of each key."""

    path: Path
    values: dict[str, Any]
    lines: Mapping[tuple[str, ...], int] = field(default_factory=dict)

    def where(self, *key: str) -> str:
        """`file:line: section.key`, as far as known."""
        line = self.lines.get(key)
        return f"{self.path}{f':{line}' if line else ''}: {'.'.join(key)}"


def read_file(path: str | Path) -> ConfigFile:
    """Read a file; errors name the line."""
    path = Path(path).expanduser()
    if path.is_dir():
        path = _inside(path)
    if not path.is_file():
        others = sorted(p.name for p in path.parent.glob("*") if p.suffix in SUFFIXES) if path.parent.is_dir() else []
        hint = nearest(path.name, others) or (f"; {path.parent} holds {', '.join(others[:5])}" if others else "")
        raise ConfigError(f"the configuration file {path} does not exist{hint}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if path.suffix == ".json":
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}:{error.lineno}: not JSON: {error.msg}") from None
        except (ValueError, RecursionError) as error:  # numbers of thousands of digits, endless nesting
            raise ConfigError(f"{path}: not JSON that can be read: {error}") from None
        try:
            return _from_yaml(path, text, values)
        except ConfigError:
            values = {} if values is None else values
            if not isinstance(values, dict):
                raise
            return ConfigFile(path, values)  # JSON that YAML cannot read (tabs): without line numbers
    return _from_yaml(path, text, None)


def _inside(folder: Path) -> Path:
    candidates = [p for p in sorted(folder.glob("*")) if p.suffix in SUFFIXES]
    named = [p for p in candidates if p.stem in ("fsdp_config", "default_config")] or candidates
    if len(named) != 1:
        listing = ", ".join(p.name for p in candidates) or "none"
        raise ConfigError(f"{folder} is a directory; name the configuration file in it (found: {listing})")
    return named[0]


def _from_yaml(path: Path, text: str, values: Any) -> ConfigFile:
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if values is None:
            values = loader.construct_document(node) if node is not None else {}
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{path}:{line}: not YAML: it has the character {chr(error.character)!r}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{path}{where}: not YAML: {getattr(error, 'problem', None) or error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: not YAML that can be read: values are nested too deeply") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected keys with values, such as `num_processes: 2`; got {shown(values)[:60]}")
    lines: dict[tuple[str, ...], int] = {}
    if node is not None:
        _collect_lines(path, node, (), lines)
    return ConfigFile(path, {str(k): v for k, v in values.items()}, lines)


def _collect_lines(path: Path, node: Any, above: tuple[str, ...], lines: dict[tuple[str, ...], int]) -> None:
    for key, value in node.value:
        name, line = (*above, str(key.value)), key.start_mark.line + 1
        if name in lines:
            raise ConfigError(f"{path}:{line}: {'.'.join(name)} is set twice, first on line {lines[name]}")
        lines[name] = line
        if isinstance(value, yaml.MappingNode):
            _collect_lines(path, value, name, lines)


@dataclass
class OptionValues:
    """Option values from one source."""

    values: dict[str, Any] = field(default_factory=dict)
    """By option name, converted."""
    where: dict[str, str] = field(default_factory=dict)
    """By option name, the location of the value, for messages."""


def sort_keys(file: ConfigFile, options: Iterable[Option], notes: list[str]) -> OptionValues:
    """The option values in a file; each key that had to be interpreted adds a line to `notes`."""
    options = [one for one in options if one.in_file]
    sections = {one.section for one in options} - {""}
    by_section = {s: [one for one in options if one.section == s] for s in (*sections, "")}
    option_values, flattened = OptionValues(), []
    for key, value in file.values.items():
        if key in sections:
            if value is None or value == []:
                continue
            if not isinstance(value, dict):
                raise ConfigError(f"{file.where(key)}: expected keys with values, got {shown(value)}")
            for inner, inner_value in value.items():
                option = _find(str(inner), by_section[key], file.where(key, str(inner)), notes)
                if option is None:
                    names = [name for one in by_section[key] for name in one.names]
                    hint = nearest_option(str(inner), by_section[key], names)
                    raise ConfigError(f"{file.where(key, str(inner))}: unknown key{hint}")
                _take(option, inner_value, file.where(key, str(inner)), option_values)
            continue
        option = _find(key, by_section[""], file.where(key), notes)
        if option is None:
            option = _find(key, [one for s in sections for one in by_section[s]], file.where(key), notes, whole=True)
            if option is not None:
                flattened.append((option.section, key))
        if option is None:
            names = [*sections, *(name for one in by_section[""] for name in one.names), *(o.key for o in options)]
            raise ConfigError(f"{file.where(key)}: unknown key{nearest_option(key, options, names)}")
        _take(option, value, file.where(key), option_values)
    for section in sorted({s for s, _ in flattened}):
        keys = [key for s, key in flattened if s == section]
        first = ", ".join(keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
        notes.append(f"{file.path}: {first} are at the top level; read as part of {section}")
    return option_values


def _find(key: str, options: Iterable[Option], where: str, notes: list[str], whole: bool = False) -> Option | None:
    """The option of a key. `whole`: only names that are unambiguous outside their section."""
    name = key.replace("-", "_")
    for one in options:
        names = one.names if not whole else tuple(n for n in one.names if n.startswith(one.prefix) or n == one.key)
        if name in names:
            return one
        if name in (w for w in one.wrong) or name in (one.prefix + w for w in one.wrong):
            notes.append(f"{where}: there is no such key; read as {one.key}")
            return one
    return None


def _take(one: Option, value: Any, where: str, option_values: OptionValues) -> None:
    if one.name in option_values.values:
        raise ConfigError(f"{where} and {option_values.where[one.name]} both set {one.key}; keep one")
    if value is None:
        return
    option_values.values[one.name] = convert(one, value, where)
    option_values.where[one.name] = where


def nest(values: Mapping[str, Any], options: Iterable[Option]) -> dict[str, Any]:
    """Option values as the file stores them: by key, in sections."""
    sections: dict[str, Any] = {}
    for one in options:
        if one.name in values and values[one.name] is not None:
            value = values[one.name]
            if isinstance(value, tuple):
                # Accelerate writes a list under a prefixed key as comma-separated text.
                value = ",".join(value) if one.prefix else list(value)
            if value in ("true", "false"):
                value = value == "true"  # an option that accepts names as well
            (sections.setdefault(one.section, {}) if one.section else sections)[one.key] = value
    return sections


def write_file(path: Path, values: Mapping[str, Any]) -> None:
    """Write a file completely or not at all."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{path}: expected a name that ends in {', '.join(SUFFIXES)}")
    text = (
        json.dumps(values, indent=2, sort_keys=True) + "\n" if path.suffix == ".json" else yaml.safe_dump(dict(values))
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
