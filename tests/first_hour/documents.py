"""What the documents promise a newcomer, read from them: the wrong configurations, and the file of three teams."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
ERRORS = ROOT / "docs" / "reference" / "errors.md"
TUTORIAL = ROOT / "docs" / "tutorials" / "three-teams.md"
FINDINGS = "## Findings of check"
TEAMS = "## 1. Write the configuration"
EXAMPLE = re.compile(r"^- `(\w+)`: (.+) (-> .+)\. Example: `([^`]+)`$", re.MULTILINE)
PLACEHOLDER = re.compile(r"\{\w+\}")
FILE = "my.yaml"  # its name in the documents
MODEL = "my-model"  # the folder of a model in the documents: here a copy of the built-in one


@dataclass(frozen=True, slots=True)
class WrongConfiguration:
    """A file, and the lines that `serve-app check` prints of it; `{...}` in them stands for a value."""

    code: str
    text: str
    problem: tuple[str, ...]

    def is_reported_in(self, output: str) -> bool:
        """Whether the lines stand in it, one after the other."""
        return re.search(rf"^{self._pattern()}$", output, re.MULTILINE) is not None

    def is_all_of(self, output: str) -> bool:
        """Whether nothing else is said of the file."""
        return re.fullmatch(rf"{self._pattern()}\n{re.escape(FILE)}: 1 error\n", output) is not None

    def _pattern(self) -> str:
        return r"\n *".join(".+".join(map(re.escape, PLACEHOLDER.split(line))) for line in self.problem)


def section(document: Path, heading: str) -> str:
    """From a heading to the next one of its kind.

    Raises:
        ValueError: the document has no such heading.
    """
    _, found, rest = f"\n{document.read_text()}".partition(f"\n{heading}\n")
    if not found:
        raise ValueError(f"{document} has no heading {heading!r}")
    return rest.partition("\n## ")[0]


def wrong_configurations() -> list[WrongConfiguration]:
    """The findings that have an example of a file."""
    examples = EXAMPLE.findall(section(ERRORS, FINDINGS))
    return [
        WrongConfiguration(code, text, (f"error: {{path}}: {message}", remedy))
        for code, message, remedy, text in examples
    ]


def three_teams() -> dict[str, Any]:
    """The configuration."""
    (block,) = re.findall(r"^```yaml\n(.*?)^```", section(TUTORIAL, TEAMS), re.MULTILINE | re.DOTALL)
    found: dict[str, Any] = yaml.safe_load(block)
    return found
