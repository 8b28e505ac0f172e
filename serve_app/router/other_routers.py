"""What the other router replicas answer.

Invariant: a router has answered within `ANSWER_TIMEOUT_S`, or it is left out and logged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterable
from typing import Any, NamedTuple, TypeVar

from serve_app.ray_adapter import NO_ANSWER, NamedReplicas, in_fresh_context

logger = logging.getLogger("ray.serve")

ANSWER_TIMEOUT_S = 2.0  # a router answers within milliseconds; one that is shutting down, never

# One of the release before takes other arguments, or has no such method.
FAILURES: tuple[type[BaseException], ...] = (TypeError, AttributeError, *NO_ANSWER)

T = TypeVar("T")


class RouterAnswers(NamedTuple):
    """What routers have answered. `missing`: the ids of those that have not."""

    found: list[Any]
    missing: list[str]


async def answer_or_none(answer: Awaitable[T], asked: str) -> T | None:
    """The answer of one router; None: there is none. `asked`: for the log."""
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            return await answer
    except FAILURES as error:
        logger.warning("Routers did not all answer %s, which lacks one part: %s", asked, error)
        return None


async def answers_in_time(answers: Iterable[Awaitable[T]], asked: str) -> list[T]:
    """The answers of those routers that give one. `asked`: for the log."""
    found = await asyncio.gather(*(answer_or_none(answer, asked) for answer in answers))
    return [answer for answer in found if answer is not None]


class AllRouters:
    """Asks all routers, this one among them, for what each answers with its id."""

    def __init__(self, routers: NamedReplicas) -> None:
        self._routers = routers

    async def ask(self, method: str, *arguments: Any) -> RouterAnswers:
        """The answers of a method that returns the router's id and its answer; these pairs are `found`."""
        # in a context of its own: the calling HTTP request must not decide how replies are read
        return await in_fresh_context(self._ask(method, arguments), method)

    async def _ask(self, method: str, arguments: tuple[Any, ...]) -> RouterAnswers:
        names = self._routers.names()
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                answers = await self._routers.call_all(method, *arguments)
        except NO_ANSWER as error:
            logger.warning("Routers did not all answer %s, which lacks their parts: %s", method, error)
            return RouterAnswers([], sorted(names))
        pairs = await answers_in_time(answers, method)
        return RouterAnswers(pairs, sorted(names - {name for name, _ in pairs}))
