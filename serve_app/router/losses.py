"""What becomes of a request whose run has failed: it starts again, goes on where it was, or ends. Pure.

A request whose client has received nothing starts again. A stream goes on, if the engines can do that with what it
asks for. A bound of the loss counts from the loss, however old the request is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from serve_app.core.continuation import NotContinued, is_continuable
from serve_app.errors import EngineFailed, EngineUnreachable, ServeAppError
from serve_app.transport import NOT_CONTINUABLE, STOPPED, ResponseStream, Submit, TokenUsage

MAX_LOSSES = 3  # engines that may die under one request before the request counts as the cause
# Other codes of an `EngineFailed` name a fault of the client or of this router: another engine would not help.
_LOSSES = (EngineFailed.code, EngineUnreachable.code)


@dataclass(slots=True)
class LossLimit:
    """Counts the engines that one request has lost.

    Args:
        max_wait_s: the longest permitted wait. started: when the request was granted a replica.
    """

    max_wait_s: float
    started: float
    engines_lost: int = 0
    give_up_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.begin(self.started)

    def begin(self, now: float) -> None:
        """The longest wait for an engine that can be reached counts from now."""
        self.give_up_at = now + self.max_wait_s

    def count_loss(self, error: EngineFailed, now: float) -> bool:
        """Count a loss; returns whether it is the last one. An engine that never received the request is not counted,
        but ends it when it has reached none for `max_wait_s` since its first grant, or its first one after a loss."""
        if isinstance(error, EngineUnreachable):
            return now >= self.give_up_at
        self.engines_lost += 1
        self.begin(now)
        return self.engines_lost >= MAX_LOSSES


def why_not_continued(
    error: EngineFailed, lost: ResponseStream, submit: Submit | None, limit: LossLimit, now: float, *, continues: bool
) -> NotContinued | None:
    """Why a stream of which the client has received a part cannot go on after the loss of its engine, which is counted;
    None: it goes on.

    Args:
        lost: its latest run that had frames.
        submit: of the failed run; None: it reached no engine.
        continues: whether the model's engines can go on with another's stream.
    """
    if error.code == NOT_CONTINUABLE:
        return NotContinued.REFUSED
    if not continues:
        return NotContinued.ENGINE
    if submit is not None and not is_continuable(submit.operation, submit.body):
        return NotContinued.REQUEST
    if not lost.produced.is_whole:
        return NotContinued.TOO_LONG
    return NotContinued.LOSSES if limit.count_loss(error, now) else None


def going_on(submit: Submit, lost: ResponseStream | None) -> Submit:
    """The request of a run that goes on with what the runs before it have produced; `lost` None: with nothing."""
    submit = msgspec.structs.replace(submit, accepted=True)
    if lost is None:
        return submit
    produced = lost.produced
    prompt = lost.prompt or TokenUsage()
    return msgspec.structs.replace(
        submit,
        groups=produced.groups,
        events=produced.events,
        cached_tokens=prompt.cached_tokens,
        fingerprint=lost.fingerprint,
    )


def is_stop(error: ServeAppError) -> bool:
    """Whether the request was stopped by its router, and goes on."""
    return error.code == STOPPED


def is_loss(error: EngineFailed, stream: ResponseStream | None) -> bool:
    """Whether a run failed with its engine, and not in what was done with its answer here."""
    has_failed = stream is None or stream.error is error or error.code == NOT_CONTINUABLE
    return has_failed and error.code in (*_LOSSES, NOT_CONTINUABLE)
