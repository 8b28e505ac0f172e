"""KV budgets on a real engine whose pool is far smaller than what is asked of it.

Nothing is refused, and vLLM never has to take a running request's blocks away.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from tests.e2e import prompts
from tests.e2e.observe import Observer
from tests.e2e.stack import CONFIG, Stack
from tests.e2e.test_two_models import become

SMALL = "tiny-small"
SMALL_MODEL = {
    "name": SMALL,
    "path": "tiny",
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 32,
    "kv_cache_gb": 0.02,  # about 5,000 tokens: a quarter of what the batch's slots would fill
}
CLIENTS, REQUESTS = 48, 64
LEARN_REQUESTS = 320
WIDE_BOUND = 900  # tokens: five such fill the pool
LOOK_S = 0.2


@pytest.fixture(scope="module")
def small(stack: Stack) -> Iterator[Stack]:
    """The stack with a model of a small pool."""
    try:
        become(stack, [*CONFIG["models"], SMALL_MODEL])
        yield stack
    finally:
        become(stack, CONFIG["models"])


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
                    self._observer.value("serve_app_engine", model=SMALL, figure=name)
                    for name in ("kv_cache_usage", "running")
                )
                self.fullest, self.most_running = max(self.fullest, full), max(self.most_running, running)

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
        body = {"model": SMALL, "prompt": prompt, "max_tokens": draw.randint(100, 500), "seed": number} | more
        answer = stack.post("/v1/completions", body, headers=stack.headers(key))
        return "ok" if answer.status_code == 200 else answer.text

    look = Look(Observer(stack))
    with look.watching(), ThreadPoolExecutor(CLIENTS) as callers:
        return set(callers.map(ask, range(count))), look


def test_requests_beyond_the_pool_wait_for_their_tokens_and_none_is_preempted(small: Stack) -> None:
    answers, look = asked(small, REQUESTS, ignore_eos=True)
    assert answers == {"ok"}
    assert look.fullest > 0.5, "the pool was never half full: this test shows nothing"
    assert Observer(small).value("serve_app_engine", model=SMALL, figure="preemptions") == 0


def test_once_lengths_are_learned_far_more_run_at_once_and_none_is_preempted(small: Stack, batch_key: str) -> None:
    """Answers end by chance (a stop string), one in five beyond what it was given; each allows itself far more. They
    are of another tenant than those that were cut off: of a tenant with both kinds one in five has to be longer."""
    observer = Observer(small)
    answers, look = asked(small, LEARN_REQUESTS, batch_key, max_tokens=WIDE_BOUND, temperature=1.0, stop=["ing"])
    labels = {"model": SMALL, "tenant": "batch", "part": "output"}
    estimated, used = (observer.value(f"serve_app_{name}_tokens_total", **labels) for name in ("estimated", "used"))
    print(f"estimated {estimated:.0f}, used {used:.0f}, at once {look.most_running:.0f}, full {look.fullest:.2f}")
    assert answers == {"ok"}
    assert look.most_running > 10, "bounds were given, not estimates"
    assert observer.value("serve_app_engine", model=SMALL, figure="preemptions") == 0
