"""Takes the pictures of reports in `docs/pictures`, in a headless browser (Chromium or Chrome).

    python tools/report_pictures.py            # trains two runs of the quickstart first, two minutes
    python tools/report_pictures.py RUN RUN    # of these runs

Paths of this machine are replaced. Pictures have at most 256 colors, which keeps them small.
"""

from __future__ import annotations

import base64
import itertools
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from fullshard.report.compare import comparison  # noqa: E402
from fullshard.report.html_report import render  # noqa: E402 - found by the line above
from fullshard.report.page import whole_page  # noqa: E402
from fullshard.report.run_record import read_run  # noqa: E402
from quickstart import run as quickstart  # noqa: E402
from tests.browser import Browser, Page, find_browser  # noqa: E402

PICTURES = ROOT / "docs" / "pictures"
RUNS = {
    "lora": ["--num_processes", "2", "--save_strategy", "steps", "--save_steps", "80"],
    "lora-packed": ["--num_processes", "1", "--packing", "true", "--learning_rate", "1e-3", "--max_steps", "120"],
}
TAKEN = {
    "report-light": ("report", "top", (1000, 930), False),
    "report-dark": ("report", "memory-section", (1000, 930), True),
    "report-phone": ("report", "curves", (390, 800), False),
    "report-compare": ("comparison", "top", (1000, 1100), False),
}
"""The pictures: of which page, from which part on, its size, whether it is dark."""


def main(given: list[str]) -> None:
    program = find_browser()
    if program is None:
        sys.exit("there is no browser: install Chromium")
    folders = [Path(name) for name in given] or [train(name, flags) for name, flags in RUNS.items()]
    runs = [read_run(folder) for folder in folders]
    pages = {"report": render(runs[0]), "comparison": whole_page(comparison(runs))}
    with tempfile.TemporaryDirectory() as place, Browser(program) as browser:
        for name, text in pages.items():
            for folder in folders:
                text = text.replace(str(folder.resolve()), f"runs/{folder.name}")
            (Path(place) / f"{name}.html").write_text(text.replace(f"{ROOT}/", ""))
        for name, (shown, part, size, dark) in TAKEN.items():
            with browser.page(*size, dark) as page:
                page.open(Path(place) / f"{shown}.html")
                page.wait("document.body.dataset.drawn")
                page.run("document.documentElement.style.scrollbarWidth = 'none'")
                page.run(f"location.hash = '{part}'")
                page.settle()
                picture = few_colors(page, page.screenshot())
            (PICTURES / f"{name}.png").write_bytes(picture)
            print(f"docs/pictures/{name}.png: {len(picture) / 1e3:.0f} kB")


def train(name: str, flags: list[str]) -> Path:
    """A run of the quickstart."""
    place = ROOT / "quickstart" / "out" / "pictures" / name
    words = ["sft", str(quickstart.SETTINGS), "--output_dir", str(place), "--use_cpu", "--overwrite", *flags]
    words += ["--logging_steps", "4", "--eval_steps", "40"]
    command = [sys.executable, "-m", "fullshard", *words]
    subprocess.run(command, cwd=ROOT, env=quickstart.environment(), check=True)
    return place


def few_colors(page: Page, picture: bytes) -> bytes:
    """The PNG with its 256 most frequent colors; the others become the nearest of them."""
    width, height, palette, pixels = page.run(f"""(async () => {{
        const bytes = Uint8Array.from(atob('{base64.b64encode(picture).decode()}'), c => c.charCodeAt(0));
        const image = await createImageBitmap(new Blob([bytes], {{type: 'image/png'}}));
        const drawing = new OffscreenCanvas(image.width, image.height).getContext('2d');
        drawing.drawImage(image, 0, 0);
        const data = new Uint32Array(drawing.getImageData(0, 0, image.width, image.height).data.buffer);
        const counts = new Map();
        for (const color of data) counts.set(color, (counts.get(color) ?? 0) + 1);
        const rgb = color => [color & 255, color >> 8 & 255, color >> 16 & 255];
        const kept = [...counts].sort((a, b) => b[1] - a[1]).slice(0, 256).map(([color]) => rgb(color));
        const far = ([r, g, b], [x, y, z]) => (r - x) ** 2 + (g - y) ** 2 + (b - z) ** 2;
        const nearest = new Map([...counts.keys()].map(color => [color, kept.reduce(
            (best, one, i) => far(one, rgb(color)) < far(kept[best], rgb(color)) ? i : best, 0)]));
        const indices = Uint8Array.from(data, color => nearest.get(color));
        return [image.width, image.height, kept, indices.toBase64()];
    }})()""")
    rows = base64.b64decode(pixels)
    lines = b"".join(b"\0" + rows[i : i + width] for i in range(0, len(rows), width))
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    chunks = {
        b"IHDR": header,
        b"PLTE": bytes(itertools.chain(*palette)),
        b"IDAT": zlib.compress(lines, 9),
        b"IEND": b"",
    }
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks.items()
    )


if __name__ == "__main__":
    main(sys.argv[1:])
