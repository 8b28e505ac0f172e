"""The bytes of a text in a statement: `length` counts characters, and each database has another word for the bytes."""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement


class octets(FunctionElement[int]):
    """The bytes of a text in UTF-8; of NULL 0."""

    type = BigInteger()
    inherit_cache = True


@compiles(octets, "sqlite")
def _in_sqlite(element: octets, compiler: Any, **named: Any) -> str:
    return f"coalesce(length(CAST({compiler.process(element.clauses, **named)} AS BLOB)), 0)"


@compiles(octets, "postgresql")
def _in_postgresql(element: octets, compiler: Any, **named: Any) -> str:
    return f"coalesce(octet_length({compiler.process(element.clauses, **named)}), 0)"
