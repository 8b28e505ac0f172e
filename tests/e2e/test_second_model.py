"""A second real model beside the first: added to the running stack, answering by its own weights, and taken out again.

Its KV pool is far smaller than what is asked of it: nothing is refused, and vLLM never has to take a running request's
blocks away.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import requests

from serve_app.cluster.local import RemoteDriver
from serve_app.engine import ensure_tiny_model
from serve_app.settings import application, parse
from tests.e2e import prompts
from tests.e2e.observe import Observer
from tests.e2e.reference import Reference
from tests.e2e.stack import CONFIG, PEOPLE_KEY, START_S, TINY, Stack
from tests.requires import missing

pytestmark = pytest.mark.long  # an engine more is started; test_model_changes does so with simulated ones

SECOND = "tiny-second"
SEED = 1  # other weights under the same tokenizer: the same prompt has another answer
PROMPTS = 6
ANSWER_TOKENS = 32
SECOND_MODEL = {
    "name": SECOND,
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 32,
    "enforce_eager": True,  # compiled is the first one; it takes 40 s
    "kv_cache_gb": 0.0215,  # 5,200 tokens: a quarter of what the batch's slots would fill
}
CLIENTS = 32  # of which a pool holds a third
REQUESTS = 32
LEARN_REQUESTS = 160
WIDE_BOUND = 900  # tokens: five such fill the pool
LOOK_S = 0.2
PAUSE_S = 0.1  # a change takes seconds


@dataclass
class Both:
    """The stack with both models, since a client began to ask the first one again and again."""

    stack: Stack
    beside: Steady
    before: dict[str, list[str]]
    during: dict[str, list[str]]
    taken_out: bool = False

    def take_out(self) -> dict[str, list[str]]:
        """The stack with the first model alone: its replicas."""
        self.taken_out = True
        return become(self.stack, CONFIG["models"])


class Steady:
    """A client that asks the first model, again and again: without a pause it would keep a core busy, on which the
    second engine starts."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._over = threading.Event()
        self.answered = 0
        self.failed: list[str] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        body = {"model": TINY, "prompt": "The river", "max_tokens": 4}
        while not self._over.wait(PAUSE_S):  # bound: the tests'
            try:
                response = self._stack.post("/v1/completions", body)
            except requests.RequestException as error:
                self.failed.append(repr(error))
                continue
            if response.status_code == 200:
                self.answered += 1
            else:
                self.failed.append(response.text)

    def stop(self) -> None:
        self._over.set()
        self._thread.join()


def replicas(reported: dict[str, Any]) -> dict[str, list[str]]:
    return {one["name"]: [replica["id"] for replica in one["replicas"]] for one in reported["models"]}


def become(stack: Stack, models: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Change the running stack to these models, as `serve-app deploy` does; their replicas once it runs."""
    assert stack.cluster is not None
    instance = stack.cluster.instance
    remote = RemoteDriver(
        {
            "do": "declare",
            "roll_back": False,
            "environment": stack.cluster.environment(),
            "application": application(parse({**CONFIG, "models": models}).without_secrets()),
            "serve": {
                "http_options": {"host": instance.host, "port": instance.http_port},
                "proxy_location": "HeadOnly",
            },
            "wait": True,
            "models": [],
        }
    )
    reported: dict[str, Any] = {}
    try:
        while (event := remote.event(START_S)) is not None and event["event"] != "end":
            reported = event
    finally:
        remote.close()
    assert reported.get("state") == "running", reported
    return replicas(reported)


@pytest.fixture(scope="module")
def both(stack: Stack) -> Iterator[Both]:
    """With the second model until the last test of this module takes it out."""
    if stack.cluster is None or stack.api_key != PEOPLE_KEY:
        missing("the external stack is left as it is")
    second = {**SECOND_MODEL, "path": str(ensure_tiny_model(seed=SEED))}
    beside = Steady(stack)
    both = Both(stack, beside, become(stack, CONFIG["models"]), {})
    try:
        both.during = become(stack, [*CONFIG["models"], second])
        yield both
    finally:
        if not both.taken_out:
            both.take_out()
        beside.stop()


def test_each_of_two_real_models_is_answered_by_its_own(both: Both, reference: Reference) -> None:
    stack = both.stack
    second = Reference(ensure_tiny_model(seed=SEED))
    assert {name: ids for name, ids in both.during.items() if name != SECOND} == both.before
    assert len(both.during[SECOND]) == 1

    def ask(order: tuple[str, int]) -> list[int]:
        name, number = order
        body = {"model": name, "prompt": prompts.text(number), "max_tokens": ANSWER_TOKENS, "temperature": 0}
        answer = stack.post("/v1/completions", body | {"return_token_ids": True, "ignore_eos": True})
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == name
        return list(answer.json()["choices"][0]["token_ids"])

    orders = [(name, number) for number in range(PROMPTS) for name in (TINY, SECOND)]
    with ThreadPoolExecutor(len(orders)) as callers:  # all at once
        produced = dict(zip(orders, callers.map(ask, orders), strict=True))
    for (name, number), tokens in produced.items():
        own, others = (reference, second) if name == TINY else (second, reference)
        prompt = own.encode(prompts.text(number))
        assert len(tokens) == ANSWER_TOKENS
        assert own.compare(prompt, tokens).mismatch is None
        assert others.compare(prompt, tokens).mismatch is not None


class Look:
    """The most of some figures that was seen."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self.fullest = self.most_running = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        over = threading.Event()

        def look() -> None:
            while not over.wait(LOOK_S):  # bound: the requests' own
                full, running = (
                    self._observer.value(f"serve_app_engine_{name}", model=SECOND)
                    for name in ("kv_cache_usage_ratio", "running_sequences")
                )
                self.fullest = max(self.fullest, full)
                self.most_running = max(self.most_running, running)

        looking = threading.Thread(target=look, daemon=True)
        looking.start()
        yield
        over.set()
        looking.join()


def asked(stack: Stack, count: int, key: str | None = None, **more: Any) -> tuple[set[str], Look]:
    """What so many requests were answered with, and what was seen meanwhile."""

    def ask(number: int) -> str:
        draw = random.Random(number)
        prompt = " ".join(prompts.text(draw.randrange(16)) for _ in range(draw.randint(1, 8)))
        body = {"model": SECOND, "prompt": prompt, "max_tokens": draw.randint(100, 500), "seed": number} | more
        answer = stack.post("/v1/completions", body, headers=stack.headers(key))
        return "ok" if answer.status_code == 200 else answer.text

    look = Look(Observer(stack))
    with look.watching(), ThreadPoolExecutor(CLIENTS) as callers:
        return set(callers.map(ask, range(count))), look


def test_requests_beyond_the_pool_wait_for_their_tokens_and_none_is_preempted(both: Both) -> None:
    answers, look = asked(both.stack, REQUESTS, ignore_eos=True)
    assert answers == {"ok"}
    assert look.fullest > 0.5, "the pool was never half full: this test shows nothing"
    assert Observer(both.stack).value("serve_app_engine_preemptions_total", model=SECOND) == 0


def test_once_lengths_are_learned_far_more_run_at_once_and_none_is_preempted(both: Both, batch_key: str) -> None:
    """Answers end by chance (a stop string), one in five beyond what it was given; each allows itself far more. They
    are of another tenant than those that were cut off: of a tenant with both kinds one in five has to be longer."""
    observer = Observer(both.stack)
    answers, look = asked(
        both.stack, LEARN_REQUESTS, batch_key, max_tokens=WIDE_BOUND, temperature=1.0, stop=["ing", "er"]
    )
    labels = {"model": SECOND, "tenant": "batch", "part": "output"}
    estimated, used = (observer.value(f"serve_app_{name}_tokens_total", **labels) for name in ("estimated", "used"))
    print(f"estimated {estimated:.0f}, used {used:.0f}, at once {look.most_running:.0f}, full {look.fullest:.2f}")
    assert answers == {"ok"}
    assert look.most_running > 10, "bounds were given, not estimates"
    assert observer.value("serve_app_engine_preemptions_total", model=SECOND) == 0


def test_a_model_taken_out_is_gone_and_nothing_of_it_was_felt_by_the_other(both: Both) -> None:
    """The last test of this module."""
    assert both.take_out() == both.before
    assert both.stack.post("/v1/completions", {"model": SECOND, "prompt": "a", "max_tokens": 1}).status_code == 404
    both.beside.stop()
    assert both.beside.failed == []
    assert both.beside.answered > 0
