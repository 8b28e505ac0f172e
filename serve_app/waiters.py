"""Who waits for a decision about a request: carries out what a line decides, however late that comes.

Invariant: whoever asks hears exactly once, by a grant or by an error; who leaves before has told the line so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from serve_app.aim import Why
from serve_app.core.admission import Action, Arrival, Grant, refusal_error
from serve_app.core.routing import Route
from serve_app.errors import ServeAppError, Unavailable
from serve_app.local_line import Decider


@dataclass(frozen=True, slots=True)
class Granted:
    """A place on a replica, how long it took to get (seconds), and why there."""

    replica_id: str
    waited_s: float
    why: Why = Why.MOST_FREE
    route: Route | None = None


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
        except (ServeAppError, ValueError):  # it was refused, or nothing has changed
            raise
        except BaseException:
            # The client went away, or something failed; a grant that came meanwhile is given back by the same call.
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
            try:
                if isinstance(action, Grant):
                    future.set_result(Granted(action.replica_id, action.waited_s))
                else:
                    future.set_exception(refusal_error(action))
            except Exception as error:  # noqa: BLE001 - the others hear of theirs all the same
                future.set_exception(error)

    def alive(self) -> dict[str, bool]:
        """Who waits for a decision, none of whom holds a place."""
        return {request_id: False for request_id, future in self._futures.items() if not future.done()}

    def lost(self, request_id: str) -> None:
        """No decision about this request comes any more; one that does not wait changes nothing."""
        future = self._futures.get(request_id)
        if future is not None and not future.done():
            future.set_exception(Unavailable("the request was lost; try again", code="request_lost", retry_after_s=1.0))

    def dismiss(self, decider: Decider, why: Callable[[], ServeAppError]) -> None:
        """Whoever waits now is told no."""
        for request_id, future in list(self._futures.items()):
            if not future.done():
                future.set_exception(why())
                decider.cancel(request_id)
