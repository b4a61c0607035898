"""What a page must hold to be readable by everyone; each check returns the faults that it finds.

Elements are found in shadow trees as well.
"""

from __future__ import annotations

import base64
import json
from typing import Any

from tests.browser import Page

DEEP = """
const deep = (selector, root = document) => [...root.querySelectorAll('*')].flatMap(
    one => [...(one.matches(selector) ? [one] : []), ...(one.shadowRoot ? deep(selector, one.shadowRoot) : [])]);
const above = one => one.parentElement || (one.getRootNode().host ?? null);
const seen = one => one.checkVisibility({visibilityProperty: true, opacityProperty: true});
const label = one => {
    const name = [one.tagName.toLowerCase() + (one.id ? '#' + one.id : ''), ...one.classList].join('.');
    return name + ' "' + (one.getAttribute('aria-label') || one.textContent || '').trim().slice(0, 40) + '"';
};
"""


def asked(page: Page, script: str) -> Any:
    """The value of a function body that uses the names of `DEEP`."""
    return page.run(f"(() => {{ {DEEP} {script} }})()")


def left_the_page(page: Page) -> list[str]:
    """Requests and visits that go elsewhere: for a file all of them, for a served page those to other servers."""
    first = page.pages[0]
    served = "/".join(first.split("/")[:3]) + "/" if first.startswith("http") else None
    return [
        url
        for url in (*page.requests, *page.pages[1:])
        if not url.startswith(("data:", "blob:")) and not (served and url.startswith(served))
    ]


def wider_than_the_view(page: Page) -> list[str]:
    """What makes the page scroll sideways."""
    return asked(page, """
        const root = document.documentElement;
        if (root.scrollWidth <= root.clientWidth) return [];
        const wide = deep('body *').filter(
            one => seen(one) && one.getBoundingClientRect().left + one.scrollWidth > root.clientWidth);
        return [`${root.scrollWidth} > ${root.clientWidth}`, ...wide.slice(-3).map(label)];
    """)  # fmt: skip


def faint_texts(page: Page) -> list[str]:
    """Texts whose contrast with their background is below 4.5 to 1 (large ones: 3 to 1), as WCAG 2 reckons it."""
    return asked(page, """
        const probe = new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true});
        const bytes = color => {
            probe.clearRect(0, 0, 1, 1); probe.fillStyle = color; probe.fillRect(0, 0, 1, 1);
            return [...probe.getImageData(0, 0, 1, 1).data];
        };
        const over = (front, back) => back.map((c, i) => (front[i] * front[3] + c * (255 - front[3])) / 255);
        const dark = matchMedia('(prefers-color-scheme: dark)').matches
            && getComputedStyle(document.documentElement).colorScheme.includes('dark');
        const background = one => {
            if (!one) return bytes(dark ? '#121212' : '#fff').slice(0, 3);
            const color = bytes(getComputedStyle(one).backgroundColor);
            return color[3] == 255 ? color.slice(0, 3) : over(color, background(above(one)));
        };
        const light = rgb => rgb.map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
            .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
        const faint = [];
        for (const one of deep('*')) {
            const own = [...one.childNodes].some(n => n.nodeType == 3 && n.textContent.trim());
            if (!own || !seen(one) || one.matches(':disabled, script, style, title, option')) continue;
            const box = one.getBoundingClientRect();
            if (box.width < 2 || box.height < 2) continue;
            const style = getComputedStyle(one), back = background(one), svg = one instanceof SVGElement;
            const [a, b] = [light(over(bytes(svg ? style.fill : style.color), back)), light(back)];
            const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), size = parseFloat(style.fontSize);
            const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
            if (ratio < (large ? 3 : 4.5)) faint.push(`${ratio.toFixed(1)} ${label(one)}`);
        }
        return faint;
    """)  # fmt: skip


# --- keyboard -------------------------------------------------------------------------------------------------------

ANSWERS = "a[href], button, input:not([type=hidden]), select, textarea, summary, [role=button], [onclick], [tabindex]"
POINTER = {"click", "mousedown", "mousemove", "pointerdown", "pointermove", "wheel", "dblclick", "touchstart"}
MOST_STOPS = 200


def keyboard_faults(page: Page) -> list[str]:
    """What answers to the pointer and cannot be reached with Tab, and what does not show that it has the focus."""
    asked(page, f"window.__answers = deep({json.dumps(ANSWERS)}).filter(one => seen(one) && !one.disabled);")
    _add_listeners(page)
    asked(page, "window.__reached = new Set(); window.__hidden = []; document.activeElement.blur();")
    for _ in range(MOST_STOPS):
        page.press("Tab")
        if not asked(page, FOCUSED):
            break
    else:
        return [f"Tab has not come around after {MOST_STOPS} stops"]
    return asked(page, """
        const inside = (one, other) => { for (; one; one = above(one)) if (one == other) return true; return false; };
        const near = one => [...__reached].some(stop => inside(one, stop) || inside(stop, one));
        return [...__answers.filter(one => !near(one)).map(one => 'not reached: ' + label(one)),
                ...__hidden.map(one => 'no visible focus: ' + one)];
    """)  # fmt: skip


FOCUSED = """
    let one = document.activeElement;
    while (one?.shadowRoot?.activeElement) one = one.shadowRoot.activeElement;
    if (!one || one == document.body || one == document.documentElement || __reached.has(one)) return false;
    __reached.add(one);
    const look = () => { const s = getComputedStyle(one);
        return [s.outlineStyle == 'none' ? '' : s.outlineWidth + s.outlineColor, s.boxShadow, s.borderColor].join(); };
    const box = one.getBoundingClientRect(), focused = look();
    one.blur();
    const plain = look();
    one.focus({focusVisible: true, preventScroll: true});
    const inView = box.bottom > 0 && box.top < innerHeight && box.right > 0 && box.left < innerWidth;
    if (focused == plain || !inView) __hidden.push(label(one));
    return true;
"""


def _add_listeners(page: Page) -> None:
    """Add the elements that listen to the pointer; the page as a whole does not count."""
    found = page.send("Runtime.evaluate", expression=f"(() => {{ {DEEP} return deep('body *').filter(seen); }})()")
    listed = page.send("Runtime.getProperties", objectId=found["result"]["objectId"], ownProperties=True)["result"]
    for one in listed:
        if not one["name"].isdigit():
            continue
        element = one["value"]["objectId"]
        kinds = {kind["type"] for kind in page.send("DOMDebugger.getEventListeners", objectId=element)["listeners"]}
        if kinds & POINTER:
            page.send(
                "Runtime.callFunctionOn", objectId=element, functionDeclaration="function() { __answers.push(this) }"
            )


# --- charts ---------------------------------------------------------------------------------------------------------


def colored_columns(page: Page, element: str) -> float:
    """The part of an element's width, 0 to 1, in which something colored is drawn: neither gray nor background.

    `element` is an expression. What counts is what a reader sees, however it is drawn.
    """
    box = page.run(f"""(() => {{
        const box = ({element}).getBoundingClientRect();
        return {{x: box.x + scrollX, y: box.y + scrollY, width: box.width, height: box.height}};
    }})()""")
    if not box["width"] or not box["height"]:
        return 0.0
    picture = base64.b64encode(page.screenshot(box)).decode()
    return page.run(f"""(async () => {{
        const bytes = Uint8Array.from(atob('{picture}'), c => c.charCodeAt(0));
        const image = await createImageBitmap(new Blob([bytes], {{type: 'image/png'}}));
        const drawing = new OffscreenCanvas(image.width, image.height).getContext('2d');
        drawing.drawImage(image, 0, 0);
        const data = drawing.getImageData(0, 0, image.width, image.height).data;
        const columns = new Set();
        for (let i = 0; i < data.length; i += 4) {{
            const [r, g, b] = data.slice(i, i + 3);
            if (Math.max(r, g, b) - Math.min(r, g, b) > 60) columns.add(i / 4 % image.width);
        }}
        return columns.size / image.width;
    }})()""")
