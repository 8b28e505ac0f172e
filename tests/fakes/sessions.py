"""The quota actor's calls for agent sessions, on the real core of `FakeQuota`: what `GpuMemoryQuota` does with them."""

from __future__ import annotations

import pickle
import time
from dataclasses import replace
from typing import Any

from serve_app.core.memory import Session
from serve_app.errors import ServeAppError
from tests.fakes.quota import FakeQuota
from tests.fakes.until import SOON_S, until


class ActorSessions:
    """`call` is what a `SessionClient` calls the actor with."""

    def __init__(self, quota: FakeQuota) -> None:
        self._quota = quota

    async def call(self, method: str, argument: Any) -> Session | None:
        now = time.monotonic()
        core = self._quota.core
        match method:
            case "open_session":
                wait_s = argument.wait_until
                ask = replace(argument, wait_until=None if wait_s is None else now + wait_s)
                session = core.on_open_session(ask, now) or await self._outcome(ask.session_id)
            case "renew_session":
                session = core.sessions.renew(argument, now)
            case "look_session":
                session = core.sessions.view(argument)
            case _:
                return core.queue.close_session(argument, now)
        return pickle.loads(pickle.dumps(session.relative_to(now)))  # type: ignore[no-any-return]

    async def _outcome(self, name: str) -> Session:
        """Of an opening that waits."""
        outcomes: dict[str, Session | ServeAppError] = {}

        def known() -> bool:
            outcomes.update(self._quota.core.queue.session_admission.take_outcomes())
            return name in outcomes

        await until(known, SOON_S, f"{name} is opened or refused")
        found = outcomes[name]
        if isinstance(found, ServeAppError):
            raise found
        return found
