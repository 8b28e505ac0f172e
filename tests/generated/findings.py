"""What `serve-app check` finds, and what it says of it."""

from __future__ import annotations

from serve_app.cli.check.findings import WORDS
from tests.generated.blocks import table


def findings() -> str:
    rows = [(f"`{code}`", words.severity, words.message, words.remedy) for code, words in WORDS.items()]
    return table(("code", "severity", "message", "remedy"), rows)
