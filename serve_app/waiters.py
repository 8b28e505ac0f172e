"""Who waits for a decision about a request: carries out what a line decides, however late that comes.

Invariant: whoever asks hears exactly once, by a grant or by an error; who leaves before has told the line so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from serve_app.core.admission import Action, Arrival, Grant, refusal_error
from serve_app.errors import ServeAppError
from serve_app.local_line import Decider


@dataclass(frozen=True, slots=True)
class Granted:
    """A place on a replica, and how long it took to get (seconds)."""

    replica_id: str
    waited_s: float


class Waiters:
    """The requests of one model in one router that wait for a decision."""

    def __init__(self) -> None:
        self._futures: dict[str, asyncio.Future[Granted]] = {}

    async def granted(self, decider: Decider, arrival: Arrival) -> Granted:
        """Ask for a place and wait for it.

        Raises:
            Overloaded, Unavailable: refused, with the reason and Retry-After.
            ValueError: a request of this id waits or runs already; nothing has changed then.
        """
        request_id = arrival.request_id
        if request_id in self._futures:
            raise ValueError(f"{request_id!r} waits already")
        future: asyncio.Future[Granted] = asyncio.get_running_loop().create_future()
        self._futures[request_id] = future
        try:
            decider.arrive(arrival)
            return await future  # decided at once, it is over without a turn of the event loop
        except asyncio.CancelledError:
            # The client went away; a grant that came in the same turn is given back by the same call.
            decider.cancel(request_id)
            raise
        finally:
            del self._futures[request_id]

    def perform(self, actions: list[Action]) -> None:
        """Tell the requests what was decided; one that has left has seen to that itself."""
        for action in actions:
            future = self._futures.get(action.request_id)
            if future is None or future.done():
                continue
            if isinstance(action, Grant):
                future.set_result(Granted(action.replica_id, action.waited_s))
            else:
                future.set_exception(refusal_error(action))

    def dismiss(self, decider: Decider, why: Callable[[], ServeAppError]) -> None:
        """Whoever waits now is told no."""
        for request_id, future in list(self._futures.items()):
            if not future.done():
                future.set_exception(why())
                decider.cancel(request_id)
