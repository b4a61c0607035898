"""Secrets in what a run records: which names hold one, and text and values without them.

A secret is known by the name it was given under: a flag, a setting, an environment variable, a key of a mapping. Its
value is then hidden wherever it appears. Whatever writes a command, settings, variables or an error calls `hide` or
`hide_in`. Only the standard library is imported here.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote, quote_plus

HIDDEN = "<hidden>"
SHORTEST = 6
"""Characters of the shortest value that is hidden wherever it appears; a shorter one would be part of other words."""
_NAME = re.compile(
    r"(?:^|_)(?:token|secrets?|(?:\w*)passw(?:or)?d|passphrase|sshpass|credentials?|authorization|connection_string|jwt|"
    r"pat|sas|webhook(?:_url)?|(?:api|access|account|auth|encryption|master|private|secret|signing|storage)_?key|"
    r"apikey)$"
)
_OF_A_TOKENIZER = re.compile(r"(?:^|_)(?:add|bos|cls|concat|end|eos|eot|image|mask|pad|sep|start|stop|unk)_token$")
_NAMED = re.compile(r"""([A-Za-z][\w-]*)["']?\s*(?:=|:\s)\s*["']?([^\s"',;&{}()\[\]]+)""")
"""`NAME=value`, and `name: value` of YAML and JSON."""
_KNOWN = re.compile(
    r"(?:(?<=://)|(?<=:/)(?!/))[^\s/@:]*:[^\s/@]+(?=@)|\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{20,}|gh[oprsu]_[A-Za-z0-9]{20,}|"
    r"github_pat_\w{20,}|glpat-[\w-]{16,}|xox[a-z]-[\w-]{10,})|(?i:(?<=\bbearer )|(?<=[?&]sig=))[^\s\"'&]{6,}"
)
"""Secrets that are recognized without a name: a password or signature in a URL, tokens of well-known hosts."""
_learned: set[str] = set()


@functools.lru_cache(maxsize=4096)
def is_secret(name: str) -> bool:
    """Whether a flag, setting, variable or key of this name holds a secret."""
    plain = name.lstrip("-").replace("-", "_").lower()
    return bool(_NAME.search(plain)) and not _OF_A_TOKENIZER.search(plain)


def forget() -> None:
    """Forget what `learn` has remembered; secrets in the environment stay hidden."""
    _learned.clear()


def learn(values: Any) -> None:
    """Remember the secrets in settings or other values, so that `hide` hides them."""
    if isinstance(values, Mapping):
        for name, value in values.items():
            if isinstance(value, str) and is_secret(str(name)):
                _learned.add(value)
            else:
                learn(value)
    elif isinstance(values, list | tuple | set):
        for value in values:
            learn(value)
    elif isinstance(values, str):
        _learned.update(value for name, value in _NAMED.findall(values) if is_secret(name))


def learn_words(words: Sequence[str]) -> None:
    """Remember the secrets in a command line."""
    learn(list(words))
    _learned.update(value for flag, value in itertools.pairwise(words) if flag.startswith("-") and is_secret(flag))


def hide(text: str) -> str:
    """The text without secrets, as they are and as JSON, Python and URLs write them."""
    written = {form for value in _secrets() for form in _forms(value)}
    for form in sorted(written, key=len, reverse=True):
        text = text.replace(form, HIDDEN)
    return _KNOWN.sub(HIDDEN, text)


@functools.lru_cache(maxsize=1024)
def _forms(value: str) -> frozenset[str]:
    written = {value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], repr(value)[1:-1]}
    if value.isprintable():  # a lone surrogate, which a URL cannot hold, is not
        written |= {quote(value), quote(value, safe=""), quote_plus(value)}
    return frozenset(written)


def hide_in(value: Any) -> Any:
    """The value, at any depth, without secrets; other values than text, mappings and lists stay as they are."""
    if isinstance(value, Mapping):
        return {
            name: f"<{str(name).upper()}>" if each and isinstance(each, str) and is_secret(str(name)) else hide_in(each)
            for name, each in value.items()
        }
    if isinstance(value, list | tuple):
        return type(value)(map(hide_in, value))
    return hide(value) if isinstance(value, str) else value


def hide_words(words: Iterable[str]) -> tuple[str, ...]:
    """A command line without secrets."""
    words = tuple(words)
    learn_words(words)
    return tuple(map(hide, words))


def _secrets() -> set[str]:
    in_environment = {value for name, value in os.environ.items() if is_secret(name)}
    return {value for value in _learned | in_environment if len(value) >= SHORTEST}
