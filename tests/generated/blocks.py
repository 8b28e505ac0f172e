"""Lists in a page: each stands between two comments, and all else in the page is written by hand."""

from __future__ import annotations


class NoBlock(ValueError):
    """The page lacks the comments of a list."""


def begin(name: str) -> str:
    return f"<!-- {name}: written by `python -m tests.generated` -->\n"


def end(name: str) -> str:
    return f"<!-- end of {name} -->"


def written(page: str, name: str, content: str) -> str:
    """The page with this content between the comments of the name.

    Raises:
        NoBlock: the page has no such comments.
    """
    before, first, rest = page.partition(begin(name))
    _, last, after = rest.partition(end(name))
    if not (first and last):
        raise NoBlock(name)
    return f"{before}{first}\n{content.strip()}\n\n{last}{after}"
