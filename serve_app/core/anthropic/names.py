"""The names of a chat's fields, in the words of the client whose Messages request became that chat."""

from __future__ import annotations

import re

# Of a message the list is named: tools' results and the system prompt give a chat other numbers.
_NAMES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\bmessages(?:\.\w+)+"), "messages"),
    (re.compile(r"\bresponse_format\.json_schema\.schema\b"), "output_config.format.schema"),
    (re.compile(r"\bresponse_format\b"), "output_config.format"),
    (re.compile(r"\btools\.(\d+)\.function\.parameters\b"), r"tools.\1.input_schema"),
    (re.compile(r"\btools\.(\d+)\.function\b"), r"tools.\1"),
    (re.compile(r"\bthinking_token_budget\b"), "thinking.budget_tokens"),
    (re.compile(r"\breasoning_effort\b"), "output_config.effort"),
    (re.compile(r"^stop(?=\.\d|:|$)|(?<=`)stop(?=`|\.\d)"), "stop_sequences"),
)


def client_words(text: str) -> str:
    """An error's text, or the path of its field, with the client's names."""
    for pattern, name in _NAMES:
        text = pattern.sub(name, text)
    return text
