"""Interactive clients in an open loop: each request goes out at its moment, whatever became of the others.

Invariant: moments, classes and texts come from the seed; a request's time counts from its moment, so a client that is
late itself is not hidden.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

import httpx

from benchmarks.common.scaling_stack import MODEL, Stage

HIGH = "high"
NORMAL = "normal"
CLIENT_S = 120.0  # above any answer here


@dataclass(frozen=True, slots=True)
class Planned:
    """One request: seconds after the load's beginning, its class, its prompt."""

    at_s: float
    level: str
    prompt: str


@dataclass(frozen=True, slots=True)
class Answered:
    """Seconds from its moment to its first bytes and to its end; why it failed, or nothing.

    Args:
        queue_s, engine_s: parts of `first_s`, by its receipt: until its grant, and from there to its first token.
        late_s: another part, until the client itself got to send it.
    """

    at_s: float
    level: str
    first_s: float
    ended_s: float
    failure: str = ""
    queue_s: float = 0.0
    engine_s: float = 0.0
    late_s: float = 0.0


def poisson(seed: int, per_s: float, span_s: float, high: float) -> list[Planned]:
    """Requests at random moments, so many a second on average; `high`: the part of that class, the rest is `normal`."""
    draw = random.Random(f"{seed} interactive")
    at_s = 0.0
    found: list[Planned] = []
    while (at_s := at_s + draw.expovariate(per_s)) < span_s:
        level = HIGH if draw.random() < high else NORMAL
        found.append(Planned(at_s, level, f"person {len(found)} asks {draw.randrange(10**6)}"))
    return found


async def run(stage: Stage, planned: Sequence[Planned], tokens: int, *, stream: bool) -> list[Answered]:
    """All of them to their end, then their receipts."""
    name = uuid.uuid4().hex
    limits = httpx.Limits(max_connections=None)
    headers = {"authorization": f"Bearer {stage.key}"}
    async with httpx.AsyncClient(
        base_url=stage.cluster.url, headers=headers, limits=limits, timeout=CLIENT_S, trust_env=False
    ) as client:
        began = time.monotonic()

        async def ask(number: int, request: Planned) -> Answered:
            due = began + request.at_s
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            body = {"model": MODEL, "prompt": request.prompt, "max_tokens": tokens, "ignore_eos": True}
            first_s = 0.0
            failure = ""
            late_s = max(0.0, time.monotonic() - due)
            try:
                async with client.stream(
                    "POST",
                    "/v1/completions",
                    json=body | {"priority": request.level, "stream": stream},
                    headers={"x-request-id": f"{name}-{number}"},
                ) as answer:
                    async for piece in answer.aiter_bytes():
                        # a comment of the queue is no token
                        if not first_s and not piece.startswith(b":"):
                            first_s = time.monotonic() - due
                    failure = "" if answer.status_code == 200 else str(answer.status_code)
            except httpx.HTTPError as error:
                failure = repr(error)
            return Answered(request.at_s, request.level, first_s, time.monotonic() - due, failure, late_s=late_s)

        async def with_parts(number: int, answered: Answered) -> Answered:
            if answered.failure:
                return answered
            receipt = (await client.get(f"/admin/requests/{name}-{number}")).raise_for_status().json()
            queue_s = receipt["wait_s"]
            return replace(answered, queue_s=queue_s, engine_s=receipt["first_token_s"] - queue_s)

        answers = await asyncio.gather(*(ask(number, request) for number, request in enumerate(planned)))
        # one after the other: the next window must not begin beside a storm of these
        return [await with_parts(number, answered) for number, answered in enumerate(answers)]
