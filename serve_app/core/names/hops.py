"""The models that one request may run on, and when it goes to the next one. Pure.

A request goes to the next model if the present one has no replica, refuses it early, has a full queue, fails before the
first byte of the answer, or is too small for it. A limit of the key or tenant, and an error of the request itself,
would meet it at every model, so they end it. So does what is too large for all models, unless one of them only could
not run it at that time: then its client gets the error of that one.

Invariant: no request goes to another model once its client has a byte of the answer, or its deadline has passed.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from serve_app.core.body_bounds import TOO_LONG
from serve_app.core.queue import RefusalReason
from serve_app.errors import EngineFailed, NotFound, OperationUnknown, RequestFailed, ServeAppError


class HopReason(enum.StrEnum):
    """Why a request went to the next model of its route; a label of the metrics."""

    NO_REPLICA = "no_replica"  # none runs, none is reached, or none knows the operation
    EARLY_REFUSAL = "early_refusal"  # it cannot start in time there, or it was evicted
    QUEUE_FULL = "queue_full"
    ENGINE_FAILED = "engine_failed"  # before the first byte
    TOO_LARGE = "too_large"  # for this model: its context, its images, its slots


TOO_LARGE_CODES = frozenset({TOO_LONG, RefusalReason.TOO_LARGE.value})  # of errors that a larger model may not give

# By the code of an error of the queue.
_REFUSALS: dict[str, HopReason] = {
    RefusalReason.NO_REPLICA: HopReason.NO_REPLICA,
    RefusalReason.QUEUE_FULL: HopReason.QUEUE_FULL,
    RefusalReason.SHED: HopReason.EARLY_REFUSAL,
    RefusalReason.DEADLINE: HopReason.EARLY_REFUSAL,
    RefusalReason.TIMEOUT: HopReason.EARLY_REFUSAL,
    RefusalReason.SESSIONS: HopReason.EARLY_REFUSAL,
}


class ModelHops:
    """The models of one request.

    Args:
        models: in order; at least one, each once.
    """

    def __init__(self, models: Sequence[str]) -> None:
        self._models = tuple(models)
        self._at = 0
        self._left: ServeAppError | None = None  # the first error after which it left a model, of one that may pass

    @property
    def model(self) -> str:
        """The present one."""
        return self._models[self._at]

    @property
    def has_next(self) -> bool:
        return self._at + 1 < len(self._models)

    @property
    def is_choice(self) -> bool:
        """Whether there are several models."""
        return len(self._models) > 1

    def leave(self, error: ServeAppError) -> str:
        """Go to the next one, after this error. IndexError: there is none."""
        if self._left is None or (_is_too_large(self._left) and not _is_too_large(error)):
            self._left = error
        self._at += 1
        return self.model

    def last_error(self, error: ServeAppError) -> ServeAppError:
        """What the client gets if the request ends with this error of the present model."""
        return self._left if self._left is not None and _is_too_large(error) else error

    def reason(self, error: ServeAppError, *, has_answer: bool, deadline: float | None, now: float) -> HopReason | None:
        """Why the request goes to the next model after this error of the present one; None: it ends with the error.

        Args:
            has_answer: the client has a byte of the answer.
            deadline, now: on one clock.
        """
        if not self.has_next or has_answer or (deadline is not None and now >= deadline):
            return None
        if isinstance(error, NotFound | OperationUnknown):
            return HopReason.NO_REPLICA  # the model leaves the configuration, or its replicas are of an earlier release
        if isinstance(error, EngineFailed | RequestFailed):
            return HopReason.ENGINE_FAILED
        return HopReason.TOO_LARGE if _is_too_large(error) else _REFUSALS.get(error.code)


def _is_too_large(error: ServeAppError) -> bool:
    """Whether it says that the model is too small."""
    return error.code in TOO_LARGE_CODES
