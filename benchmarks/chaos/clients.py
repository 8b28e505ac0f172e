"""The clients: each asks, reads to the end, compares, and repeats only what the death of an edge process has cut.

Invariant: every request ends as one of `Counts`' fields, and none is repeated for any other reason than a refusal or a
connection that HAProxy's or a router's death has cut.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.chaos.answers import Answer, Malformed, read
from benchmarks.chaos.plan import HUNG_S
from benchmarks.chaos.questions import Question
from benchmarks.common.arms import BenchmarkError

# After the death of an edge process its clients may be cut, and repeat, for so long: with HAProxy's manager, which
# Serve replaces after three checks of one controller have failed, HAProxys end that an earlier reload displaced.
EDGE_S = 40.0
REFUSED_S = 60.0  # of refusals in a row, after which a request counts as failed
MAX_RETRY_S = 2.0  # waits no longer than that, to keep up the load
AWAY_S = 0.2  # between two attempts to connect
PAUSE_S = 0.1  # the shortest pause of an answer that is kept; steps are a tenth of it
REFUSED = (429, 503)
CUT_CODES = frozenset({"router_lost", "run_lost"})  # what a router's death is called
ID_HEADER = "x-serve-app-request-id"
SAMPLES = 12


class Hung(Exception):
    """No byte came for `HUNG_S` with a replica ready."""


class Cut(Exception):
    """The connection, or the run, ended with an edge process."""


class Refused(Exception):
    """The request was not accepted. `retry_s`: as the server says."""

    def __init__(self, code: str, retry_s: float) -> None:
        super().__init__(code)
        self.code = code
        self.retry_s = retry_s


@dataclass(slots=True, eq=False)
class Attempt:
    """A request in flight. `last_seen`: the last byte, or the start; `gaps`: its pauses (from, seconds)."""

    last_seen: float
    task: asyncio.Task[Any]
    sent: bool = False
    is_hung: bool = False
    gaps: list[tuple[float, float]] = field(default_factory=list)

    async def trace(self, event: str, _: Any) -> None:
        """What httpx says of its work."""
        self.sent = self.sent or event == "http11.send_request_body.complete"

    def on_bytes(self, now: float) -> None:
        if now - self.last_seen >= PAUSE_S:
            self.gaps.append((self.last_seen, now - self.last_seen))
        self.last_seen = now


@dataclass(frozen=True, slots=True)
class Different:
    """An answer that is another one than the undisturbed."""

    question: Question
    expected: Answer
    got: Answer
    request_id: str


@dataclass(frozen=True, slots=True)
class Paused:
    """A whole stream that paused: its pauses (from, seconds) after its first byte."""

    request_id: str
    gaps: tuple[tuple[float, float], ...]


@dataclass(slots=True)
class Counts:
    """What became of the requests."""

    requests: int = 0
    hung: int = 0
    edge_retries: int = 0
    repeats_of_unsent: int = 0  # attempts that found no endpoint
    refused: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    different: list[Different] = field(default_factory=list)
    samples: list[str] = field(default_factory=list)

    def sample(self, text: str) -> None:
        if len(self.samples) < SAMPLES:
            self.samples.append(text[:500])


class Crowd:
    """All clients of a run.

    Args:
        url: of the endpoint. keys: of all classes.
    """

    def __init__(self, url: str, keys: Sequence[str], seed: int) -> None:
        self._keys = keys
        self._draw = random.Random(f"{seed} clients")
        own = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(base_url=url, timeout=None, limits=own, trust_env=False)
        self.counts = Counts()
        self.expected: dict[int, Answer] = {}
        self.in_flight: set[Attempt] = set()
        self.edge_died_at = float("-inf")
        self.paused: asyncio.Queue[Paused] = asyncio.Queue()

    async def close(self) -> None:
        await self._http.aclose()

    async def learn(self, pool: Sequence[Question], at_once: int) -> None:
        """Ask everything once, undisturbed.

        Raises:
            BenchmarkError: a question has no answer.
        """
        rest = iter(pool)

        async def some() -> None:
            for question in rest:
                try:
                    data, _ = await self._attempt(question, self._headers(None))
                    self.expected[question.number] = read(question.api, data, stream=question.stream)
                except (Cut, Hung, Malformed, Refused, httpx.ConnectError) as error:
                    raise BenchmarkError(f"undisturbed, {question.body}: {error!r}") from error

        await asyncio.gather(*(some() for _ in range(at_once)))

    async def client(self, pool: Sequence[Question], numbers: itertools.count[int], most: float, until: float,
                     *, keyed: bool) -> None:  # fmt: skip
        """Ask again and again, until so many were asked by all, or until then."""
        while time.monotonic() < until and next(numbers) < most:
            self.counts.requests += 1
            await self._ask(self._draw.choice(pool), keyed=keyed)

    def watch(self, unready_at: float) -> None:
        """End the attempts that hang. `unready_at`: the last moment without a ready replica."""
        now = time.monotonic()
        for attempt in self.in_flight:
            if attempt.sent and now - max(attempt.last_seen, unready_at) > HUNG_S and not attempt.is_hung:
                attempt.is_hung = True
                attempt.task.cancel()

    async def _ask(self, question: Question, *, keyed: bool) -> None:
        """One request to its end, with its repeats."""
        headers = self._headers(uuid.uuid4().hex if keyed else None)
        refused_at: float | None = None  # the first refusal of those in a row
        while True:
            try:
                data, request_id = await self._attempt(question, headers)
                answer = read(question.api, data, stream=question.stream)
                if answer != self.expected[question.number]:
                    self.counts.different.append(
                        Different(question, self.expected[question.number], answer, request_id)
                    )
                return
            except httpx.ConnectError:
                self.counts.repeats_of_unsent += 1
                await asyncio.sleep(AWAY_S)  # bound: EDGE_S after a death, then it fails
                cut = "no endpoint"
            except Refused as error:
                self.counts.refused[error.code] += 1
                refused_at = refused_at or time.monotonic()
                if time.monotonic() > refused_at + REFUSED_S:
                    self._fail(f"refused: {error.code}", question)
                    return
                await asyncio.sleep(min(error.retry_s, MAX_RETRY_S))  # bound: REFUSED_S in all
                continue
            except Hung:
                self.counts.hung += 1
                self.counts.sample(f"hung: {question.api} stream={question.stream}")
                return
            except Cut as error:
                cut = str(error)
                self.counts.edge_retries += 1
            except Malformed as error:
                if error.code not in CUT_CODES:
                    self._fail(error.code or "broken off", question, str(error))
                    return
                cut = error.code
                self.counts.edge_retries += 1
            refused_at = None
            if time.monotonic() - self.edge_died_at > EDGE_S:
                self._fail(f"cut with no death at the edge: {cut}", question)
                return

    async def _attempt(self, question: Question, headers: Mapping[str, str]) -> tuple[bytes, str]:
        """The body of an answer with status 200, and the request's id.

        Raises:
            Hung, Cut, Refused, Malformed (any other status), httpx.ConnectError.
        """
        now = time.monotonic()
        task = asyncio.current_task()
        assert task is not None
        attempt = Attempt(now, task)
        self.in_flight.add(attempt)
        data = b""
        try:
            async with self._http.stream(
                "POST", f"/v1/{question.api}", json=question.body, headers=headers, extensions={"trace": attempt.trace}
            ) as answer:
                async for piece in answer.aiter_raw():
                    attempt.on_bytes(time.monotonic())
                    data += piece
        except httpx.ConnectError:
            raise
        except httpx.TransportError as error:
            raise Cut(type(error).__name__) from error
        except asyncio.CancelledError:
            if attempt.is_hung and task.uncancel() == 0:
                raise Hung from None
            raise
        finally:
            self.in_flight.discard(attempt)
        if answer.status_code != 200:
            raise refusal(answer.status_code, answer.headers, data)
        request_id = answer.headers.get(ID_HEADER, "")
        gaps = tuple(attempt.gaps[1:] if attempt.gaps[:1] and attempt.gaps[0][0] == now else attempt.gaps)
        if question.stream and gaps:
            self.paused.put_nowait(Paused(request_id, gaps))
        return data, request_id

    def _headers(self, key: str | None) -> dict[str, str]:
        headers = {"authorization": f"Bearer {self._draw.choice(self._keys)}", "connection": "close"}
        return headers | ({} if key is None else {"idempotency-key": key})

    def _fail(self, why: str, question: Question, more: str = "") -> None:
        self.counts.failed[why] += 1
        self.counts.sample(f"failed: {why}: {question.api} stream={question.stream}: {more}")


def refusal(status: int, headers: Mapping[str, str], data: bytes) -> Exception:
    """What an answer with another status than 200 means to its client."""
    try:
        code = str(json.loads(data)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        code = f"{status} {data[:80]!r}"
    if code in CUT_CODES:
        return Cut(code)
    if status in REFUSED:
        retry_after = headers.get("retry-after", "")
        return Refused(code, float(retry_after) if retry_after.isdigit() else 1.0)
    return Malformed(f"{status} {data[:200]!r}", code)
