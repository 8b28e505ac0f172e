"""Replicas follow the requests of all three routers: simulated engines, short delays.

What Serve's controller says is looked at ten times a second; nothing here sleeps for an effect.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import requests

from autoscaling.recorded_decisions import lines_of, replayed
from benchmarks.scaling.watch import PERIOD_S, Look, Watch, first
from serve_app.names import deployment_of
from tests.e2e.observe import samples_of
from tests.e2e.stack import Stack
from tests.e2e.three import (
    EMBED,
    INTERVAL_S,
    LOOK_BACK_S,
    MODEL,
    QUICK,
    ROUTER,
    SLOW,
    WIDE,
    WIDE_REPLICAS,
    processes,
)
from tests.waiting import slowness, wait_until

DRAIN_S = 3.0  # what is promised for a replica without requests, from Serve's decision to its end
DRAINS = 3  # that are looked at: what others do on the machine can only make one longer
ENOUGH = 1000  # tokens: 10 s, in which the replicas that seven requests need have started, even on a busy machine
SETTLE_S = 60.0  # for what takes a few seconds, beside others of the suite
SLOTS = 8  # of a replica


def seen(
    watch: Watch,
    model: str,
    condition: Callable[[Look], bool],
    goal: str,
    since: float | None = None,
    bound_s: float = SETTLE_S,
) -> Look:
    """The first look after `since` (default: now) for which the condition holds."""
    since = time.monotonic() if since is None else since

    def last() -> list[Look]:
        return watch.looks(model)[-1:]

    look = lambda: first(watch.looks(model), since, condition)  # noqa: E731
    found = wait_until(look, bound_s, f"{model}: {goal}", seen=last, poll_s=PERIOD_S).found
    assert found is not None
    return found


@pytest.fixture(scope="module")
def watch(three: Stack) -> Iterator[Watch]:
    assert three.cluster is not None
    with Watch(three.cluster.environment(), [QUICK, SLOW]) as opened:
        seen(opened, QUICK, lambda look: True, "a look")
        yield opened


def slow_start_s(three: Stack) -> float:
    """How long an engine of the slow model starts: longer on a machine that was slow when the stack began."""
    (settings,) = [one for one in three.config["models"] if one["name"] == SLOW]
    start_s: float = settings["simulated"]["start_s"]
    return start_s


@pytest.fixture(scope="module")
def slow_answers(three: Stack, watch: Watch) -> Iterator[Future[list[requests.Response]]]:
    """A request to the model that starts slowly, and another when its replica is there; in the background and before
    all else, so that the other tests run meanwhile."""

    def twice() -> list[requests.Response]:
        began = time.monotonic()
        refused = ask(three, SLOW, 5)
        seen(watch, SLOW, at(1), "its replica", began, SETTLE_S + slow_start_s(three))
        return [refused, ask(three, SLOW, 5)]

    with ThreadPoolExecutor(1) as alone:
        yield alone.submit(twice)


@pytest.fixture
def pool(slow_answers: Future[list[requests.Response]]) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(64) as opened:
        yield opened


def ask(stack: Stack, model: str, tokens: int) -> requests.Response:
    """An answer of `tokens` tokens, 10 ms each, over a connection of its own: HAProxy spreads them over the routers."""
    body = {"model": model, "prompt": "hi", "max_tokens": tokens}
    return stack.post("/v1/completions", body, headers={"Connection": "close"})


def burst(pool: ThreadPoolExecutor, stack: Stack, count: int, tokens: int) -> list[Future[requests.Response]]:
    return [pool.submit(ask, stack, QUICK, tokens) for _ in range(count)]


@contextmanager
def steady(pool: ThreadPoolExecutor, stack: Stack, count: int, tokens: int) -> Iterator[list[int]]:
    """So many requests at any moment of the block, however long it takes; the statuses of all are there after it."""
    over = threading.Event()
    statuses: list[int] = []

    def client() -> None:
        while not over.is_set():
            statuses.append(ask(stack, QUICK, tokens).status_code)

    clients = [pool.submit(client) for _ in range(count)]
    try:
        yield statuses
    finally:
        over.set()
        for ended in clients:
            ended.result()


def at(replicas: int) -> Any:
    """Whether a look shows so many replicas running, and no more wanted."""
    return lambda look: len(look.running) == replicas == look.target


def total(look: Look) -> int:
    return (look.ongoing or 0) + (look.waiting or 0)


def is_idle(look: Look) -> bool:
    return (look.ongoing, look.waiting) == (0, 0)


def advice(stack: Stack) -> tuple[int | None, bool]:
    """What the second policy wants for the quick model, and whether it knows the slots of its replicas."""
    (model,) = [one for one in stack.get("/admin/status").json()["models"] if one["name"] == QUICK]
    return model["advised"], f"at {SLOTS} slots a replica" in model["advice"]


def sees_the_class(stack: Stack) -> bool:
    """Whether the policy sees the requests by class, and the tokens that come and are served."""
    (model,) = [one for one in stack.get("/admin/status").json()["models"] if one["name"] == QUICK]
    return "normal: " in model["signals"] and "tokens/s arrive" in model["signals"]


def test_zero_to_three_to_zero_to_one_without_a_failed_request(
    three: Stack, watch: Watch, pool: ThreadPoolExecutor
) -> None:
    seen(watch, QUICK, at(0), "no replica")
    began = time.monotonic()
    with steady(pool, three, 12, tokens=200) as statuses:
        seen(watch, QUICK, at(3), "three replicas", began)
        # 12 requests and twice their root, by what routers and engines report
        wait_until(lambda: advice(three), SETTLE_S, "its advice", wanted=(3, True), poll_s=PERIOD_S)
        wait_until(lambda: sees_the_class(three), SETTLE_S, "the class of its requests", poll_s=PERIOD_S)
    assert set(statuses) == {200}
    seen(watch, QUICK, at(0), "no replica any more")
    assert ask(three, QUICK, 5).status_code == 200
    targets = [look.target for look in watch.looks(QUICK) if look.at >= began]
    changes = [target for index, target in enumerate(targets) if index == 0 or targets[index - 1] != target]
    assert max(changes) == 3
    assert changes[-1] == 1
    assert 0 in changes[1:-1]


@pytest.mark.long
def test_the_count_is_that_of_the_requests_there_are(three: Stack, watch: Watch, pool: ThreadPoolExecutor) -> None:
    """Three routers have a channel to each replica and ring for the first one: none of that is a request."""
    seen(watch, QUICK, is_idle, "no request")
    answers = burst(pool, three, 7, tokens=ENOUGH)
    all_there = seen(watch, QUICK, lambda look: total(look) == 7 == look.ongoing, "seven run")
    settled = all_there.at + 2 * INTERVAL_S
    seen(watch, QUICK, lambda look: look.at > settled, "a later look")
    assert not any(answer.done() for answer in answers)
    assert {total(look) for look in watch.looks(QUICK) if all_there.at <= look.at <= settled} == {7}
    assert max(total(look) for look in watch.looks(QUICK) if look.at > all_there.at - 2 * LOOK_BACK_S) == 7
    assert {answer.result().status_code for answer in answers} == {200}
    seen(watch, QUICK, is_idle, "no request")


@pytest.mark.long
def test_an_idle_replica_drains_within_three_seconds_with_three_routers(
    three: Stack, watch: Watch, pool: ThreadPoolExecutor
) -> None:
    """Each router has just had requests on each replica, so each had a channel to it."""
    drains: list[float] = []
    while len(drains) < DRAINS and not any(drain < DRAIN_S for drain in drains):
        began = time.monotonic()
        with steady(pool, three, 24, tokens=100) as statuses:
            full = seen(watch, QUICK, at(3), "three replicas", began)
            answers = burst(pool, three, 12, tokens=100)
            assert {answer.result().status_code for answer in answers} == {200}
        assert set(statuses) == {200}
        decided = seen(watch, QUICK, lambda look: look.target < 3, "fewer are wanted", full.at)
        ended = seen(watch, QUICK, lambda look: len(look.replicas) <= 1, "one is left", decided.at)
        drains.append((ended.at - decided.at) / slowness())
    assert min(drains) < DRAIN_S, drains


@pytest.mark.long
def test_a_start_that_outlasts_its_requests_goes_on_without_them(
    three: Stack, slow_answers: Future[list[requests.Response]]
) -> None:
    """The first request is told when to come back; nobody waits any more for longer than an idle replica is kept."""
    refused, answered = slow_answers.result()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_replica")
    assert 0 < float(refused.headers["retry-after"]) <= slow_start_s(three)
    assert answered.status_code == 200


@pytest.mark.long
def test_tokenizing_waits_for_the_first_replica_too(three: Stack, watch: Watch) -> None:
    seen(watch, QUICK, at(0), "no replica")
    answer = three.post("/tokenize", {"model": QUICK, "prompt": "two words"})
    assert (answer.status_code, answer.json()["count"]) == (200, 2)


@pytest.mark.long
def test_a_killed_routers_requests_stop_counting(three: Stack, watch: Watch, pool: ThreadPoolExecutor) -> None:
    """Streams that it had begun are cut off; whole answers come from another router. What it had in its line and on
    engines is nobody's any more, and the others' goes on."""
    streams = [pool.submit(stream, three, 700) for _ in range(24)]
    whole = burst(pool, three, 21, tokens=700)
    seen(watch, QUICK, lambda look: total(look) == 45 and (look.ongoing or 0) >= SLOTS, "all are in, and some run")
    victim = processes(three, ROUTER)[0]
    os.kill(victim, signal.SIGKILL)
    assert {answer.result().status_code for answer in whole} == {200}
    lost = sum(1 for one in streams if not one.result())
    assert 0 < lost < len(streams)
    seen(watch, QUICK, is_idle, "no request")


def stream(stack: Stack, tokens: int) -> bool:
    """Whether a stream came to its end."""
    body = {"model": QUICK, "prompt": "hi", "max_tokens": tokens, "stream": True}
    try:
        answer = stack.post("/v1/completions", body, headers={"Connection": "close"})
    except (requests.ConnectionError, requests.exceptions.ChunkedEncodingError):
        return False
    assert answer.status_code == 200, answer.text
    return answer.text.rstrip().endswith("data: [DONE]")


def explained(looks: list[Look]) -> set[str]:
    return {look.why for look in looks}


@pytest.mark.long
def test_status_says_why(watch: Watch) -> None:
    reasons = " | ".join(explained(watch.looks(QUICK)))
    for words in ("wanted; up after 0.5 s", "down after 1 s", "max_replicas is 3", "nothing waits"):
        assert words in reasons, words
    assert first(watch.looks(SLOW), 0.0, lambda look: "the first replica starts" in look.why) is not None


@pytest.mark.long
def test_a_scrape_has_how_many_replicas_each_model_is_to_have_and_why(three: Stack, watch: Watch) -> None:
    """tests/e2e/test_scrape.py looks at the same through a real Prometheus, without a model that scales."""
    for model in (QUICK, SLOW):
        seen(watch, model, at(0), "no replica")
    fixed = {MODEL: 1, WIDE: WIDE_REPLICAS, EMBED: 1}
    scrape = three.get("/metrics").text
    for name in ("serve_app_replicas_wanted", "serve_app_replicas_target"):
        found = {one.labels["model"]: one.value for one in samples_of(scrape, name, {})}
        assert found == fixed | {QUICK: 0, SLOW: 0}, name
    reasons = [one.labels for one in samples_of(scrape, "serve_app_replicas_wanted_reason", {})]
    assert {one["model"] for one in reasons if one["reason"] == "fixed"} == fixed.keys()
    scaled = {(one["model"], one["reason"]) for one in reasons if one["model"] in (QUICK, SLOW)}
    assert {model for model, _ in scaled} == {QUICK, SLOW}
    assert {reason for _, reason in scaled} <= {"idle", "load", "look_back", "min_replicas"}


def test_every_decision_of_this_stack_comes_out_of_a_new_policy_again(three: Stack, slow_answers: Any) -> None:
    assert three.cluster is not None
    replays = {one.deployment: one for one in replayed(lines_of(three.cluster.state.records))}
    assert {one.differing for one in replays.values()} == {0}, replays
    assert replays[deployment_of(QUICK)].decisions > 100
