"""Reads the texts that a score or a rerank compares from the body of its request.

A score names them in one of vLLM's four forms, a rerank as `query` and `documents`. One query is compared with every
document; several queries with as many documents, pair by pair.

Invariant: of a body that passes `score_inputs`, vLLM reads the very fields that were counted: bodies in two forms at
once, of which vLLM takes the one that parses, are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serve_app.errors import BadRequest
from serve_app.types import Operation

# By operation: the names of the queries and of the documents, in each form that vLLM 0.32.0 takes; the first one is
# named where a body has none of them.
FORMS: dict[Operation, tuple[tuple[str, str], ...]] = {
    Operation.SCORE: (("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2")),
    Operation.RERANK: (("query", "documents"),),
}
INPUT_FIELDS = {op: tuple(dict.fromkeys(name for form in forms for name in form)) for op, forms in FORMS.items()}
_TEXT_TYPES = frozenset({str, dict})


@dataclass(frozen=True, slots=True)
class ScoreInputs:
    """The queries and documents of a request, each a text or an object with the `content` of a multimodal message, and
    their fields' names."""

    query_field: str
    document_field: str
    queries: list[Any]
    documents: list[Any]

    @property
    def longer_field(self) -> str:
        """The field with more entries."""
        return self.document_field if len(self.documents) >= len(self.queries) else self.query_field


def score_inputs(operation: Operation, body: Mapping[str, Any]) -> ScoreInputs:
    """The texts of a body of `Operation.SCORE` or `Operation.RERANK`.

    Raises:
        BadRequest: a field is missing, one too many, empty, or no text; or the numbers do not match. `param` names it.
    """
    query_field, document_field = _form(operation, body)
    if operation is Operation.RERANK and type(body[query_field]) is list:
        raise BadRequest(f"`{query_field}` must be one text, not a list", param=query_field)
    queries = _entries(query_field, body)
    documents = _entries(document_field, body)
    if len(queries) not in (1, len(documents)):
        raise BadRequest(
            f"`{query_field}` has {len(queries)} entries and `{document_field}` {len(documents)}: "
            "give one query for all documents, or one for each",
            param=query_field,
        )
    return ScoreInputs(query_field, document_field, queries, documents)


def _form(operation: Operation, body: Mapping[str, Any]) -> tuple[str, str]:
    """The names of the two fields. Raises BadRequest unless the body has those of exactly one form."""
    forms = FORMS[operation]
    given = [name for name in INPUT_FIELDS[operation] if body.get(name) is not None]
    form = max(forms, key=lambda names: sum(name in given for name in names))  # of several, the first
    surplus = next((name for name in given if name not in form), None)
    missing = next((name for name in form if name not in given), None)
    if surplus is not None:
        raise BadRequest(f"`{surplus}` cannot be combined with `{form[0]}` and `{form[1]}`", param=surplus)
    if missing is not None:
        raise BadRequest(f"`{missing}` is missing: `{form[0]}` and `{form[1]}` are compared", param=missing)
    return form


def _entries(field: str, body: Mapping[str, Any]) -> list[Any]:
    value = body[field]
    entries = value if type(value) is list else [value]
    if not entries:
        raise BadRequest(f"`{field}` is an empty list", param=field)
    if not _TEXT_TYPES.issuperset(map(type, entries)):  # 250,000 entries: 3 ms, a loop over them 12
        number = next(number for number, entry in enumerate(entries) if type(entry) not in _TEXT_TYPES)
        path = f"{field}.{number}" if type(value) is list else field
        raise BadRequest(f"`{path}` must be a text", param=path)
    return entries
