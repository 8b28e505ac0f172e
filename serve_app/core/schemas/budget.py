"""How much the schemas of one request may be to read, join and compare.

Invariant: reading them ends after so many steps, each of some 2 us, however they refer to each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.core.grammar_bounds import too_complex
from serve_app.errors import BadRequest


class TooManyParts(BadRequest):
    """A request whose schemas are more than the budget; a larger one may do."""


@dataclass(slots=True)
class SchemaBudget:
    """What is left. `parts`: schemas that are read, joined or compared: 0.4 s; one of 256 KiB has 20,000. `values`:
    what they have once they are written, parts that are there many times as often; one of 256 KiB has 130,000."""

    parts: int = 200_000
    values: int = 200_000

    def spend(self, path: str) -> None:
        """One part more of the schema at a path. Raises TooManyParts."""
        self.parts -= 1
        if self.parts < 0:
            raise too_complex("it has too many parts, those that it joins included", path, TooManyParts)

    def write(self, path: str) -> None:
        """One value more. Raises TooManyParts."""
        self.values -= 1
        if self.values < 0:
            raise too_complex("it has too many values, with all that is joined", path, TooManyParts)


def small_budget() -> SchemaBudget:
    """Of what is read in an event loop: 20 ms at most."""
    return SchemaBudget(6_000, 20_000)
