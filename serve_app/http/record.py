"""How a request ended, for the metrics.

Invariant: every error and every answer has exactly one outcome.
"""

from __future__ import annotations

from serve_app.errors import EngineFailed, Overloaded, ServeAppError
from serve_app.types import Outcome, RequestClass


class Record:
    """What the metrics are told about a request when it ends."""

    __slots__ = ("granted", "model", "outcome", "request_class", "tenant")

    def __init__(self, tenant: str, request_class: RequestClass) -> None:
        self.tenant = tenant
        self.request_class = request_class
        self.model = ""
        self.granted = False
        self.outcome = Outcome.INTERNAL_ERROR


def answered(status: int) -> Outcome:
    """The outcome of a request that an engine answered."""
    if status < 400:
        return Outcome.OK
    return Outcome.BAD_REQUEST if status < 500 else Outcome.ENGINE_FAILED


def outcome_of(error: ServeAppError) -> Outcome:
    match error:
        case EngineFailed():
            return Outcome.ENGINE_FAILED
        case Overloaded():
            return Outcome.REFUSED
        case _ if error.status == 503:
            return Outcome.REFUSED
        case _ if error.status < 500:
            return Outcome.BAD_REQUEST
        case _:
            return Outcome.INTERNAL_ERROR
