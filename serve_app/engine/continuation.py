"""A stream that goes on here after another engine made its beginning (`Submit.groups`, `Submit.events`).

Invariant: it continues exactly, or it ends with a failure of code `NOT_CONTINUABLE`; never with other bytes.
"""

from __future__ import annotations

from serve_app.errors import EngineFailed
from serve_app.transport import NOT_CONTINUABLE, Frame, Submit


def is_continued(submit: Submit) -> bool:
    """Whether earlier runs of this request have sent a part of its answer."""
    return bool(submit.groups or submit.events)


def not_continuable(why: str) -> EngineFailed:
    """The failure of a stream that cannot be continued exactly."""
    return EngineFailed(f"the stream cannot be continued: {why}", code=NOT_CONTINUABLE)


def require_stream(frame: Frame) -> None:
    """Raise `not_continuable` for a frame that begins something else than a stream: a refusal, or a whole answer."""
    if frame.status and frame.media != "sse":
        raise not_continuable(f"the engine answers with status {frame.status} where its stream would go on")
