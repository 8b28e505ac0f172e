"""The error tree: every refusal that a caller can get.

    ServeAppError                    500 internal_error
    ├── RequestFailed                500 request_failed            (a living engine failed at it: so will a repeat)
    ├── ConfigError                  400 invalid_config            (start-up; names the key)
    ├── BadRequest                   400 invalid_request_error     (names the field in `param`)
    │   ├── BodyTooLarge             413 body_too_large | storage_quota_exceeded   (what a tenant may store)
    │   ├── UnsupportedContent       415 unsupported_content_type
    │   └── BodyTooSlow              408 request_timeout
    ├── Unauthorized                 401 invalid_api_key | invalid_token   (a token of the identity provider)
    ├── Forbidden                    403 permission_denied
    ├── NotFound                     404 not_found                 (unknown route or model)
    │   └── LeaseNotFound            404 lease_not_found
    ├── MethodNotAllowed             405 method_not_allowed
    ├── LeaseConflict                409 lease_conflict            (the lease's kind or state forbids it)
    ├── AnswerNotKept                409 idempotency_answer_not_kept
    ├── KeyConflict                  409 key_conflict              (the key's state or origin forbids it)
    ├── DeployConflict               409 deploy_conflict           (another deployment is under way)
    ├── BatchConflict                409 batch_conflict | file_in_use   (the state of a batch forbids it)
    ├── RunLost                      409 idempotency_run_lost      (its routers died)
    ├── Overloaded                   429 queue_full | deadline | shed
    │   ├── RateLimited              429 rate_limit | concurrency | quota   (a limit of the key or the tenant)
    │   └── InsufficientMemory       429 insufficient_memory       (names the device and the shortage)
    ├── StorageFull                  507 storage_full              (the disk of the files)
    └── Unavailable                  503 no_replica | draining
        ├── StoreAway                503 no_store                  (the database of keys, use and batches)
        ├── StorageAway              503 no_storage                (the disk or bucket of the files)
        └── EngineFailed             502 engine_failed             (the replica died with the request)
            └── EngineUnreachable    502 engine_unreachable        (the replica never got the request)
                └── OperationUnknown 503 unknown_operation         (the replica is of an earlier release)

Each class owns `status`, `code` and `type`; an instance carries `param` and `retry_after_s`. All of them survive
pickling, since they cross process boundaries between the router and the engine replicas.
"""

from __future__ import annotations

import asyncio
import enum
from typing import Any

# These end the task itself. Anything else that is raised, also what is no `Exception` (a panic of native code), is a
# failure of the work that the task does.
TASK_ENDS = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)

# Codes of `Unavailable` for failures without an HTTP answer: over HTTP the connection is refused or reset.
NO_ROUTER = "no_router"  # no router accepted the call
DROPPED = "connection_lost"  # the router, or the client here, ended while the call ran
QUOTA_AWAY = "quota_away"  # the quota actor does not answer, or cannot read or store what its answer depends on
RAY_ERROR_BASE = "RayTaskError"  # the base class of Ray's wrapped errors, by name: this module does not import Ray


class ServeAppError(Exception):
    """Base of every error this package raises on purpose.

    Args:
        message: the failure, as text for the caller.
        param: the request field or configuration key at fault.
        retry_after_s: seconds after which a repeat can succeed; None if unknown.
        code: overrides the class's machine-readable code.
        reason: what no client may know, such as an address; it is in the error's text for logs and the terminal, and
            in no answer.
    """

    status: int = 500
    type: str = "internal_server_error"
    code: str = "internal_error"
    reason: str | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        code: str | None = None,
        reason: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        if code is not None:
            self.code = code
        if reason is not None:
            self.reason = reason

    def __str__(self) -> str:
        return self.message if self.reason is None else f"{self.message}: {self.reason}"

    def __init_subclass__(cls, **options: Any) -> None:
        """Ray raises an error of another process as an instance of a class derived from this class and Ray's own, with
        the original as `cause`: that class takes its code from the cause."""
        super().__init_subclass__(**options)
        if any(base.__name__ == RAY_ERROR_BASE for base in cls.__bases__):
            cls.code = property(lambda self: self.cause.code)  # type: ignore[assignment]

    def body(self) -> dict[str, Any]:
        """The error in OpenAI's format."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


class RequestFailed(ServeAppError):
    """An engine that lives failed at this request, which it did not foresee: nothing is said of the replica, and a
    repeat fails in the same way on every one."""

    code = "request_failed"


class ConfigError(ServeAppError):
    """The configuration is wrong; `param` is the dotted key."""

    status = 400
    type = "invalid_config"
    code = "invalid_config"


class BadRequest(ServeAppError):
    """The request itself is wrong; a repeat fails the same way."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_request_error"


class BodyTooLarge(BadRequest):
    status = 413
    code = "body_too_large"


class UnsupportedContent(BadRequest):
    """The body has a type or an encoding that is not read here."""

    status = 415
    code = "unsupported_content_type"


class BodyTooSlow(BadRequest):
    """The same code as HAProxy's own answer to a slow request."""

    status = 408
    code = "request_timeout"


class AuthFailure(enum.StrEnum):
    """Why a key or token was not accepted: a label of the metrics."""

    MISSING = "missing"  # no key, or a header that is not understood
    UNKNOWN_KEY = "unknown_key"
    REVOKED = "revoked"
    REPLACED = "replaced"
    EXPIRED = "expired"
    MALFORMED = "malformed"  # a token
    WRONG_HEADER = "wrong_header"
    ALGORITHM = "algorithm"
    UNKNOWN_KEY_ID = "unknown_key_id"
    SIGNATURE = "signature"
    NOT_YET_VALID = "not_yet_valid"
    ISSUER = "issuer"
    AUDIENCE = "audience"
    CLAIM = "claim"  # of a token: missing, of a wrong type, or of a value that is not accepted


class Unauthorized(ServeAppError):
    """No key or token that is accepted. `failure`: why, for the metrics."""

    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"

    def __init__(self, message: str, *, failure: AuthFailure = AuthFailure.UNKNOWN_KEY, **options: Any) -> None:
        super().__init__(message, **options)
        self.failure = failure


class Forbidden(ServeAppError):
    status = 403
    type = "permission_error"
    code = "permission_denied"


class NotFound(ServeAppError):
    status = 404
    type = "invalid_request_error"
    code = "not_found"


class LeaseNotFound(NotFound):
    """No such lease, or its owner is not (or no longer) known."""

    code = "lease_not_found"


class LeaseConflict(ServeAppError):
    """A lease of this id exists, or its kind or state does not allow the call."""

    status = 409
    type = "conflict_error"
    code = "lease_conflict"


class AnswerNotKept(ServeAppError):
    """A repeat under an Idempotency-Key whose answer was too long to be kept."""

    status = 409
    type = "conflict_error"
    code = "idempotency_answer_not_kept"


class KeyConflict(ServeAppError):
    """The key's state, its origin, or a change at the same time does not allow the call."""

    status = 409
    type = "conflict_error"
    code = "key_conflict"


class DeployConflict(ServeAppError):
    """Another deployment is under way, or what runs was declared in a way that only the machine can change."""

    status = 409
    type = "conflict_error"
    code = "deploy_conflict"


class BatchConflict(ServeAppError):
    """The state of a batch, or of the batch that reads a file, does not allow the call."""

    status = 409
    type = "conflict_error"
    code = "batch_conflict"


class RunLost(ServeAppError):
    """A repeat under an Idempotency-Key whose run was started anew once, and lost with its router again."""

    status = 409
    type = "conflict_error"
    code = "idempotency_run_lost"


class MethodNotAllowed(ServeAppError):
    """`allow`: the methods of the path, for the `Allow` header."""

    allow: tuple[str, ...] = ()
    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class Overloaded(ServeAppError):
    """Refused because of load: `code` is the reason, `retry_after_s` comes from the measured drain rate."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"


class RateLimited(Overloaded):
    """A limit of the key, the tenant, or the tenant's use of the model; the message names it."""

    code = "rate_limit"


class InsufficientMemory(Overloaded):
    """The requested GPU memory or KV tokens are not free; the message has the figures."""

    code = "insufficient_memory"


class Unavailable(ServeAppError):
    """No replica can serve this now."""

    status = 503
    type = "service_unavailable"
    code = "no_replica"


class StoreAway(Unavailable):
    """The store of keys, use and batches cannot be reached or used now. The database's own words, which may have its
    address, are the `reason`."""

    code = "no_store"


class IssuerAway(Unavailable):
    """The keys of the identity provider are not all known, and the token may be signed by another one.

    Args:
        is_pending: they are read now, or may be: the key can be known within a moment.
    """

    code = "no_jwks"

    def __init__(self, message: str, *, is_pending: bool = False, **options: Any) -> None:
        super().__init__(message, **options)
        self.is_pending = is_pending


class StorageFull(ServeAppError):
    """The disk where files are kept is full, or its quota is used up; nothing of the file was kept."""

    status = 507
    type = "insufficient_storage"
    code = "storage_full"


class StorageAway(Unavailable):
    """The disk or the bucket where files are kept cannot be used now; the message has its own reason."""

    code = "no_storage"


class EngineFailed(Unavailable):
    """The engine replica died or failed while it held the request."""

    status = 502
    code = "engine_failed"


class EngineUnreachable(EngineFailed):
    """The engine never got the request: it may be retried on another replica without limit."""

    code = "engine_unreachable"


class OperationUnknown(EngineUnreachable):
    """The engine replica is of an earlier release, which cannot read a request of this operation."""

    status = 503
    code = "unknown_operation"
