"""The one error tree: what a refusal looks like to every caller.

    ServeAppError                    500 internal_error
    ├── ConfigError                  400 invalid_config            (start-up; names the key)
    ├── BadRequest                   400 invalid_request_error     (names the field in `param`)
    │   ├── BodyTooLarge             413 body_too_large
    │   └── BodyTooSlow              408 request_timeout
    ├── Unauthorized                 401 invalid_api_key
    ├── Forbidden                    403 permission_denied
    ├── NotFound                     404 not_found                 (unknown route or model)
    │   └── LeaseNotFound            404 lease_not_found
    ├── MethodNotAllowed             405 method_not_allowed
    ├── LeaseConflict                409 lease_conflict            (what the lease is does not allow it)
    ├── AnswerNotKept                409 idempotency_answer_not_kept
    ├── Overloaded                   429 queue_full | deadline | shed
    │   └── InsufficientMemory       429 insufficient_memory       (says where and how much is missing)
    └── Unavailable                  503 no_replica | draining
        └── EngineFailed             502 engine_failed             (the replica died under the request)
            └── EngineUnreachable    502 engine_unreachable        (the replica never had the request)

Each class owns `status`, `code` and `type`; an instance carries `param` and `retry_after_s`. All of them survive
pickling, since they cross process borders between the router and the engine replicas.
"""

from __future__ import annotations

from typing import Any

RAY_MADE = "RayTaskError"  # the base of what Ray makes of an error, by name: this module knows no Ray


class ServeAppError(Exception):
    """Base of every error this package raises on purpose.

    Args:
        message: what went wrong, for the caller to read.
        param: the request field or configuration key at fault.
        retry_after_s: seconds after which a repeat can succeed; None when that cannot be known.
        code: overrides the class's machine-readable code.
    """

    status: int = 500
    type: str = "internal_server_error"
    code: str = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        if code is not None:
            self.code = code

    def __init_subclass__(cls, **options: Any) -> None:
        """Ray raises an error of another process as one of a class made of ours and its own, around ours as `cause`:
        without a code of its own, it would show that of its class."""
        super().__init_subclass__(**options)
        if any(base.__name__ == RAY_MADE for base in cls.__bases__):
            cls.code = property(lambda self: self.cause.code)  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.param, self.retry_after_s, self.code))

    def body(self) -> dict[str, Any]:
        """The error in OpenAI's wire format."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


def _rebuild(
    cls: type[ServeAppError],
    message: str,
    param: str | None,
    retry_after_s: float | None,
    code: str,
) -> ServeAppError:
    return cls(message, param=param, retry_after_s=retry_after_s, code=code)


class ConfigError(ServeAppError):
    """The configuration is wrong; `param` is the dotted key."""

    status, type, code = 400, "invalid_config", "invalid_config"


class BadRequest(ServeAppError):
    """The request itself is wrong; a repeat fails the same way."""

    status, type, code = 400, "invalid_request_error", "invalid_request_error"


class BodyTooLarge(BadRequest):
    status, code = 413, "body_too_large"


class BodyTooSlow(BadRequest):
    """As HAProxy answers for what it waits for itself."""

    status, code = 408, "request_timeout"


class Unauthorized(ServeAppError):
    status, type, code = 401, "invalid_request_error", "invalid_api_key"


class Forbidden(ServeAppError):
    status, type, code = 403, "permission_error", "permission_denied"


class NotFound(ServeAppError):
    status, type, code = 404, "invalid_request_error", "not_found"


class LeaseNotFound(NotFound):
    """No such lease, or its owner is not known (any more)."""

    code = "lease_not_found"


class LeaseConflict(ServeAppError):
    """A lease of this id exists, or what it is does not allow what was asked."""

    status, type, code = 409, "conflict_error", "lease_conflict"


class AnswerNotKept(ServeAppError):
    """A repeat under an Idempotency-Key whose answer was too long to be kept."""

    status, type, code = 409, "conflict_error", "idempotency_answer_not_kept"


class MethodNotAllowed(ServeAppError):
    status, type, code = 405, "invalid_request_error", "method_not_allowed"


class Overloaded(ServeAppError):
    """Refused because of load: `code` is the reason, `retry_after_s` comes from the measured drain rate."""

    status, type, code = 429, "rate_limit_error", "queue_full"


class InsufficientMemory(Overloaded):
    """GPU memory or KV tokens asked for are not free; the message has the figures."""

    code = "insufficient_memory"


class Unavailable(ServeAppError):
    """No replica can serve this now."""

    status, type, code = 503, "service_unavailable", "no_replica"


class EngineFailed(Unavailable):
    """The engine replica died or failed while it held the request."""

    status, code = 502, "engine_failed"


class EngineUnreachable(EngineFailed):
    """The engine never had the request: another may be tried as often as one likes."""

    code = "engine_unreachable"
