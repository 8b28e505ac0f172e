"""Every `serve-app ...` in the documents and in `deploy` is a command line that the program takes. None is run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from serve_app.cli.commands import app
from tests.requires import requires
from tests.test_docs import DOCUMENTS

requires("linux")

ROOT = Path(__file__).parents[2]
DEPLOYED = sorted(file.relative_to(ROOT).as_posix() for file in (ROOT / "deploy").rglob("*") if file.is_file())
COMMANDS: dict[str, Any] = vars(typer.main.get_command(app))["commands"]
FENCED = re.compile(r"^```[a-z ]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
# `serve-app`, whatever stands before it, and its arguments, up to what belongs to the shell or to the prose
LINE = re.compile(r"(?:^|[\s/'\"])serve-app +([A-Za-z]+(?:-[a-z]+)*(?: +(?:'[^']*'|\"[^\"]*\"|[^\s|#;&>'\")]+))*)")
MAKE = re.compile(r"^(?:\$ )?(?:[A-Z_]+=\S+ )*make ([a-z][a-z-]*)")
PLACEHOLDERS = {"COMMAND": "status"}  # of a sentence about all commands


def code_of(text: str) -> list[str]:
    """The lines of a document's blocks, and what stands in backticks."""
    blocks = FENCED.findall(text)
    return [line for block in blocks for line in block.splitlines()] + INLINE.findall(FENCED.sub("", text))


def command_lines(text: str) -> list[str]:
    """The arguments of each `serve-app` in the code of a document, as they are written there."""
    return [found.strip() for line in code_of(text) for found in LINE.findall(line)]


def of_document(path: str) -> list[str]:
    text = (ROOT / path).read_text()
    return command_lines(text if path.endswith(".md") else f"```\n{text}\n```\n")


def all_lines() -> list[str]:
    """In the documents each is a command line; in the files of `deploy` those are that begin with a command's name."""
    documented = {line for path in DOCUMENTS for line in of_document(path)}
    deployed = {line for path in DEPLOYED for line in of_document(path) if line.split()[0] in COMMANDS}
    return sorted(documented | deployed)


LINES = all_lines()


def complaint(line: str) -> str | None:
    """Why the program would refuse these arguments; None: it takes them. A verb alone is the command's name."""
    verb, *arguments = [PLACEHOLDERS.get(word, word) for word in shlex.split(line)]
    if verb not in COMMANDS:
        return f"there is no command {verb}"
    command = COMMANDS[verb]
    below = vars(command).get("commands")
    if below and arguments and not arguments[0].startswith("-"):
        verb, *arguments = arguments
        if verb not in below:
            return f"there is no command {verb}"
        command = below[verb]
    if {"--help", "-h"} & set(arguments) or not arguments:
        return None
    try:
        command.make_context(verb, arguments)
    except typer.TyperException as error:
        return str(error)
    return None


def test_the_documents_name_many_commands() -> None:
    assert len(LINES) > 20
    assert {
        "check my.yaml",
        "deploy --config ~/serve-app.yaml --timeout 7200",
        "logs --request chatcmpl-5d0c6f0e9c7b4f0f8a4f5f7d1c2b3a49",
    } <= set(LINES)


@pytest.mark.parametrize("line", LINES, ids=LINES)
def test_a_documented_command_is_taken(line: str) -> None:
    assert complaint(line) is None


@pytest.mark.parametrize(
    "line", ["chek my.yaml", "check my.yaml --fast", "up --port none", "deploy --plan", "keys revoke --fast"]
)
def test_what_the_program_refuses_is_seen(line: str) -> None:
    assert complaint(line) is not None


def test_every_make_target_in_the_documents_exists() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name for path in DOCUMENTS for line in code_of((ROOT / path).read_text()) for name in MAKE.findall(line)}
    assert len(named) > 5
    assert named - targets == set()


def test_every_command_is_in_the_reference() -> None:
    headings = re.findall(r"^### `(.*)`$", (ROOT / "docs/reference/cli.md").read_text(), re.MULTILINE)
    assert {heading.split()[0] for heading in headings} == set(COMMANDS)
