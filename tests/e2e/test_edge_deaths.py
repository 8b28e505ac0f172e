"""The endpoint stays open when HAProxy, Serve's manager of it, or a router is killed, and when a client takes
connections and sends nothing, or too slowly.

A loaded machine is made of two busy processes for each core. Bounds: OPEN_S is the promise; REPLACED_S is Serve's own
time (three checks and a new manager), which on a loaded machine was a minute. The checks are two seconds apart here and
not ten: three of them still take longer than OPEN_S, so Serve alone does not keep the promise.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import requests

from serve_app.system.haproxy import BUFFER_BYTES, FRONT, PER_SOURCE, REFUSED_PER_SOURCE, REQUEST_S
from tests.e2e.crashing import kill
from tests.e2e.stack import Stack
from tests.e2e.three import ROUTER, ROUTERS, WIDE, processes
from tests.waiting import patient, quiet_time, wait_until

pytestmark = pytest.mark.long  # kills under load, which test_chaos has, too

OPEN_S = 5.0
REPLACED_S = 150.0
RESET = 2  # connections that a process has not accepted yet when it hands the port over are reset
UP_S = 60.0  # a router starts within some seconds
PERIOD_S = 0.05  # between two questions of a client
ASKED_S = 10.0  # no question takes a tenth of that
HOGS_PER_CORE = 2
IN_FLIGHT = 30
SLOW = 200  # of each kind, below PER_SOURCE in all
ENDS_S = REQUEST_S + 20.0  # HAProxy's bound, and for a thousand connections to be closed
OTHER = "127.0.0.9"  # another client
LARGE = 4 * BUFFER_BYTES
TOKENS = 400  # 4 s of the engine: nothing of a whole answer is sent before


@pytest.fixture
def edge_stack(three: Stack) -> Stack:
    wait_until(lambda: len(processes(three, ROUTER)) == ROUTERS, UP_S, "routers")
    return three


def manager(edge_stack: Stack) -> int:
    found = processes(edge_stack, "ray::HAProxyManager")
    return found[0] if len(found) == 1 else 0


def front(edge_stack: Stack) -> int:
    """The HAProxy that has the endpoint's port."""
    assert edge_stack.cluster is not None
    return int(Path(edge_stack.cluster.instance.run_dir, FRONT).read_text())


class Asking(threading.Thread):
    """A client that asks for the models again and again, over a new connection each time."""

    def __init__(self, edge_stack: Stack, clock: Callable[[], float]) -> None:
        super().__init__(daemon=True)
        self._there = edge_stack
        self._clock = clock
        self._over = threading.Event()
        self.ends: list[tuple[float, str]] = []
        self.start()

    def run(self) -> None:
        while not self._over.wait(PERIOD_S):
            try:
                answer = self._there.get("/v1/models", headers={"Connection": "close"}, timeout=patient(ASKED_S))
                end = str(answer.status_code)
                if answer.status_code != 200:
                    end += f" {answer.json()['error']['code']}"
            except (requests.RequestException, ValueError, KeyError) as error:
                end = repr(error)
            self.ends.append((self._clock(), end))

    def stop(self) -> list[tuple[float, str]]:
        """What was not 200, and when."""
        self._over.set()
        self.join()
        assert self.ends
        return [(at, end) for at, end in self.ends if end != "200"]


on_any_machine = pytest.mark.parametrize("busy", [False, pytest.param(True, marks=pytest.mark.long)])


@contextmanager
def load(busy: bool) -> Iterator[None]:
    count = HOGS_PER_CORE * (os.cpu_count() or 1) if busy else 0
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


def replaced(edge_stack: Stack, before: int) -> bool:
    """Serve has a new manager, and its HAProxy the port."""
    now = manager(edge_stack)
    if now in (0, before):
        return False
    logs = Path(stack_folder(edge_stack), "h").glob(f"*/admin.sock.{now}.*.stdout.log")
    return bool(list(logs)) and own_parent(front(edge_stack)) == now


def own_parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def stack_folder(edge_stack: Stack) -> str:
    assert edge_stack.cluster is not None
    return edge_stack.cluster.instance.run_dir


@on_any_machine
def test_the_endpoint_is_open_again_soon_after_haproxy_s_death_and_stays_so(edge_stack: Stack, busy: bool) -> None:
    clock = time.monotonic if busy else quiet_time  # the promise holds on a busy machine, too, in the wall's seconds
    with load(busy):
        asking = Asking(edge_stack, clock)
        before = manager(edge_stack)
        began = clock()
        kill(front(edge_stack))
        wait_until(lambda: replaced(edge_stack, before), REPLACED_S, "Serve has its own HAProxy again")
        time.sleep(1.0)  # some more questions to the new one
        closed = asking.stop()
    assert all(at - began < OPEN_S for at, _ in closed), [(at - began, end) for at, end in closed]


@on_any_machine
def test_the_death_of_the_manager_closes_nothing_and_cuts_nothing(edge_stack: Stack, busy: bool) -> None:
    body = {"model": WIDE, "prompt": "The river", "max_tokens": 1800, "ignore_eos": True}
    with load(busy), ThreadPoolExecutor(1) as pool:
        asking = Asking(edge_stack, quiet_time)
        before = manager(edge_stack)
        running = pool.submit(edge_stack.post, "/v1/completions", body)  # 18 s: across the handover on a quiet machine
        time.sleep(1.0)  # it runs
        kill(before)
        wait_until(lambda: replaced(edge_stack, before), REPLACED_S, "Serve has a manager again")
        time.sleep(1.0)  # some more questions to the new one
        closed = asking.stop()
        assert running.result().status_code == 200
    assert len(closed) <= RESET, closed


def test_a_killed_router_costs_no_request_that_had_received_nothing_a_bare_disconnect(edge_stack: Stack) -> None:
    """Small ones run on another router; what is too large to be kept by HAProxy is told so."""

    def ask(number: int) -> tuple[int, str]:
        body = json.dumps({"model": WIDE, "prompt": "The river", "max_tokens": TOKENS, "ignore_eos": True})
        body += "" if number % 2 else " " * LARGE
        with requests.Session() as session:
            session.headers.update(edge_stack.headers() | {"Content-Type": "application/json"})
            session.get(f"{edge_stack.base_url}/v1/models", timeout=patient(ASKED_S))  # its connection was used before
            answer = session.post(f"{edge_stack.base_url}/v1/completions", data=body, timeout=patient(UP_S))
        return answer.status_code, "" if answer.status_code == 200 else answer.json()["error"]["code"]

    victims = processes(edge_stack, ROUTER)
    assert len(victims) == ROUTERS
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        asked = [pool.submit(ask, number) for number in range(IN_FLIGHT)]
        time.sleep(2.0)  # all are in, and none has an answer for two more seconds
        kill(victims[0])
        ends = [one.result() for one in asked]
    assert set(ends[1::2]) == {(200, "")}
    assert set(ends[::2]) <= {(200, ""), (502, "router_lost")}
    wait_until(lambda: len(processes(edge_stack, ROUTER)) == ROUTERS, UP_S, "routers")


@contextmanager
def opened(edge_stack: Stack, count: int, sent: bytes, source: str = "127.0.0.1") -> Iterator[list[socket.socket]]:
    """So many connections on which this was sent, for the block; those that are one too many are left out."""
    with contextlib.ExitStack() as connections:
        made = []
        for _ in range(count):
            with contextlib.suppress(ConnectionError):
                at = ("127.0.0.1", urlsplit(edge_stack.base_url).port)
                connection = socket.create_connection(at, patient(ASKED_S), source_address=(source, 0))
                made.append(connections.enter_context(connection))
                connection.sendall(sent)
        yield made


def models(edge_stack: Stack, source: str = "127.0.0.1") -> int:
    """The status that a client of this address gets."""
    port = urlsplit(edge_stack.base_url).port
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=patient(ASKED_S), source_address=(source, 0))
    with contextlib.closing(connection):
        connection.request("GET", "/v1/models", headers=edge_stack.headers())
        return connection.getresponse().status


def answers_of(connections: list[socket.socket]) -> list[bytes]:
    """What each is told by itself, within ENDS_S of the call."""
    until = quiet_time() + ENDS_S
    answers = []
    for connection in connections:
        connection.settimeout(max(patient(until - quiet_time()), 0.01))
        try:
            answers.append(connection.recv(65_536))
        except ConnectionResetError:
            answers.append(b"")
    return answers


def test_connections_that_send_nothing_or_too_slowly_keep_nobody_from_a_router_and_end(edge_stack: Stack) -> None:
    """One client's idle ones no other client, slow headers and bodies not even those of their own address."""
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {edge_stack.api_key}\r\n"
    body = f"{head}content-length: {2 * LARGE}\r\n\r\n".encode() + b"x" * (2 * BUFFER_BYTES)  # HAProxy hands it on
    with (
        opened(edge_stack, PER_SOURCE + REFUSED_PER_SOURCE + 100, b"") as idle,
        opened(edge_stack, SLOW, head.encode(), OTHER) as heads,
        opened(edge_stack, SLOW, body, OTHER) as bodies,
    ):
        assert models(edge_stack, OTHER) == 200
        for answer in answers_of(bodies):
            assert answer.startswith(b"HTTP/1.1 408 "), answer
            assert b"application/json" in answer
        assert all(answer.startswith(b"HTTP/1.1 408 ") for answer in answers_of(heads))
        assert not any(answers_of(idle))
    assert models(edge_stack) == models(edge_stack, OTHER) == 200
