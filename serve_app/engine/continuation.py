"""An answer that is continued here after another engine made its beginning (`Submit.groups`, `Submit.events`).

Its serving object gets the outputs of the continued runs again, group by group, and then the new ones; events of the
continued runs are dropped.

Invariant: it continues exactly, or it ends with a failure of code `NOT_CONTINUABLE`; never with other bytes. After each
message of a channel, the groups sent so far make exactly the events sent so far (`FrameBatcher`), so the last event of
the client comes before the first new output.
"""

from __future__ import annotations

from collections import defaultdict, deque

from serve_app.core.continuation import NotContinued, why_not_continued
from serve_app.errors import EngineFailed
from serve_app.transport import NOT_CONTINUABLE, Frame, Submit

_WHY = {
    NotContinued.ENGINE: "this engine cannot, or has another model or other settings than the one that began it",
    NotContinued.REQUEST: "only the engine that began it can finish what it asks for",
}


def is_continued(submit: Submit) -> bool:
    """Whether this run continues a request: continued runs have made a part of its answer."""
    return bool(submit.groups or submit.events)


def not_continuable(why: str) -> EngineFailed:
    """The failure of a stream that cannot be continued exactly."""
    return EngineFailed(f"the stream cannot be continued: {why}", code=NOT_CONTINUABLE)


def require_continuable(submit: Submit, *, engine_continues: bool, is_same_model: bool = True) -> None:
    """Raise `not_continuable` for a continued request if this engine cannot continue it (`core.continuation`)."""
    why = why_not_continued(
        submit.operation, submit.body, engine_continues=engine_continues, is_same_model=is_same_model
    )
    if why is not None:
        raise not_continuable(_WHY[why])


def require_stream(frame: Frame) -> None:
    """Raise `not_continuable` for a frame that begins something else than a stream: a refusal, or a whole answer."""
    if frame.status and frame.media != "sse":
        raise not_continuable(f"the engine answers with status {frame.status} where its stream would continue")


class ContinuedRuns:
    """What continued runs made of a stream, while it is made again here. Methods raise `not_continuable`, and `failure`
    keeps it: vLLM's serving objects turn errors into events.

    Args:
        submit: a continued request.
        choices: answers per prompt (`n`).
    """

    def __init__(self, submit: Submit, choices: int) -> None:
        self.is_over = False  # all of it was made again
        self.is_stream = bool(submit.events)  # else it has one output, its last one, with the tokens of all runs
        self.failure: EngineFailed | None = None
        self._groups: dict[int, list[list[int]]] = defaultdict(list)  # by prompt, with choices from 0
        self._order: deque[int] = deque()  # the prompts of the outputs that are not made again yet
        self._events = submit.events  # still to be dropped
        for group in submit.groups:
            if len(group) < 2 or group[0] < 0:
                raise self.fail("a group of its tokens names no choice or has no token")
            prompt, choice = divmod(group[0], choices)
            self._groups[prompt].append([choice, *group[1:]])
            self._order.append(prompt)
        self._cached = (self._order[0], submit.cached_tokens) if self._order else (0, 0)  # by then one prompt had run

    def groups_of(self, prompt: int) -> list[list[int]]:
        """The token groups of this prompt, with choices from 0."""
        return self._groups.get(prompt, [])

    def cached_tokens_of(self, prompt: int) -> int:
        """The tokens of this prompt that the first engine had cached."""
        return self._cached[1] if prompt == self._cached[0] else 0

    def is_next(self, prompt: int) -> bool:
        """Whether the next output may be one of this prompt: new ones come after all continued ones."""
        return not self._order or self._order[0] == prompt

    def tokens_in_last(self, prompt: int, choice: int) -> int:
        """The tokens of continued runs that an output of a choice begins with: those of an answer that is no stream."""
        if self.is_stream:
            return 0
        return sum(len(group) - 1 for group in self.groups_of(prompt) if group[0] == choice)

    def take_output(self, prompt: int) -> bool:
        """The serving object gets the next output of this prompt; returns whether it is one of the continued runs'."""
        if not self.is_stream:
            self._order.clear()
        if not self._order:
            self.end()
            return False
        if self._order.popleft() != prompt:
            raise self.fail("its tokens are those of other prompts")
        return True

    def drop_event(self) -> None:
        """An event comes before the first new output: the client has it."""
        if not self._events:
            raise self.fail("its tokens make more events than the client has")
        self._events -= 1

    def end(self) -> None:
        """The first new output comes, or the last one of all has come."""
        if not self.is_over and (self._events or self._order):
            raise self.fail("its tokens make fewer events than the client has")
        self.is_over = True

    def fail(self, why: str) -> EngineFailed:
        self.failure = not_continuable(why)
        return self.failure
