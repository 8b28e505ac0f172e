"""Router replicas' claims and calls of each other without Ray: the actor's real book, and messages that travel pickled.

The actor can be away, stand still or start anew; a router can die, be out of reach, and lose what is sent to it.
"""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Callable
from typing import Any

from ray.exceptions import ActorUnavailableError

from serve_app.core.claims import ClaimBook, ClaimReport, ClaimRequest
from serve_app.http.keyed.runs import KeyedRuns
from tests.fakes.bad_network import Away
from tests.fakes.until import turns

NO_ACTOR = bytes(16)  # the actor id in Ray's errors


class FakeClaims:
    """The quota actor, as far as claims go, and the routers.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.epoch = 1
        self.book = ClaimBook(1, (), clock())
        self.routers: dict[str, KeyedRuns] = {}
        self.unknown: set[str] = set()  # routers that the actor takes for dead
        self.dead: set[str] = set()  # routers that answer nothing any more
        self.up = True
        self.calls: list[str] = []
        self.losing: Callable[[str], bool] = lambda method: False  # whether the reply to a call gets lost
        self.delay: Callable[[str], int] = lambda method: 1  # turns of the event loop that the actor's reply takes

    def join(self, name: str) -> KeyedRuns:
        """Another router."""
        self.routers[name] = KeyedRuns(name, self.caller(name), self, lambda: (self.epoch, name in self.unknown))
        return self.routers[name]

    def caller(self, name: str) -> Any:
        """How this router calls the actor."""

        async def call(method: str, *arguments: Any) -> Any:
            await asyncio.sleep(0)
            if not self.up or name in self.dead:
                raise Away("the actor is away")
            assert method == "exchange"
            document = pickle.loads(pickle.dumps(arguments[0]))
            reply: Any
            if isinstance(document, ClaimRequest):
                method = "claim"
                reply = self.book.on_claim(document, self._clock(), self.knows)
            else:
                assert isinstance(document, ClaimReport)
                method = "report"
                reply = self.book.on_report(document, self._clock(), self.knows)
            self.calls.append(method)
            await turns(self.delay(method))
            if self.losing(method) or not self.up:
                raise Away("the reply is lost")
            return pickle.loads(pickle.dumps(reply))

        return call

    def knows(self, router: str) -> bool:
        return router in self.routers and router not in self.unknown

    def restart(self) -> None:
        """A new actor, which knows the routers and nothing of their claims."""
        self.epoch += 1
        self.book = ClaimBook(self.epoch, [name for name in self.routers if self.knows(name)], self._clock())

    def kill(self, router: str) -> None:
        """SIGKILL: nothing of it goes on, and the actor does not know yet."""
        self.dead.add(router)
        runs = self.routers[router]
        for run in list(runs.runs.values()):
            if run.task is not None:
                run.task.cancel()

    def bury(self, router: str) -> None:
        """The actor has noticed."""
        self.unknown.add(router)
        self.book.on_router_gone(router, self._clock())

    # As `NamedReplicas`

    def names(self) -> frozenset[str]:
        return frozenset(self.routers) - self.unknown

    async def call(self, replica_id: str, method: str, *arguments: Any) -> Any:
        await asyncio.sleep(0)
        if replica_id in self.dead:
            raise ActorUnavailableError("dead", NO_ACTOR)
        router = self.routers[replica_id]
        given = pickle.loads(pickle.dumps(arguments))
        self.calls.append(method)
        if method == "answer_part":
            result: Any = await router.part(*given)
        else:
            assert method == "keep_answer"
            result = router.keep(*given)
        await asyncio.sleep(0)
        if replica_id in self.dead or self.losing(method):
            raise ActorUnavailableError("died meanwhile", NO_ACTOR)
        return pickle.loads(pickle.dumps(result))
