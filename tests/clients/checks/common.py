"""What the checks of all clients share: where the stack is, what is asked of it, and what its metrics say of it."""

from __future__ import annotations

import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Literal

from pydantic import BaseModel

from tests.waiting import wait_until

TINY = "tiny"
EMBED = "tiny-embed"
SLOW = "slow"  # makes a token in 10 ms, up to 8,000 of them: a client can leave
BUSY = "busy"  # its only slot is taken
BASE_URL = os.environ.get("OPENAI_BASE_URL", "")
KEY = os.environ.get("OPENAI_API_KEY", "")
LOW_KEY = os.environ.get("CLIENTS_LOW_KEY", "")  # of a tenant whose class has no queue
LIMITED_KEY = os.environ.get("CLIENTS_LIMITED_KEY", "")  # two requests at once, then one a second
LIMITED_CALLS = 5  # at once: the last is due after three seconds
TOKENS = 700  # of an answer with a schema: a model may put a hundred of white space around each value
MANY_TOKENS = 8000
SETTLE_S = 10.0  # for the engine to hear of a client that left, on two busy cores
POLL_S = 0.05
ASK: Any = [{"role": "user", "content": "Hello!"}]
BRIEF = "Answer briefly."  # a system or developer message
PARTS: Any = [{"type": "text", "text": "The weather "}, {"type": "text", "text": "here?"}]
WARM = "warm"  # a tool's result
WRONG_KEY = "sk-nobody"
WRONG_MODEL = "no-such-model"
PAST = {"X-Deadline-Ms": "100"}  # over before the busy model has room

Check = Callable[[], str | None]
COLUMNS = (
    "chat, stream", "usage of a stream", "errors", "429", "limited key", "leaving a stream", "tools, streamed",
    "structured output", "two turns", "responses", "embeddings",
)  # fmt: skip


class Weather(BaseModel):
    """The weather of a city."""

    unit: Literal["c", "f"]
    days: Literal[1, 2, 3]


WEATHER_TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather.", "parameters": Weather.model_json_schema()},
}


def metric(name: str, **labels: str) -> float:
    """Sum of the samples of this name that carry these labels."""
    endpoint = BASE_URL.removesuffix("/v1")
    request = urllib.request.Request(f"{endpoint}/metrics", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        text = answer.read().decode()
    wanted = {f'{label}="{value}"' for label, value in labels.items()}
    samples = re.findall(rf"^{name}\{{(.*)\}} (\S+)$", text, re.MULTILINE)
    return sum(float(value) for found, value in samples if wanted <= set(found.split(",")))


def running(model: str) -> float:
    """Sequences of the model that engines run."""
    return metric("serve_app_engine", model=model, figure="running")


@contextmanager
def leaves(model: str = SLOW) -> Iterator[None]:
    """The request to the model that is begun in the block is cancelled while it runs, and nothing of it runs on."""
    cancelled: Mapping[str, str] = {"model": model, "outcome": "cancelled_running"}
    before = metric("serve_app_requests_total", **cancelled)
    yield

    def look() -> tuple[float, float]:
        return metric("serve_app_requests_total", **cancelled) - before, running(model)

    wait_until(look, SETTLE_S, "requests cancelled, sequences running", wanted=(1, 0), poll_s=POLL_S)


@contextmanager
def refused(reason: str, times: int) -> Iterator[None]:
    """In the block `BUSY` gets `times` requests, and refuses each with this reason. Between two that find a full queue
    the client waits as long as the refusal says."""
    retry_s = _retry_after_s() if reason == "queue_full" else 0.0
    before = metric("serve_app_refused", model=BUSY, reason=reason)
    began = time.monotonic()
    yield
    waited_s = time.monotonic() - began
    seen = metric("serve_app_refused", model=BUSY, reason=reason) - before
    assert seen == times, f"{seen} requests were refused with {reason}, not {times}"
    assert waited_s >= 0.9 * retry_s, f"repeated after {waited_s:.1f} s, told to wait {retry_s} s"


def _retry_after_s() -> float:
    body = json.dumps({"model": BUSY, "prompt": "a", "max_tokens": 1}).encode()
    headers = {"Authorization": f"Bearer {LOW_KEY}", "Content-Type": "application/json"}
    try:
        urllib.request.urlopen(urllib.request.Request(f"{BASE_URL}/completions", body, headers), timeout=30).close()
    except urllib.error.HTTPError as refusal:
        with refusal:
            return float(refusal.headers["Retry-After"])
    raise AssertionError(f"{BUSY} has room")


def stored(history: Any) -> Any:
    """The history as an application reads it back that keeps its chats as JSON."""
    return json.loads(json.dumps(history))


def raised(kind: type[Any], call: Callable[[], object]) -> Any:
    """The exception of this class that the call raises."""
    try:
        got = call()
    except kind as failure:
        return failure
    raise AssertionError(f"{kind.__name__} expected, not {got!r}")


def limited(calls: Callable[[], object], kind: type[Any], last: Callable[[], object]) -> Any:
    """Several calls at once with `LIMITED_KEY`, with the client's own retries, are all answered, some of them refused
    before; returns the exception of this class that one without retries raises when the limit is used up."""
    before = metric("serve_app_limited_total", reason="rate_limit")
    with ThreadPoolExecutor(LIMITED_CALLS) as threads:
        for answered in [threads.submit(calls) for _ in range(LIMITED_CALLS)]:
            answered.result()
    assert metric("serve_app_limited_total", reason="rate_limit") > before, "no call was refused: this shows nothing"
    for _ in range(LIMITED_CALLS):
        try:
            last()
        except kind as failure:
            return failure
    raise AssertionError(f"{LIMITED_CALLS} calls without retries were answered, and {kind.__name__} expected")
