"""Two real models at once on one machine: the second is added to the running stack, and taken out again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import requests

from serve_app.declare import application
from serve_app.engine.tiny_model import ensure_tiny_model
from serve_app.local.remote import RemoteDriver
from serve_app.settings import parse
from tests.e2e import prompts
from tests.e2e.reference import Reference
from tests.e2e.stack import CONFIG, PEOPLE_KEY, START_S, TINY, Stack
from tests.requires import missing

SECOND = "tiny-second"
SEED = 1  # other weights under the same tokenizer: the same prompt has another answer
PROMPTS = 6
ANSWER_TOKENS = 32
SECOND_MODEL = {
    "name": SECOND,
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "kv_cache_gb": 0.1,  # eight of its longest sequences take 50 MB
}


class Steady:
    """A client that asks the first model without a pause."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._over = threading.Event()
        self.answered = 0
        self.failed: list[str] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        body = {"model": TINY, "prompt": "The river", "max_tokens": 4}
        while not self._over.is_set():
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


def replicas(told: dict[str, Any]) -> dict[str, list[str]]:
    return {one["name"]: [replica["id"] for replica in one["replicas"]] for one in told["models"]}


def become(stack: Stack, models: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Change the running stack to these models, as `serve-app deploy` does; their replicas once it runs."""
    assert stack.cluster is not None
    instance = stack.cluster.instance
    remote = RemoteDriver(
        {
            "do": "declare",
            "environment": stack.cluster.environment(),
            "application": application(parse({**CONFIG, "models": models}).without_secrets()),
            "serve": {"host": instance.host, "port": instance.http_port, "proxy_location": "HeadOnly"},
            "wait": True,
            "models": [],
        }
    )
    told: dict[str, Any] = {}
    try:
        while (event := remote.event(START_S)) is not None and event["event"] != "end":
            told = event
    finally:
        remote.close()
    assert told.get("state") == "running", told
    return replicas(told)


@pytest.fixture(scope="module")
def beside(stack: Stack) -> Iterator[Steady]:
    """A client that asks the first model while the second comes, serves and goes."""
    if stack.cluster is None or stack.api_key != PEOPLE_KEY:
        missing("the external stack is left as it is")
    client = Steady(stack)
    yield client
    client.stop()


@contextmanager
def second_model(stack: Stack) -> Iterator[tuple[dict[str, list[str]], Reference]]:
    """The stack with the second model, and the reference for it; then it is as it was."""
    folder = ensure_tiny_model(seed=SEED)
    models = [*CONFIG["models"], {**SECOND_MODEL, "path": str(folder)}]
    try:
        yield become(stack, models), Reference(folder)
    finally:
        become(stack, CONFIG["models"])


def test_each_of_two_real_models_is_answered_by_its_own(stack: Stack, beside: Steady, reference: Reference) -> None:
    before = become(stack, CONFIG["models"])
    with second_model(stack) as (during, second):
        assert {name: ids for name, ids in during.items() if name != SECOND} == before
        assert len(during[SECOND]) == 1

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
    assert stack.post("/v1/completions", {"model": SECOND, "prompt": "a", "max_tokens": 1}).status_code == 404
    assert become(stack, CONFIG["models"]) == before
    assert beside.failed == []
    assert beside.answered > 0
