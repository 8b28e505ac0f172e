"""A request's grant is given back once, with what the request has used, and its KV tokens count until then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from serve_app.core.kv_budget import KV_REQUEST_BLOCKS, KvBudget
from serve_app.core.queue.admission import Arrival
from serve_app.router import request_grant
from serve_app.router.request_grant import RequestGrant
from serve_app.transport import TokenUsage
from serve_app.types import RequestClass


class Recorder:
    """The queue and the replicas: what they are told, in order."""

    def __init__(self) -> None:
        self.reported: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.reported.append((name, *given))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [10.0]
    monkeypatch.setattr(request_grant.time, "monotonic", lambda: now[0])
    return now


def granted(recorder: Recorder, tokens: int = 100) -> RequestGrant:
    arrival = Arrival("a", RequestClass.NORMAL, "t", 2, cost_tokens=tokens)
    budget = KvBudget(arrival, None, sequences=1)
    return RequestGrant(recorder, recorder, arrival, "r1", budget)  # type: ignore[arg-type]


def test_kv_tokens_count_from_the_grant_until_it_is_given_back_and_no_longer(clock: list[float]) -> None:
    grant = granted(Recorder())
    clock[0] = 12.5
    grant.release()
    clock[0] = 99.0
    grant.release()
    assert grant.kv_token_s == 250.0


def test_it_is_given_back_once_to_the_replicas_before_the_queue(clock: list[float]) -> None:
    recorder = Recorder()
    grant = granted(recorder)
    grant.release(TokenUsage(7, 5))
    grant.release()
    assert recorder.reported == [
        ("on_granted", "a", "r1", 2),
        ("on_released", "a", "r1", 2),
        ("release", "a", 5, 7),
        ("drop_gone",),
    ]


def test_without_the_engines_usage_what_was_counted_here_is_given(clock: list[float]) -> None:
    recorder = Recorder()
    grant = granted(recorder)
    grant.on_output(3)
    grant.on_output(4)
    grant.release()
    assert ("release", "a", 7) in recorder.reported


def test_a_request_that_outgrows_its_estimate_asks_for_more_and_reports_what_it_made(clock: list[float]) -> None:
    recorder = Recorder()
    grant = granted(recorder, tokens=10)
    grant.on_output(9)
    assert recorder.reported[1:] == [("request_kv_tokens", "a", KV_REQUEST_BLOCKS), ("progress", "a", 9, 0)]


def test_the_prompt_as_its_engine_has_counted_it_corrects_budget_and_counters_once(clock: list[float]) -> None:
    recorder = Recorder()
    grant = granted(recorder, tokens=10)
    grant.on_submitted(SimpleNamespace(prompt=None))  # type: ignore[arg-type]
    grant.on_output(0)
    assert grant.stream is not None
    grant.stream.prompt = TokenUsage(100_000)
    grant.on_output(0)
    grant.on_output(1)
    assert [one for one in recorder.reported if one[0] == "progress"] == [
        ("progress", "a", 0, 0),
        ("progress", "a", 0, 100_000),
        ("progress", "a", 1, 0),
    ]
    asked = [tokens for name, *_, tokens in recorder.reported if name == "request_kv_tokens"]
    assert grant.budget.tokens == 10 + sum(asked) >= 100_000


def test_the_queue_is_reported_though_the_replicas_fail(clock: list[float]) -> None:
    recorder = Recorder()
    grant = granted(recorder)

    def fails(*given: object) -> None:
        raise RuntimeError("no luck")

    recorder.on_released = fails  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="no luck"):
        grant.release()
    assert ("release", "a", 0) in recorder.reported
