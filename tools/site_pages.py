"""Pages of the site that lie outside docs/: a hook of MkDocs (mkdocs.yml).

README.md is the front page, and the change log and the benchmark results are pages too. Links are written for readers
of the repository; here they are pointed at the site's pages, so that one text serves both.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "benchmarks/RESULTS.md": "benchmarks.md"}
"""File of the repository → page of the site."""
PLACES = {page: file for file, page in OUTSIDE.items()}


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that lie outside docs/."""
    for name, page in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point the links of a page at pages of the site, and write `|` in the code of tables as the site reads it."""
    here = PLACES.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    rows = re.compile(r"^\|.*", re.MULTILINE)
    markdown = rows.sub(lambda row: re.sub(r"`[^`]*`", lambda code: code[0].replace("\\|", "|"), row[0]), markdown)
    return re.sub(
        r"\]\(([^)\s#]+)(#[^)\s]*)?\)", lambda link: f"]({site_link(here, link[1])}{link[2] or ''})", markdown
    )


def site_link(here: str, target: str) -> str:
    """A link in one of the repository's files, as a link of the site. Links to other sites stay."""
    if "://" in target:
        return target
    file = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
    return OUTSIDE.get(file, file.removeprefix("docs/"))
