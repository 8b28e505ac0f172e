"""Splits a body into the parts that are requests of the queue, and measures each, before anything else is asked of it.

A completion has a part for each prompt of its list; embeddings and scores for each few texts or pairs; all else is one.
Every text is looked at once: the bytes of a part are those of its own texts and of what all parts share.

Invariant: the parts have the entries of the whole, in order. The measure of a part is that of its body alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from serve_app.core.body_bounds import BodySize
from serve_app.core.continuation import is_preemptible
from serve_app.core.receipts import RequestMeasure
from serve_app.core.score_inputs import score_inputs
from serve_app.errors import BadRequest
from serve_app.http.request_size import entry_size, list_field, prompt_bytes, prompt_size, sequence_count, text_count
from serve_app.settings import HttpSettings
from serve_app.types import Operation

# Inputs or pairs of one part: as many keep an engine busy, and 8,000 tokens take it well under a second.
INPUTS_TOGETHER = 32
BYTES_TOGETHER = 32_768


class SplitBody(NamedTuple):
    """A request's body, and its parts.

    Args:
        body: as the client asks for it, with its `measure`.
        parts: each body with its measure, in order; if there is one, it is the whole.
        fields: those of the whole whose lists are split; `shares_query`: the one query of a score is in each part.
    """

    operation: Operation
    body: dict[str, Any]
    measure: RequestMeasure
    parts: tuple[tuple[dict[str, Any], RequestMeasure], ...]
    fields: frozenset[str]
    shares_query: bool


class _Lists(NamedTuple):
    """The lists of a body that are split, by their fields.

    Args:
        sizes: bytes of each entry, of all fields; `read`: bytes that it makes an engine read, with a query of its own.
        sequences, answers: of the whole.
        query: the field and the bytes of a score's one query, which each part has; None: there is none.
    """

    columns: dict[str, list[Any]]
    sizes: list[int]
    read: list[int]
    sequences: int
    answers: int
    query: tuple[str, int] | None = None


def split_body(operation: Operation, body: dict[str, Any], size: BodySize, bounds: HttpSettings) -> SplitBody:
    """The parts of a body, measured as far as that needs no estimate (`measuring.with_costs`). O(values of the body).

    Raises:
        BadRequest: as `sequence_count` and `score_inputs`, or a list whose entries are not all texts or lists of token
            ids.
    """
    lists = (_texts if operation.is_scoring else _prompts)(operation, body, bounds)
    fields = frozenset(lists.columns)
    large = size.is_large()  # else no part is
    query_field, query_bytes = lists.query or ("", 0)
    others = {name: value for name, value in body.items() if name not in fields and name != query_field}
    shared = query_bytes + prompt_bytes(operation, others)

    def measured(
        part: dict[str, Any], part_size: BodySize, own_bytes: int, sequences: int, answers: int
    ) -> RequestMeasure:
        return RequestMeasure(
            prompt_bytes=shared + own_bytes,
            sequences=sequences,
            answers=max(1, answers),
            is_large=large and part_size.is_large(),
            is_preemptible=is_preemptible(operation, part),
        )

    is_alone = operation is Operation.COMPLETION
    whole = measured(body, size, sum(lists.sizes), lists.sequences, lists.answers)
    ranges = list(_together(lists.read, 1 if is_alone else INPUTS_TOGETHER))
    if len(ranges) < 2:
        return SplitBody(operation, body, whole, ((body, whole),), fields, lists.query is not None)
    parts = list[tuple[dict[str, Any], RequestMeasure]]()
    for start, end in ranges:
        columns = lists.columns.items()
        part = body | {name: column[start] if is_alone else column[start:end] for name, column in columns}
        if operation.is_scoring:
            answers = end - start
            sequences = len(fields) * answers + (lists.query is not None)
        else:
            sequences = answers = sequence_count(operation, part, bounds)
        own_bytes = sum(lists.sizes[start:end])
        parts.append((part, measured(part, size.part(fields, start, end), own_bytes, sequences, answers)))
    return SplitBody(operation, body, whole, tuple(parts), fields, lists.query is not None)


def _prompts(operation: Operation, body: dict[str, Any], bounds: HttpSettings) -> _Lists:
    """The list of prompts, or of texts that are embedded; without columns, if there is none."""
    sequences = sequence_count(operation, body, bounds)
    columns = dict[str, list[Any]]()
    if operation is Operation.COMPLETION or operation.is_pooling:
        field = list_field(operation, body)
        columns = {field: entries} if (entries := _entries(field, body)) else {}
    sizes = [entry_size(field, entry) for field, entries in columns.items() for entry in entries]
    return _Lists(columns, sizes, sizes, sequences, sequences)


def _texts(operation: Operation, body: dict[str, Any], bounds: HttpSettings) -> _Lists:
    """The documents of a score, or its pairs. A query counts once a pair, as a cross-encoder reads it; what embeds
    texts apart embeds the query once a part."""
    texts = score_inputs(operation, body)
    sequences = text_count(texts, bounds)
    answers = len(texts.documents)
    of_queries = _sizes(texts.queries)
    of_documents = _sizes(texts.documents)
    columns = {texts.document_field: texts.documents}
    if len(of_queries) == 1:
        read = [size + of_queries[0] for size in of_documents]
        return _Lists(columns, of_documents, read, sequences, answers, query=(texts.query_field, of_queries[0]))
    read = [size + query for size, query in zip(of_documents, of_queries, strict=True)]
    return _Lists({texts.query_field: texts.queries, **columns}, read, read, sequences, answers)


def _entries(field: str, body: Mapping[str, Any]) -> list[Any]:
    """The prompts in a field, or the conversations; none, if it has one. Raises as `split_body`."""
    entries = body.get(field)
    if type(entries) is not list or len(entries) < 2:
        return []
    if field in ("messages", "inputs"):
        kind = list if field == "messages" else dict
        return entries if all(type(one) is kind for one in entries) else []
    if all(type(one) is int for one in entries):
        return []
    for number, entry in enumerate(entries):
        if type(entry) is not str and not (type(entry) is list and entry and type(entry[0]) is int):
            raise BadRequest(f"`{field}.{number}` must be a string or a list of token ids", param=f"{field}.{number}")
    return entries


def _together(read: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Where each part begins and ends, by the bytes that its entries make an engine read."""
    start = total = 0
    for number, size in enumerate(read):
        if number > start and (number - start == most or total + size > BYTES_TOGETHER):
            yield start, number
            start = number
            total = 0
        total += size
    if read:
        yield start, len(read)


def _sizes(texts: Iterable[Any]) -> list[int]:
    """Bytes of each text of a score."""
    return [prompt_size([one] if type(one) is dict else one) for one in texts]
