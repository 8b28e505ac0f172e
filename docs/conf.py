"""The site: README, CONTRIBUTING and all pages under `docs/` as HTML, by `make docs`. Nothing is fetched.

The pages are plain Markdown that GitHub shows as well, so what only Sphinx needs is added here while it reads them: the
order of the pages (as `docs/index.md` lists them), and plain text in place of links of the archive that lead nowhere.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pygments.lexers.special import TextLexer

ROOT = Path(__file__).resolve().parent.parent
INDEX = "docs/index"
DECISIONS = "docs/decisions"  # a page that leads to the pages of its folder
ARCHIVE = "docs/archive/"
LINK = re.compile(r"\[([^\]]*)\]\(([^()#\s]*)(#[\w-]+)?\)")
PAGE_LINK = re.compile(r"\]\(([^()#\s:]+)\.md(?:#[\w-]+)?\)")

project = "serve-app"
release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
html_title = f"serve-app {release}"
html_theme = "furo"
html_copy_source = False
smartquotes = False  # options begin with two dashes
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
root_doc = INDEX
include_patterns = ["*.md", "docs/**"]
exclude_patterns = [entry.name for entry in ROOT.iterdir() if entry.is_dir() and entry.name != "docs"]
myst_heading_anchors = 4  # GitHub's anchors of headings
suppress_warnings = ["misc.highlighting_failure"]  # an example may leave something out: {"error": ...}


def toctree(caption: str, pages: Iterable[str]) -> str:
    """A hidden table of contents: it puts pages in order, and shows nothing where it stands."""
    lines = "\n".join(f"/{page}" for page in pages)
    if not lines:
        return ""
    return f"\n\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{lines}\n```\n"


def listed(page: str, text: str) -> Iterator[str]:
    """The pages that a text of a page links to, once each, as far as they exist."""
    targets = (posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) for path in PAGE_LINK.findall(text))
    pages = (target for target in dict.fromkeys(targets) if not target.startswith(ARCHIVE))
    return (page for page in pages if (ROOT / f"{page}.md").is_file())


def pages_in(folder: str) -> list[str]:
    return sorted(file.relative_to(ROOT).with_suffix("").as_posix() for file in (ROOT / folder).glob("*.md"))


def in_order(page: str, text: str) -> str:
    """What is added to a page so that others stand below it."""
    if page == DECISIONS:
        return toctree("Decisions", pages_in(DECISIONS))
    if page != INDEX:
        return ""
    sections = [section.partition("\n") for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]]
    found = [(heading.partition(":")[0], listed(page, body)) for heading, _, body in sections]
    return "".join(toctree(caption, pages) for caption, pages in [*found, ("Archive", pages_in(ARCHIVE))])


def without_dead_links(page: str, text: str) -> str:
    """A page of the archive, which keeps links to pages and headings that are gone, with their words alone."""

    def words(link: re.Match[str]) -> str:
        label, path, anchor = link.groups()
        file = ROOT / posixpath.dirname(page) / path
        return link[0] if ":" in path or (path and not anchor and file.is_file()) else label

    return LINK.sub(words, text)


def read(app: Any, page: str, source: list[str]) -> None:
    if page.startswith(ARCHIVE):
        source[0] = without_dead_links(page, source[0])
    source[0] += in_order(page, source[0])


def begin_at_index(app: Any, error: Exception | None) -> None:
    """The folder's own `index.html` leads to the start page."""
    if error is None:
        start = f"{INDEX}.html"
        page = f'<!doctype html><title>{html_title}</title><meta http-equiv="refresh" content="0; url={start}">'
        (Path(app.outdir) / "index.html").write_text(f'{page}<a href="{start}">{html_title}</a>\n')


def setup(app: Any) -> None:
    app.add_lexer("mermaid", TextLexer)  # its source: drawing it needs a script from elsewhere
    app.connect("source-read", read)
    app.connect("build-finished", begin_at_index)
