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
        const known = {}, bytes = color => known[color] ??= (() => {
            probe.clearRect(0, 0, 1, 1); probe.fillStyle = color; probe.fillRect(0, 0, 1, 1);
            return [...probe.getImageData(0, 0, 1, 1).data];
        })();
        const over = (front, back) => back.map((c, i) => (front[i] * front[3] + c * (255 - front[3])) / 255);
        const dark = matchMedia('(prefers-color-scheme: dark)').matches
            && getComputedStyle(document.documentElement).colorScheme.includes('dark');
        const background = one => {
            if (!one) return bytes(dark ? '#121212' : '#fff').slice(0, 3);
            const color = bytes(getComputedStyle(one).backgroundColor);
            return color[3] == 255 ? color.slice(0, 3) : over(color, background(above(one)));
        };
        // Text in a drawing: the edge drawn around its letters, or the last shape below it.
        const behind = (one, style) => {
            if (style.paintOrder.startsWith('stroke') && style.stroke != 'none') return bytes(style.stroke).slice(0, 3);
            const box = one.getBoundingClientRect(), x = box.x + box.width / 2, y = box.y + box.height / 2;
            const covers = shape => { const b = shape.getBoundingClientRect();
                return b.left <= x && x <= b.right && b.top <= y && y <= b.bottom; };
            const before = shape => shape.compareDocumentPosition(one) & Node.DOCUMENT_POSITION_FOLLOWING;
            const plain = shape => /^(rgb|color)/.test(getComputedStyle(shape).fill);
            const shapes = [...(one.ownerSVGElement ?? one).querySelectorAll('rect')].filter(
                shape => before(shape) && plain(shape) && seen(shape) && covers(shape));
            const under = shapes.length ? bytes(getComputedStyle(shapes.at(-1)).fill) : [0, 0, 0, 0];
            return over(under, background(one));
        };
        const light = rgb => rgb.map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
            .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
        const faint = [];
        for (const one of deep('*')) {
            const own = [...one.childNodes].some(n => n.nodeType == 3 && n.textContent.trim());
            if (!own || !seen(one) || one.matches(':disabled, script, style, title, option')) continue;
            const box = one.getBoundingClientRect();
            if (box.width < 2 || box.height < 2) continue;
            const style = getComputedStyle(one), svg = one instanceof SVGElement;
            const back = svg ? behind(one, style) : background(one);
            const [a, b] = [light(over(bytes(svg ? style.fill : style.color), back)), light(back)];
            const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), size = parseFloat(style.fontSize);
            const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
            if (ratio < (large ? 3 : 4.5)) faint.push(`${ratio.toFixed(1)} ${label(one)}`);
        }
        return faint;
    """)  # fmt: skip


# --- tables, numbers and names ---------------------------------------------------------------------------------------


def empty_columns(page: Page) -> list[str]:
    """Columns of tables that have nothing in any row."""
    return asked(page, """
        const empty = table => [...table.tHead.rows[0].cells].filter((_, i) => table.tBodies[0].rows.length
            && [...table.tBodies[0].rows].every(row => !row.cells[i]?.textContent.trim()));
        return deep('table').filter(one => one.tHead && one.tBodies.length).flatMap(empty).map(label);
    """)  # fmt: skip


def colliding_texts(page: Page) -> list[str]:
    """Texts of a drawing that lie over each other."""
    return asked(page, """
        const found = [];
        for (const svg of deep('svg').filter(one => !one.parentElement?.closest('svg') && seen(one))) {
            const texts = [...svg.querySelectorAll('text')].filter(one => one.textContent.trim() && seen(one));
            const boxes = texts.map(one => one.getBoundingClientRect());
            const over = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
                && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3;
            texts.forEach((one, i) => texts.slice(0, i).forEach((other, j) =>
                over(boxes[i], boxes[j]) && found.push(`${label(one)} over ${label(other)}`)));
        }
        return found;
    """)  # fmt: skip


def powers_on_axes(page: Page) -> list[str]:
    """Numbers of a drawing such as `8e+4`, which are written as `80,000`."""
    return asked(page, "return deep('svg text').filter(one => /\\de\\+?\\d/.test(one.textContent)).map(label);")


def names_without_marks(page: Page) -> list[str]:
    """Entries of a legend whose color is nowhere in the chart, or covers less than a pixel."""
    return asked(page, """
        const covers = one => {
            const {width, height} = one.getBoundingClientRect(), thin = one.getAttribute('stroke') ? 0 : 0.5;
            return Math.max(width, height) >= 1 && Math.min(width, height) >= thin;
        };
        return deep('figure').flatMap(figure => [...figure.querySelectorAll('.legend li')].filter(item => {
            const color = item.querySelector('line').getAttribute('stroke');
            const marks = [...figure.querySelectorAll('.chart svg *')].filter(
                one => [one.getAttribute('fill'), one.getAttribute('stroke')].includes(color));
            return !marks.some(covers);
        })).map(label);
    """)  # fmt: skip


# --- keyboard -------------------------------------------------------------------------------------------------------

ANSWERS = "a[href], button, input:not([type=hidden]), select, textarea, summary, [role=button], [onclick], [tabindex]"
POINTER = ("click", "mousedown", "mousemove", "pointerdown", "pointermove", "wheel", "dblclick", "touchstart")
MOST_STOPS = 200


def keyboard_faults(page: Page) -> list[str]:
    """What answers to the pointer and cannot be reached with Tab, and what does not show that it has the focus."""
    asked(page, f"""
        const kinds = {json.dumps(POINTER)}, has = one => kinds.some(kind => one['on' + kind]);
        const listening = __listening.filter(([one, kind]) => kinds.includes(kind)).map(([one]) => one);
        const whole = [document.body, document.documentElement];
        const found = new Set([...deep({json.dumps(ANSWERS)}), ...listening, ...deep('*').filter(has)]);
        window.__answers = [...found].filter(
            one => one.isConnected && !whole.includes(one) && seen(one) && !one.disabled);
    """)  # fmt: skip
    asked(page, """
        window.__reached = new Set(); window.__hidden = [];
        const body = document.body;  // Tab begins where the focus was last
        body.tabIndex = -1; body.focus({preventScroll: true}); body.blur(); body.removeAttribute('tabindex');
    """)  # fmt: skip
    for _ in range(MOST_STOPS):
        page.press("Tab")
        found = asked(page, FOCUSED)
        if not found:
            break
        while found == "in a list":  # there, arrow keys move the focus
            page.press("ArrowDown")
            found = asked(page, FOCUSED)
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
    const style = part => { const s = getComputedStyle(part);
        const outlined = s.outlineStyle != 'none' && parseFloat(s.outlineWidth);
        return [outlined ? s.outlineColor : '', s.boxShadow, s.borderColor, s.backgroundColor, s.stroke]; };
    const look = () => [one, ...one.querySelectorAll('*')].slice(0, 40).map(style).join();
    const box = one.getBoundingClientRect(), focused = look();
    one.blur();
    const plain = look();
    one.focus({focusVisible: true, preventScroll: true});
    const inView = box.bottom > 0 && box.top < innerHeight && box.right > 0 && box.left < innerWidth;
    if (focused == plain || !inView) __hidden.push(label(one));
    return one.parentElement?.querySelector(':scope > [tabindex="-1"]') ? 'in a list' : 'alone';
"""


# --- charts ---------------------------------------------------------------------------------------------------------


def colored_parts(page: Page, elements: str) -> list[float]:
    """For each element, the part of its width or height, 0 to 1, in which something colored is drawn, not gray.

    `elements` is an expression for a list. What counts is what a reader sees, however it is drawn.
    """
    boxes = page.run(f"""[...{elements}].map(one => one.getBoundingClientRect()).map(
        box => [box.x + scrollX, box.y + scrollY, box.width, box.height].map(Math.round))""")
    bottom = max((y + height for _, y, _, height in boxes), default=0)
    box = {"x": 0, "y": 0, "width": page.run("innerWidth"), "height": bottom}
    picture = base64.b64encode(page.screenshot(box)).decode() if bottom else ""
    return page.run(f"""(async () => {{
        const bytes = Uint8Array.from(atob('{picture}'), c => c.charCodeAt(0));
        const image = await createImageBitmap(new Blob([bytes], {{type: 'image/png'}}));
        const drawing = new OffscreenCanvas(image.width, image.height).getContext('2d', {{willReadFrequently: true}});
        drawing.drawImage(image, 0, 0);
        return {json.dumps(boxes)}.map(([x, y, width, height]) => {{
            if (!width || !height) return 0;
            const data = drawing.getImageData(x, y, width, height).data, columns = new Set(), rows = new Set();
            for (let i = 0; i < data.length; i += 4) {{
                const high = Math.max(data[i], data[i + 1], data[i + 2]);
                if (high - Math.min(data[i], data[i + 1], data[i + 2]) > 60) {{
                    columns.add(i / 4 % width);
                    rows.add(Math.floor(i / 4 / width));
                }}
            }}
            return Math.max(columns.size / width, rows.size / height);
        }});
    }})()""") if bottom else [0.0] * len(boxes)  # fmt: skip
