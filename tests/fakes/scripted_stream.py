"""Engines that answer every stream by one script, and go on with it exactly where another engine was lost.

What a client must get is known to the byte; an engine that is handed anything but a beginning of the script refuses it.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from serve_app.errors import EngineFailed
from serve_app.transport import FINISH_STOP, NOT_CONTINUABLE, Frame, Submit, TokenUsage
from tests.fakes.engines import FakeCluster, turns

TRAVEL_TURNS = 6  # of the event loop, in which a frame that was put has left in a message of its own


@dataclass(frozen=True)
class Pull:
    """What one pull of the serving object brings: the bytes of its events, and its token groups."""

    events: tuple[bytes, ...]
    groups: tuple[tuple[int, ...], ...] = ()


def _event(text: str) -> bytes:
    return f'data: {{"id":"x","choices":[{{"index":0,"text":"{text}"}}]}}\n\n'.encode()


SCRIPT = (
    Pull((_event(""),)),  # the role: an event without a token
    Pull((_event("one"),), ((0, 11),)),
    Pull((), ((0, 12),)),  # held back: a token without an event
    Pull((_event("two"), _event("three")), ((0, 13), (1, 21))),  # two choices
    Pull((_event("lump"),), ((0, 14, 15, 16),)),
    Pull((_event("four"),), ((0, 17), (1, 22))),
    Pull((_event("end"), b"data: [DONE]\n\n"), ((0, 18),)),
)
WHOLE = b"".join(event for pull in SCRIPT for event in pull.events)
TOKENS = sum(len(group) - 1 for pull in SCRIPT for group in pull.groups)
PROMPT = TokenUsage(7, 0, 3)
USAGE = TokenUsage(7, TOKENS, 3, FINISH_STOP)


@dataclass
class ScriptedEngines:
    """The replicas of a cluster, with `SCRIPT` in place of their engines.

    Args:
        cuts: how many pulls have been sent when the engine is lost, for each run that is; one after the other.
        lose: loses the replica of that name; returns before or after the loss, or raises.
    """

    cluster: FakeCluster
    lose: Callable[[str], None]
    cuts: list[int] = field(default_factory=list)
    submits: list[Submit] = field(default_factory=list)
    places: list[str] = field(default_factory=list)

    def install(self, names: Iterable[str]) -> None:
        for name in names:
            self.cluster[name].engine.server.run = functools.partial(self._run, name)  # type: ignore[method-assign]

    async def _run(self, name: str, submit: Submit, put: Callable[[Frame], None]) -> None:
        self.submits.append(submit)
        self.places.append(name)
        start = _position(submit)
        first = True
        for number in range(start, len(SCRIPT)):
            if self.cuts and self.cuts[0] == number:
                del self.cuts[0]
                self.lose(name)
                await asyncio.Event().wait()  # bound: the end of the connection
            pull = SCRIPT[number]
            usage = USAGE if number == len(SCRIPT) - 1 else None
            frame = Frame(submit.number, b"".join(pull.events), groups=[list(one) for one in pull.groups])
            frame = msgspec.structs.replace(frame, events=len(pull.events), usage=usage)
            if first:
                frame = msgspec.structs.replace(frame, status=200, media="sse", prompt=PROMPT)
            put(frame)
            first = False
            await turns(TRAVEL_TURNS)


def _position(submit: Submit) -> int:
    """The pull with which a run begins."""
    groups = list[list[int]]()
    events = 0
    for number, pull in enumerate(SCRIPT):
        if (groups, events) == (submit.groups, submit.events):
            return number
        groups += [list(one) for one in pull.groups]
        events += len(pull.events)
    raise EngineFailed("no beginning of the script", code=NOT_CONTINUABLE)


def dies(name: str) -> None:
    """The engine dies, its replica tells."""
    raise EngineFailed(f"{name} died")
