"""Routers and engines lose each other while eighty streams run: three routers, two simulated engines.

A lost router costs the streams on it and no others, a lost engine none; what is lost holds nothing afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import random
import secrets
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests

from benchmarks.common.processes import title_of
from serve_app.core.receipts.receipts import MAX_RECEIPTS
from serve_app.names import deployment_of
from serve_app.system import Listener
from serve_app.transport.tcp import HEADER_BYTES
from serve_app.transport.tcp_server import TICKET_BYTES
from tests.e2e.observe import ABORT_S, FILL_S, IDLE_S, Observer
from tests.e2e.stack import REQUEST_TIMEOUT_S, Stack
from tests.e2e.three import ROUTER, ROUTERS, WIDE, WIDE_REPLICAS, WIDE_SLOTS, processes
from tests.waiting import wait_until

pytestmark = pytest.mark.long  # kills under load, which test_chaos has, too

STREAMS = WIDE_SLOTS * 5 // 4  # for one engine too many, if the other is lost
STILL_S = 2.0  # how long a process stands still; connections are given up after ten
LONG = 500  # tokens: 5 s, well beyond STILL_S
ENDLESS = 4000  # tokens: 40 s, longer than any test looks
GIVEN_UP_S = 180.0  # a frozen replica by Serve, and another in its place
BACK_S = 60.0  # for a killed replica to be replaced: 5 s and less on an idle machine
# requests of a storm; twelve seconds of two cores
STORM = 2000
AT_ONCE = 32
LEAVING = 0.4  # share of its clients that go away
FILLED = ROUTERS * MAX_RECEIPTS * 5 // 4  # requests after which no router keeps one more receipt
SPARE_DESCRIPTORS = 20  # more than before: connections that happen to be open
SPARE_MIB = 3.0  # of memory; gRPC's leak with calls that are cancelled was three times that in the long test


@pytest.fixture
def idle(three: Stack) -> Iterator[Stack]:
    """With all replicas there and nothing to do, before the test and after it."""
    settle(three)
    yield three
    settle(three)


def settle(stack: Stack) -> None:
    wait_until(lambda: (len(engines(stack)), len(routers(stack))), BACK_S, "replicas", wanted=(WIDE_REPLICAS, ROUTERS))
    wait_until(lambda: running(stack), BACK_S, "sequences running", wanted=0.0)


def started(stack: Stack, title: str) -> list[int]:
    """Ray adds the method that runs to the title of a process, as long as a replica starts."""
    return [pid for pid in processes(stack, title) if title_of(pid) == title]


def engines(stack: Stack) -> list[int]:
    return started(stack, f"ray::ServeReplica:serve_app:{deployment_of(WIDE)}")


def routers(stack: Stack) -> list[int]:
    return started(stack, ROUTER)


def running(stack: Stack) -> float | None:
    """Sequences in the engines, told by whichever router answers; None while none does."""
    try:
        return Observer(stack).running(WIDE)  # over a new connection: the router of an old one may be gone
    except requests.RequestException:
        return None


def migrations(stack: Stack) -> float:
    """Streams that went on on another replica."""
    return Observer(stack).value("serve_app_migrations_total", model=WIDE)


class Client(threading.Thread):
    """One stream, read to its end."""

    def __init__(self, stack: Stack, tokens: int, silent_s: float = REQUEST_TIMEOUT_S) -> None:
        super().__init__(daemon=True)
        self._stack = stack
        self.silent_s = silent_s
        self._body = {"model": WIDE, "prompt": "hi", "max_tokens": tokens, "stream": True}
        self.events = 0
        self.lines: list[bytes] = []
        self.ended = ""
        self.start()

    def run(self) -> None:
        parts = urlsplit(self._stack.base_url)
        connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=self.silent_s)
        headers = self._stack.headers() | {"Content-Type": "application/json"}
        try:
            connection.request("POST", "/v1/completions", json.dumps(self._body), headers)
            self.ended = self._read(connection.getresponse())
        except (http.client.HTTPException, OSError):
            self.ended = "cut"
        finally:
            connection.close()

    def _read(self, response: http.client.HTTPResponse) -> str:
        if response.status != 200:
            return str(response.status)
        while line := response.readline():
            if line == b"data: [DONE]\n":
                return "done"
            if line.startswith(b'data: {"error"'):
                return str(json.loads(line.removeprefix(b"data: "))["error"]["code"])
            if line.startswith(b"data: "):
                self.events += 1
                self.lines.append(line)
        return "cut"

    def assembled(self) -> tuple[str, set[tuple[str, int]], list[str]]:
        """What its reader puts together: the text, the id and time of its chunks, the reasons of its end. How many
        tokens a chunk has differs from run to run."""
        reported = [json.loads(line.removeprefix(b"data: ")) for line in self.lines]
        choices = [choice for event in reported for choice in event["choices"]]
        reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
        return "".join(one["text"] for one in choices), {(event["id"], event["created"]) for event in reported}, reasons


def crowd(stack: Stack, tokens: int, silent_s: float = REQUEST_TIMEOUT_S) -> list[Client]:
    """Streams that have all begun."""
    clients = [Client(stack, tokens, silent_s) for _ in range(STREAMS)]
    wait_until(lambda: sum(client.events > 1 for client in clients), FILL_S, "streams begun", wanted=STREAMS)
    return clients


def ends(clients: list[Client]) -> dict[str, int]:
    for client in clients:
        client.join(client.silent_s)
    return dict(Counter(client.ended for client in clients))


def uncut(clients: list[Client]) -> int:
    """How many of them still read."""
    return sum(not client.ended for client in clients)


@pytest.mark.parametrize("owner", [engines, routers])
def test_a_process_that_stands_still_for_a_while_costs_nothing_but_time(idle: Stack, owner: Any) -> None:
    clients = crowd(idle, LONG)
    still = owner(idle)[0]
    os.kill(still, signal.SIGSTOP)
    try:
        time.sleep(STILL_S)  # bound: what is tested
    finally:
        os.kill(still, signal.SIGCONT)

    assert ends(clients) == {"done": STREAMS}


def test_streams_of_an_engine_that_stands_still_for_good_go_on_on_the_other(idle: Stack) -> None:
    """In their middle: its kernel acknowledges all that is sent to it, but its process answers no call."""
    before = migrations(idle)
    clients = crowd(idle, LONG, GIVEN_UP_S)
    still = engines(idle)[0]
    os.kill(still, signal.SIGSTOP)
    try:
        assert ends(clients) == {"done": STREAMS}
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(still, signal.SIGKILL)
    assert migrations(idle) - before >= STREAMS // 4


def test_whole_answers_of_an_engine_that_stands_still_for_good_come_from_the_other(idle: Stack) -> None:
    """Nothing of them was seen."""
    body = {"model": WIDE, "prompt": "hi", "max_tokens": LONG}
    still = engines(idle)[0]
    with ThreadPoolExecutor(STREAMS) as pool:
        answers = [pool.submit(idle.post, "/v1/completions", body, timeout=GIVEN_UP_S) for _ in range(STREAMS)]
        wait_until(lambda: running(idle), FILL_S, "sequences running", wanted=float(STREAMS))
        os.kill(still, signal.SIGSTOP)
        try:
            counter = Counter(answer.result().status_code for answer in answers)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(still, signal.SIGKILL)

    assert counter == {200: STREAMS}


def test_the_streams_of_a_killed_engine_go_on_on_the_other_as_if_nothing_had_happened(idle: Stack) -> None:
    undisturbed = Client(idle, LONG)
    assert ends([undisturbed]) == {"done": 1}
    before = migrations(idle)
    clients = crowd(idle, LONG)
    os.kill(engines(idle)[0], signal.SIGKILL)
    assert ends(clients) == {"done": STREAMS}

    text, _, reasons = undisturbed.assembled()
    for client in clients:
        reported = client.assembled()
        assert (reported[0], reported[2], len(reported[1])) == (text, reasons, 1)
    # the queue spreads them evenly over the engines, as far as three routers can
    assert migrations(idle) - before >= STREAMS // 4


def test_a_killed_router_s_requests_are_aborted_within_a_second_and_no_others(idle: Stack) -> None:
    clients = crowd(idle, ENDLESS)
    os.kill(routers(idle)[0], signal.SIGKILL)
    wait_until(lambda: any(client.ended for client in clients), FILL_S, "the router's clients cut")
    wait_until(lambda: running(idle) == uncut(clients), ABORT_S, "what runs is what the clients still read")

    assert 0 < uncut(clients) < STREAMS
    for pid in routers(idle):  # the others' clients would stay for ENDLESS
        os.kill(pid, signal.SIGKILL)
    assert ends(clients) == {"cut": STREAMS}


def test_who_has_no_ticket_is_cut_at_an_engine_s_port(idle: Stack) -> None:
    ends([Client(idle, 5)])  # the port opens with the first request
    assert idle.cluster is not None
    ports = [one for one in idle.cluster.listeners() if one.pid in engines(idle)]
    answers = {one.port: shown_nonsense(one) for one in ports}

    assert b"" in answers.values()  # cut without a word, as the wire does; the others are gRPC's
    assert all(answer == b"" or b"HTTP/2" in answer or answer[3:4] in b"\x04\x07" for answer in answers.values())


def shown_nonsense(listener: Listener) -> bytes:
    """What the port says to a wrong ticket before it cuts. TimeoutError: it does not cut."""
    address = "127.0.0.1" if listener.address in ("0.0.0.0", "::") else listener.address
    reported = b""
    with (
        socket.create_connection((address, listener.port), timeout=IDLE_S) as end,
        contextlib.suppress(ConnectionError),
    ):
        end.sendall(TICKET_BYTES.to_bytes(HEADER_BYTES) + secrets.token_bytes(TICKET_BYTES))
        while data := end.recv(2**16):
            reported += data
    return reported


async def storm(stack: Stack, count: int, seed: int) -> Counter[str]:
    """Short requests, many of whose clients go away somewhere; the statuses of those that stay."""
    parts = urlsplit(stack.base_url)
    draw = random.Random(seed)
    statuses: Counter[str] = Counter()

    async def ask() -> None:
        body = {
            "model": WIDE,
            "prompt": "hi",
            "max_tokens": draw.choice([1, 2, 3, 100]),
            "stream": draw.random() < 0.7,
        }
        data = json.dumps(body).encode()
        head = "".join(f"{name}: {value}\r\n" for name, value in stack.headers().items())
        lines = f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n{head}"
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writer.write(f"{lines}Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        if draw.random() < LEAVING:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reader.read(draw.choice([1, 10**6])), draw.random() * 0.08)  # bound: 0.08 s
        else:
            answer = await asyncio.wait_for(reader.read(), REQUEST_TIMEOUT_S)
            statuses[answer[9:12].decode()] += 1
        writer.transport.abort()

    async def worker() -> None:
        for _ in left:
            await ask()

    left = iter(range(count))
    await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
    return statuses


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def resident_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024


@pytest.mark.parametrize(
    ("count", "memory"),
    [(STORM // 3, False), pytest.param(10 * STORM, True, marks=pytest.mark.long)],
    ids=["short", "long"],
)
def test_clients_that_come_and_go_leave_nothing_behind(idle: Stack, count: int, memory: bool) -> None:
    asyncio.run(storm(idle, FILLED if memory else count // 2, seed=1))  # what is allocated once
    wait_until(lambda: running(idle), IDLE_S, "sequences running", wanted=0.0)
    pids = routers(idle) + engines(idle)
    before = {pid: (descriptors(pid), resident_mib(pid)) for pid in pids}
    statuses = asyncio.run(storm(idle, count, seed=2))
    wait_until(lambda: running(idle), ABORT_S, "sequences running", wanted=0.0)

    assert set(statuses) == {"200"}
    assert routers(idle) + engines(idle) == pids
    more = {pid: (descriptors(pid) - before[pid][0], resident_mib(pid) - before[pid][1]) for pid in pids}
    assert all(count <= SPARE_DESCRIPTORS for count, _ in more.values()), more
    assert not memory or all(mib <= SPARE_MIB for _, mib in more.values()), more
