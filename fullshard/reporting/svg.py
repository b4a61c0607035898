"""A little SVG: elements as text, with everything escaped. Names of modules and files are text, never markup."""

from __future__ import annotations

import html
import re

NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML cannot hold."""


def escape(text: object) -> str:
    """Text for XML and HTML, in elements and in quoted attributes."""
    return html.escape(NOT_XML.sub("\ufffd", str(text)))


def element(tag: str, *inside: str, **attributes: object) -> str:
    """An element around parts that are markup already. `class_` and `data_bytes` become `class` and `data-bytes`;
    attributes that are None are left out."""
    given = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items() if value is not None}
    words = "".join(f' {name}="{escape(_number(value))}"' for name, value in given.items())
    return f"<{tag}{words}>{''.join(inside)}</{tag}>" if inside else f"<{tag}{words}/>"


def text(x: float, y: float, words: object, class_: str | None = None, anchor: str | None = None) -> str:
    return element("text", escape(words), x=x, y=y, class_=class_, text_anchor=anchor)


def rect(x: float, y: float, width: float, height: float, class_: str, **more: object) -> str:
    return element("rect", x=x, y=y, width=width, height=height, class_=class_, **more)


def fitted(words: str, width: float, character: float) -> str:
    """Words that fit into a width at this width per character; the middle of longer ones is left out."""
    room = max(3, int(width / character))
    if len(words) <= room:
        return words
    head = (room - 1) * 2 // 5
    return f"{words[:head]}…{words[head + 1 - room :]}"


def _number(value: object) -> object:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value
