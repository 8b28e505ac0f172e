"""Runs background responses at the routers, each as the key that asked for it and at its own class.

Invariant: a response that was claimed here is renewed until it has ended or is given back; one that this process loses
goes to another worker with its lease. What is decided is in the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import uuid
from collections.abc import Awaitable, Callable

from serve_app.batch.calls import bounded, is_away
from serve_app.batch.interfaces import RowAnswer
from serve_app.batch.router_calls import RouterCalls
from serve_app.core.batches import intake
from serve_app.core.responses import MISSED_DEADLINE, BackgroundJob
from serve_app.core.times import ROW_LEASE_S, ROW_RENEW_S
from serve_app.store import BackgroundStore

logger = logging.getLogger("ray.serve")

MAX_RUNS = 64  # of one worker: as many as an engine runs; those beyond wait in the store
LOOK_S = 0.5  # between looks for new ones: what a response waits at most before it reaches a router
RETRY_S = 2.0  # after a store that is away
MIN_PAUSE_S = 0.5  # after a refusal
MAX_PAUSE_S = 30.0
PAUSE_S = 1.0  # after a refusal without Retry-After, or without a router
MAX_ATTEMPTS = 3  # of a response that engines fail on: as of a row


class BackgroundFeed:
    """The responses of one worker."""

    def __init__(self, store: BackgroundStore, calls: RouterCalls) -> None:
        self._store = store
        self._calls = calls
        self._name = f"responses-{uuid.uuid4().hex}"
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._loops: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._loops = [
            asyncio.create_task(self._repeat("claims", self._claim, LOOK_S), name="responses-claims"),
            asyncio.create_task(self._repeat("leases", self._renew, ROW_RENEW_S), name="responses-leases"),
        ]

    async def close(self) -> None:
        """Stop, and give back what has not ended; its runs are joined by the next worker."""
        for task in self._loops:
            task.cancel()
        runs = dict(self._runs)
        for task in runs.values():
            task.cancel()
        if tasks := [*self._loops, *runs.values()]:
            await asyncio.wait(tasks)
        released = [bounded(self._store.release(self._name, one, count_attempt=False), RETRY_S) for one in runs]
        await asyncio.gather(*released, return_exceptions=True)  # one that cannot be has a lease, which ends

    async def _repeat(self, name: str, step: Callable[[], Awaitable[None]], every_s: float) -> None:
        """Take a step again and again."""
        while True:
            wait_s = every_s
            try:
                await step()
            except Exception as error:
                wait_s = max(RETRY_S, every_s)
                if is_away(error):
                    logger.info("Batch worker: the step %r of responses waits for the store: %s", name, error)
                else:
                    logger.exception("Batch worker: the step %r of responses failed. Report this traceback", name)
            await asyncio.sleep(wait_s)

    async def _claim(self) -> None:
        room = max(0, MAX_RUNS - len(self._runs))  # without room, too: jobs fail at their deadlines
        for job in await bounded(self._store.claim(self._name, room, ROW_LEASE_S)):
            if job.response_id not in self._runs:
                task = asyncio.create_task(self._run(job), name=f"run-{job.response_id}")
                self._runs[job.response_id] = task
                task.add_done_callback(functools.partial(self._forget, job.response_id))

    def _forget(self, response_id: str, task: asyncio.Task[None]) -> None:
        del self._runs[response_id]
        if not task.cancelled() and (error := task.exception()) is not None:  # its lease ends, and it runs again
            logger.info("Response %s waits for its lease to end and runs again: %r", response_id, error)

    async def _renew(self) -> None:
        if self._runs:
            await bounded(self._store.renew(self._name, list(self._runs), ROW_LEASE_S), ROW_RENEW_S)

    async def _run(self, job: BackgroundJob) -> None:
        """Run a response until it has ended, or give it back."""
        try:
            answer = await self._calls.run_response(job)
        except Exception as error:  # noqa: BLE001  whatever it is, the response runs again
            logger.info("Response %s got no answer from a router and runs again: %r", job.response_id, error)
            await self._give_back(job, PAUSE_S, count_attempt=False)
            return
        if answer.error_code == MISSED_DEADLINE["code"]:
            await self._store.fail(job.response_id, MISSED_DEADLINE)
        elif answer.status in intake.LATER:
            pause_s = PAUSE_S if answer.retry_after_s is None else answer.retry_after_s
            pause_s = min(MAX_PAUSE_S, max(MIN_PAUSE_S, pause_s))
            await self._give_back(job, pause_s, count_attempt=False, has_begun=False)
        elif _is_final(answer) or job.attempts + 1 >= MAX_ATTEMPTS:
            await self._store.fail(job.response_id, _error_of(answer))  # does nothing if it has ended
        else:
            await self._give_back(job, 0.0, count_attempt=True)  # the same

    async def _give_back(
        self, job: BackgroundJob, pause_s: float, *, count_attempt: bool, has_begun: bool = True
    ) -> None:
        how = {"count_attempt": count_attempt, "has_begun": has_begun}
        await self._store.release(self._name, job.response_id, pause_s=pause_s, **how)


def _is_final(answer: RowAnswer) -> bool:
    """Whether a repeat fails in the same way; a lost run, whose key is used up, begins anew."""
    return 400 <= answer.status < 500 and answer.error_code not in intake.KEY_USED_UP


def _error_of(answer: RowAnswer) -> dict[str, str]:
    """OpenAI's error of a response."""
    message = "the engines failed at it"
    with contextlib.suppress(ValueError, KeyError, TypeError):
        message = str(json.loads(answer.body)["error"]["message"])
    code = "invalid_prompt" if 400 <= answer.status < 500 else "server_error"
    return {"code": code, "message": message}
