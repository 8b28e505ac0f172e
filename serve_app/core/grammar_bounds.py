"""The bound of a grammar that is checked without a compiler, and the error for all bounds of grammars."""

from __future__ import annotations

from serve_app.errors import BadRequest

# Size of a schema, a regex, a grammar, or all choices: 17,000 words of 12 letters. All but lists of a few long strings
# exceed their CPU bound long before this size; below it vLLM's front end takes a tenth of a second.
MAX_GRAMMAR_BYTES = 256 * 2**10
GRAMMAR_TOO_COMPLEX = "grammar_too_complex"


def too_complex(why: str, param: str | None = None, kind: type[BadRequest] = BadRequest) -> BadRequest:
    """The error for a grammar that is too expensive for a shared engine."""
    return kind(f"the grammar or schema is too complex: {why}", param=param, code=GRAMMAR_TOO_COMPLEX)
