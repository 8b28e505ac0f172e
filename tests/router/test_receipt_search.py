"""A receipt is found whichever router has it, in bounded time, whatever the others do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any

import pytest

from serve_app.core.receipts import Receipt, Receipts
from serve_app.router import receipt_search
from serve_app.router.receipt_search import ReceiptSearch
from serve_app.types import Outcome, RequestClass

Plain = dict[str, Any]


def kept(*names: str) -> Receipts:
    found = Receipts()
    for name in names:
        found.add(Receipt(name, RequestClass.NORMAL, "t", "m", Outcome.OK, 0.0, 0.0, 1.0))
    return found


async def replied(answer: Plain | None) -> Plain | None:
    return answer


async def broken() -> Plain | None:
    raise ConnectionError("gone")


async def silent() -> Plain | None:
    await asyncio.Event().wait()
    return None


class Routers:
    """Answers in the routers' place."""

    def __init__(self, *answers: Awaitable[Plain | None]) -> None:
        self.answers = answers
        self.asked: list[tuple[str, str | None]] = []

    async def __call__(self, request_id: str, tenant: str | None) -> Iterable[Awaitable[Plain | None]]:
        self.asked.append((request_id, tenant))
        return self.answers


def find(name: str, routers: Routers, here: Receipts | None = None) -> Plain | None:
    async def search() -> Plain | None:
        return await ReceiptSearch(here or kept(), routers).find_anywhere(name, "t")

    return asyncio.run(search())


def test_one_that_is_here_is_reported_with_its_story_and_nobody_is_asked() -> None:
    routers = Routers()
    found = find("chatcmpl-a1", routers, kept("a1"))
    assert found is not None
    assert (found["request_id"], found["outcome"], routers.asked) == ("a1", "ok", [])
    assert found["story"][0].startswith("a1: normal request of t to m")


def test_another_router_s_is_reported_at_once_though_others_fail_or_say_nothing() -> None:
    routers = Routers(replied(None), silent(), broken(), replied({"request_id": "a2"}))
    assert find("a2", routers) == {"request_id": "a2"}
    assert routers.asked == [("a2", "t")]


def test_one_that_nobody_has_is_none() -> None:
    assert find("a3", Routers(replied(None), replied(None))) is None
    assert find("a3", Routers(replied(None), broken())) is None


def test_silence_is_waited_for_no_longer_than_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receipt_search, "ANSWER_TIMEOUT_S", 0.05)
    assert find("a4", Routers(silent())) is None


def test_without_any_router_to_ask_there_is_none() -> None:
    class Gone(Routers):
        async def __call__(self, request_id: str, tenant: str | None) -> Iterable[Awaitable[Plain | None]]:
            raise ConnectionError("no deployment")

    assert find("a5", Gone()) is None
