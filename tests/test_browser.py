"""The checks of pages in a real browser find what they are for: each passes on a sound page and fails on a bad one."""

from pathlib import Path

import pytest

from tests import page_checks
from tests.browser import VARIABLE, Browser, BrowserError, find_browser

SOUND = """<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content="width=device-width">
<title>sound</title><style>:root { color-scheme: light dark } main { max-width: 100% }</style>
<main><h1>A page</h1><p>Text with <a href="#end">a link</a> and <button id=pressed>a button</button>.</p>
<svg id=chart width=300 height=80><path d="M0 70 L150 20 L300 40" stroke="#2563eb" stroke-width=2 fill=none /></svg>
<svg width=300 height=60><rect width=140 height=50 fill="#234" /><text x=9 y=30 fill="#fff">on a shape</text>
<g tabindex=0 id=one><rect x=150 width=60 height=50 fill="#eee" /></g>
<g tabindex=-1 id=two><rect x=220 width=60 height=50 fill="#eee" /></g></svg>
<style>g:focus { outline: none } g:focus rect { stroke: #2563eb; stroke-width: 2 }</style>
<script>one.onkeydown = event => event.key == 'ArrowDown' && two.focus()</script>
<p id=end>The end.</p>SPOILT</main></html>"""


def faults(browser: Browser, folder: Path, spoilt: str = "", dark: bool = False) -> dict[str, object]:
    """Everything that the checks find, on a phone."""
    file = folder / "page.html"
    file.write_text(SOUND.replace("SPOILT", spoilt))
    with browser.page(360, 640, dark) as page:
        page.open(file)
        found = {
            "wide": page_checks.wider_than_the_view(page),
            "faint": page_checks.faint_texts(page),
            "keyboard": page_checks.keyboard_faults(page),
            "left": page_checks.left_the_page(page),
            "empty": page_checks.empty_columns(page),
            "colliding": page_checks.colliding_texts(page),
            "powers": page_checks.powers_on_axes(page),
            "unmarked": page_checks.names_without_marks(page),
            "problems": page.problems,
        }
    return {name: what for name, what in found.items() if what}


@pytest.mark.parametrize("dark", [False, True])
def test_a_sound_page_has_no_faults(browser, tmp_path, dark):
    assert not faults(browser, tmp_path, dark=dark)


def table(what: str, text: str) -> str:
    cells = f"<tr><th>1</th><td>{what}</td><td>{text}</td></tr>"
    return f"<table><thead><tr><th>n</th><th>what</th><th>text</th></tr></thead><tbody>{cells * 2}</tbody></table>"


def drawing(inside: str) -> str:
    return f"<svg width=200 height=30 fill='CanvasText'>{inside}</svg>"


def legend(name: str, color: int, marks: str) -> str:
    item = f"<li><svg width=22 height=10><line x2=22 stroke='var(--s{color})' /></svg>{name}</li>"
    return f"<figure><ul class=legend>{item}</ul><div class=chart>{drawing(marks)}</div></figure>"


FAULTS = [
    ("<script>console.error('it broke')</script>", "problems", "it broke"),
    ("<script>setTimeout(() => { throw new Error('late') })</script>", "problems", "Error: late"),
    ("<script>alert('hello')</script>", "problems", "alert: hello"),
    ("<img alt='' src=x onerror=\"alert('injected')\">", "problems", "alert: injected"),
    ("<script>fetch('https://example.org/data').catch(() => 0)</script>", "left", "https://example.org/data"),
    ("<link rel=stylesheet href=https://example.org/a.css>", "left", "https://example.org/a.css"),
    ("<script>new WebSocket('wss://example.org/s')</script>", "left", "wss://example.org/s"),
    ("<iframe src=https://example.org/ title=x></iframe>", "left", "https://example.org/"),
    ("<img alt='' src=other.png>", "left", "/other.png"),
    ("<pre>" + "x" * 200 + "</pre>", "wide", "xxx"),
    ("<p style='color: #999; background: white'>too light</p>", "faint", "too light"),
    (
        "<svg width=99 height=30><rect width=90 height=30 fill='#fff' /><text y=20 fill='#eee'>on white</text></svg>",
        "faint",
        "on white",
    ),
    ("<style>#two:focus rect { stroke: none }</style>", "keyboard", "no visible focus: g#two"),
    ("<div id=hit>press me</div><script>hit.onclick = () => 0</script>", "keyboard", "not reached: div#hit"),
    ("<button tabindex=-1>skipped</button>", "keyboard", 'not reached: button "skipped"'),
    ("<style>a { outline: none }</style>", "keyboard", 'no visible focus: a "a link"'),
    ("<style>button { outline: 0 solid red }</style>", "keyboard", 'no visible focus: button#pressed "a button"'),
    (table("", "said"), "empty", 'th "what"'),
    (drawing("<text x=5 y=20>one</text><text x=20 y=20>other</text>"), "colliding", 'text "other" over text "one"'),
    (drawing("<text y=20>8e+4</text>"), "powers", 'text "8e+4"'),
    (legend("unseen", 3, "<path d='M0 0h50v.1h-50Z' fill='var(--s3)' />"), "unmarked", 'li "unseen"'),
    (legend("absent", 4, ""), "unmarked", 'li "absent"'),
]
"""What spoils a page, the check that must find it, and what it says."""


def test_full_tables_and_marks_that_can_be_seen_are_no_faults(browser, tmp_path):
    line = "<path d='M0 5h50' stroke='var(--s1)' fill=none />"
    apart = "<text x=5 y=20>1e-4</text><text x=80 y=20>80,000</text>"
    assert not faults(browser, tmp_path, table("what", "text") + legend("a", 1, line) + drawing(apart))


def test_every_fault_of_a_bad_page_is_found(browser, tmp_path):
    found = faults(browser, tmp_path, "".join(spoilt for spoilt, _, _ in FAULTS))
    missed = [said for _, kind, said in FAULTS if not any(said in one for one in found[kind])]
    assert not missed, found


def test_a_text_that_only_dark_readers_cannot_see_is_found(browser, tmp_path):
    spoilt = "<p style='color: #333'>dark on dark</p>"
    assert not faults(browser, tmp_path, spoilt)
    assert "dark on dark" in str(faults(browser, tmp_path, spoilt, dark=True)["faint"])


@pytest.mark.parametrize("drawn", ["svg", "canvas", "shadow"])
def test_a_chart_is_seen_and_an_empty_one_is_not(browser, tmp_path, drawn):
    file = tmp_path / "page.html"
    canvas = "<canvas width=300 height=80></canvas>"
    frame = "<div id=chart style='width: 300px; height: 80px; border: 1px solid #888'></div>"
    script = (
        "const c = root.querySelector('canvas').getContext('2d'); c.strokeStyle = 'red'; c.strokeRect(5, 5, 290, 70)"
    )
    file.write_text({
        "svg": SOUND.replace("SPOILT", ""),
        "canvas": f"<div id=chart style='width: 300px'>{canvas}</div><script>const root = document; {script}</script>",
        "shadow": f"{frame}<script>const root = chart.attachShadow({{mode: 'open'}});"
        f"root.innerHTML = '{canvas}'; {script}</script>",
    }[drawn])  # fmt: skip
    with browser.page() as page:
        page.open(file)
        assert page_checks.colored_parts(page, "[chart]")[0] > 0.9
        file.write_text(frame)
        page.open(file)
        assert page_checks.colored_parts(page, "[chart]") == [0]


def test_a_browser_that_does_not_start_says_why(tmp_path, monkeypatch):
    broken = tmp_path / "browser"
    broken.write_text("#!/bin/sh\necho a library is missing >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv(VARIABLE, str(broken))
    assert find_browser() == str(broken)
    with pytest.raises(BrowserError, match="a library is missing"):
        Browser(str(broken))


def test_an_expression_that_fails_is_an_error(browser):
    with browser.page() as page, pytest.raises(BrowserError, match="absent is not defined"):
        page.run("absent.thing")
