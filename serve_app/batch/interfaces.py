"""What a worker needs beside the store and the files: a way to run a row, and the figures of the models' queues."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from serve_app.core.batches import BatchRecord, ModelFigures, RowError
from serve_app.errors import ServeAppError


@dataclass(frozen=True, slots=True)
class RowAnswer:
    """The answer of a router to one row."""

    status: int
    body: bytes
    retry_after_s: float | None = None
    request_id: str = ""

    @classmethod
    def of_error(cls, error: ServeAppError, retry_after_s: float | None = None) -> RowAnswer:
        """What a router would answer for this error."""
        return cls(error.status, json.dumps(error.body()).encode(), retry_after_s)

    @property
    def error_code(self) -> str | None:
        """The code of the error in it; None: it has none."""
        if self.status < 400:
            return None
        with contextlib.suppress(ValueError):
            found = json.loads(self.body)
            error = found.get("error") if isinstance(found, dict) else None
            code = error.get("code") if isinstance(error, dict) else None
            return code if isinstance(code, str) else None
        return None


class RowRunner(Protocol):
    """Runs a row at a router, as the key of its batch. Raises: no router answered."""

    async def run(self, batch: BatchRecord, path: str, body: bytes, key: str) -> RowAnswer: ...


class Figures(Protocol):
    """The figures of the models' queues, by model. Raises: they are not known now."""

    async def get(self) -> Mapping[str, ModelFigures]: ...


class ModelCheck(Protocol):
    """What forbids the key of a batch to use a model, or None; asked once a model and batch. Raises: it is not known
    now."""

    async def refusal(self, batch: BatchRecord, model: str) -> RowError | None: ...
