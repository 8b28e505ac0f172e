"""`make docs`: the site builds without a warning, asks no other host for anything, and has no spelling mistake."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_docs import DOCUMENTS

ROOT = Path(__file__).resolve().parent.parent
BUILD_S = 240.0  # bound of a build that takes 5 s of CPU: the machine may be busy
RECIPE = (ROOT / "Makefile").read_text().split("\ndocs:")[1].split("\n\n")[0]
LOADED = re.compile(r"<(?:script|img|link|iframe)\b[^>]*?\b(?:src|href)=\"(?:https?:)?//[^\"]*\"")


def command(program: str) -> list[str]:
    """The arguments of a program in the target's recipe."""
    (line,) = re.findall(rf"^\t@\$\(BIN\)/(.*\b{program}\b.*)$", RECIPE, re.MULTILINE)
    return shlex.split(line)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built by the recipe into a folder of the test."""
    built = tmp_path_factory.mktemp("site")
    places = {"build/docs": str(built / "docs"), "build/doctrees": str(built / "doctrees")}
    _, *arguments = [places.get(argument, argument) for argument in command("sphinx")]
    assert {"-W", "-n", "--keep-going"} <= set(arguments)
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=BUILD_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return built / "docs"


def test_the_site_has_every_document_and_a_search(site: Path) -> None:
    pages = {file.relative_to(site).with_suffix("").as_posix() for file in site.rglob("*.html")}
    assert {document.removesuffix(".md") for document in DOCUMENTS} | {"index", "search"} <= pages
    assert (site / "searchindex.js").stat().st_size > 0


def test_the_site_loads_nothing_from_another_host(site: Path) -> None:
    assert LOADED.search('<script src="https://cdn.example/a.js">')
    loaded = {found[0] for file in site.rglob("*.html") for found in LOADED.finditer(file.read_text())}
    assert loaded == set()


def test_the_documents_are_spelt_correctly() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "codespell_lib", *command("codespell")[1:]],
        cwd=ROOT, capture_output=True, text=True, timeout=BUILD_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
