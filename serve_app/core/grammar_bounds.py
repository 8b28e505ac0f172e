"""The bounds of a grammar that need no compiler, and the error of all of them."""

from __future__ import annotations

from serve_app.errors import BadRequest

# Of a schema, a regex, a grammar, or all choices: 17,000 words of 12 letters. All but lists of a few long strings take
# more CPU than they may long before; below it, what vLLM's front end does with it takes a tenth of a second.
MAX_GRAMMAR_BYTES = 256 * 2**10
GRAMMAR_TOO_COMPLEX = "grammar_too_complex"


def too_complex(why: str, param: str | None = None) -> BadRequest:
    """The refusal of a grammar that an engine everybody shares cannot afford."""
    return BadRequest(f"the grammar or schema is too complex: {why}", param=param, code=GRAMMAR_TOO_COMPLEX)
