"""What routers send each other of the answers to requests with an `Idempotency-Key` (`keyed`).

A router of another release reads them, and finds their classes by the name of this module: it stays where it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.core.claims import Claim
from serve_app.core.messages import message
from serve_app.http.error_responses import Headers

Head = tuple[int, Headers]  # status and headers, without those that only the first client gets


@message
@dataclass(frozen=True, slots=True)
class AnswerPart:
    """A piece of an answer; `head` is None until the answer has begun. `error`: there is nothing more to come."""

    head: Head | None
    body: bytes = b""
    is_last: bool = False
    error: BaseException | None = None


@message
@dataclass(frozen=True, slots=True)
class AnswerCopy:
    """A whole answer, for a second router."""

    claim: Claim
    head: Head
    body: bytes
