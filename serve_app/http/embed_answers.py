"""Joins the answers to the parts of one request for Cohere's embeddings: vectors by type, the texts, tokens that are
billed.

Invariant: the joined answer is that of one engine for all entries, in their order. Vectors are not looked into.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class _Meta(msgspec.Struct):
    api_version: msgspec.Raw = msgspec.Raw(b"{}")
    billed_units: dict[str, int] = {}


class _Answer(msgspec.Struct, omit_defaults=True):
    id: str
    embeddings: dict[str, list[msgspec.Raw]]
    texts: list[msgspec.Raw] | None = None
    meta: _Meta | None = None
    response_type: str = ""


_decoder = msgspec.json.Decoder(_Answer)


def joined_answer(documents: Sequence[bytes]) -> bytes:
    """The answer to all parts; `documents` are theirs, in order, at least one. Raises msgspec.DecodeError."""
    first, *others = (_decoder.decode(document) for document in documents)
    first.id = first.id.removesuffix("-0")
    for other in others:
        for kind, vectors in other.embeddings.items():
            first.embeddings[kind] += vectors
        if first.texts is not None and other.texts is not None:
            first.texts += other.texts
        if first.meta is not None and other.meta is not None:
            units = first.meta.billed_units
            for name, count in other.meta.billed_units.items():
                units[name] = units.get(name, 0) + count
    return msgspec.json.encode(first)
