"""What clients see when HAProxy, its manager or a router dies, and how clients are bounded: HAProxy itself, Serve's own
template, our wrapper."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve_app.system import haproxy
from tests.requires import requires
from tests.system.real_haproxy import WITHIN_S, Edge, Router, edge, routers
from tests.waiting import wait_until

requires("linux")

SOON = 1  # of the bounds in time, in seconds: this much is waited for
# A connection that a process has not accepted yet when it leaves the port may be reset; four clients ask at a time.
RESET = 4
OPENAI = {"message", "type", "param", "code"}


@pytest.fixture
def two() -> Iterator[list[Router]]:
    with routers("a", "b") as running:
        yield running


@pytest.fixture
def front(tmp_path: Path) -> Iterator[Edge]:
    with edge(tmp_path) as edge_process:
        yield edge_process


def test_while_no_application_is_known_the_answer_is_503_and_a_repeat_is_asked_for(front: Edge) -> None:
    front.start(app=False)
    status, headers, body = front.ask("/v1/models")
    assert (status, headers["retry-after"], headers["content-type"]) == (503, "1", "application/json")
    assert body["error"].keys() == OPENAI
    assert body["error"]["code"] == "no_router"


PAGE = {"Origin": "https://chat.example"}
PREFLIGHT = {
    **PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


def test_a_web_page_can_read_that_no_router_takes_its_request(front: Edge) -> None:
    front.start(app=False)
    status, headers, _ = front.ask("/v1/models", method="OPTIONS", **PREFLIGHT)
    assert (status, headers["access-control-allow-origin"], headers["access-control-max-age"]) == (200, "*", "0")
    assert headers["access-control-allow-headers"].split(", ") == ["authorization", "*"]  # `*` alone leaves it out
    assert "POST" in headers["access-control-allow-methods"]
    status, headers, body = front.ask("/v1/models", **PAGE)
    assert (status, headers["access-control-allow-origin"], body["error"]["code"]) == (503, "*", "no_router")
    assert "retry-after" in headers["access-control-expose-headers"]
    assert front.ask("/v1/models", method="OPTIONS")[0] == 503  # no browser's


def test_whether_a_web_page_may_call_is_the_router_s_to_say(front: Edge, two: list[Router]) -> None:
    front.start(*two)
    status, headers, _ = front.ask("/v1/models", method="OPTIONS", **PREFLIGHT)
    assert status == 200
    assert not [name for name in headers if name.lower().startswith("access-control")]


def test_a_router_set_that_is_empty_is_503_as_well(front: Edge, two: list[Router]) -> None:
    first = front.start(*two)
    front.start(reload=first)
    assert front.ask()[0] == 503


def test_a_new_manager_takes_the_port_over_when_it_knows_a_router_and_not_before(
    front: Edge, two: list[Router]
) -> None:
    """The manager has died; its HAProxy lives, in a session of its own."""
    orphan = front.start(*two)
    assert os.getsid(orphan.pid) == orphan.pid
    with front.asking() as statuses:
        empty = front.start(app=False)
        assert front.front() == orphan.pid
        knowing = front.start(*two, reload=empty)
        assert front.front() == knowing.pid
        orphan.wait(WITHIN_S)
        again = front.start(*two, reload=knowing)
        knowing.wait(WITHIN_S)
        assert front.front() == again.pid
    assert set(statuses) <= {0, 200}
    assert statuses.count(0) <= RESET


def test_a_dead_haproxy_is_stood_in_for_until_serve_has_its_own(front: Edge, two: list[Router]) -> None:
    first = front.start(*two)
    front.stand_in.check()
    assert front.front() == first.pid
    first.kill()
    first.wait()
    assert front.ask()[0] == 0
    front.stand_in.check()
    stands = front.front()
    wait_until(lambda: front.ask()[0] == 200, WITHIN_S, "the stand-in answers")
    # Serve must not take it for its own: it would never replace what died
    with pytest.raises(ConnectionRefusedError), socket.socket(socket.AF_UNIX) as admin:
        admin.connect(front.config.socket_path)
    front.stand_in.check()
    assert front.front() == stands
    with front.asking() as statuses:
        empty = front.start(app=False)
        own = front.start(*two, reload=empty)
        assert front.front() == own.pid
        wait_until(lambda: not lives(front, stands), WITHIN_S, "the stand-in has ended")
    assert set(statuses) <= {0, 200}
    assert statuses.count(0) <= RESET


def lives(front: Edge, pid: int) -> bool:
    """Whether the process lives; the keeper's look reaps it."""
    front.stand_in.check()
    return Path(f"/proc/{pid}/cmdline").exists()


def test_a_killed_stand_in_is_followed_by_another(front: Edge, two: list[Router]) -> None:
    first = front.start(*two)
    first.kill()
    first.wait()
    front.stand_in.check()
    os.kill(front.front(), signal.SIGKILL)
    wait_until(lambda: (front.stand_in.check(), front.ask()[0])[1] == 200, WITHIN_S, "another answers")


def test_a_stand_in_ends_where_serve_puts_none_of_its_own_and_no_other_follows(
    front: Edge, two: list[Router], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(haproxy, "FALLBACK_S", 0.0)
    first = front.start(*two)
    first.kill()
    first.wait()
    front.stand_in.check()
    stands = front.front()
    wait_until(lambda: front.ask()[0] == 200, WITHIN_S, "the stand-in answers")
    wait_until(lambda: not lives(front, stands), WITHIN_S, "the stand-in has ended")
    front.stand_in.check()
    assert front.front() == stands  # no other
    assert front.ask()[0] == 0


def test_a_stand_in_that_was_replaced_ends_its_streams_in_its_own_time(
    front: Edge, two: list[Router], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(haproxy, "FALLBACK_S", 0.0)
    first = front.start(*two)
    first.kill()
    first.wait()
    front.stand_in.check()
    stands = front.front()
    wait_until(lambda: front.ask()[0] == 200, WITHIN_S, "the stand-in answers")
    own = front.start(*two, reload=front.start(app=False))
    front.stand_in.check()
    assert front.front() == own.pid != stands
    assert (front.folder / haproxy.LAST).exists()


def test_a_node_that_drains_is_not_stood_in_for(front: Edge, two: list[Router]) -> None:
    first = front.start(*two)
    front.config.pass_health_checks = False
    drained = front.start(*two, reload=first)
    drained.kill()
    drained.wait()
    front.stand_in.check()
    assert front.front() == drained.pid


@pytest.mark.parametrize("size", [10, 50_000])
def test_a_request_whose_router_dies_before_its_answer_runs_on_another(
    front: Edge, two: list[Router], size: int
) -> None:
    front.start(*two)
    connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=WITHIN_S)
    for _ in range(4):  # a connection that was used before is no exception
        before = len(two[0].seen) + len(two[1].seen)
        assert front.asked(connection, "/", b"x" * size)[0] == 200
        two[0].lost.clear()
        two[1].lost.set()
        status, _, body = front.asked(connection, "/lost", b"x" * size)
        if status == 200:
            assert body == {"router": "b", "bytes": size}
        assert status == 200
        assert len(two[0].seen) + len(two[1].seen) - before in (2, 3)
    connection.close()


@pytest.mark.parametrize("used_before", [False, True])
@pytest.mark.parametrize(
    ("path", "size"),
    [("/lost", 10), ("/lost", 200_000), ("/lost", 5_000_000), ("/v1/sessions/lost", 10), ("/v1/batches/lost", 10)],
)
def test_where_it_cannot_be_repeated_the_client_learns_that_the_router_is_lost(
    front: Edge, two: list[Router], used_before: bool, path: str, size: int
) -> None:
    """Both routers die under it, the body is too large to be kept, it opens a session, or it makes a batch."""
    front.start(*two)
    connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=WITHIN_S)
    for _ in range(3 if used_before else 0):
        assert front.asked(connection, "/", b"x")[0] == 200
    status, headers, body = front.asked(connection, path, b"x" * size)
    connection.close()
    assert (status, headers["content-type"], headers["retry-after"]) == (502, "application/json", "1")
    assert body["error"]["code"] == "router_lost"
    asked = two[0].seen + two[1].seen
    assert asked.count(path) == (2 if size == 10 and path == "/lost" else 1)


@pytest.mark.parametrize(
    ("content_type", "status", "code"),
    [("text/plain;charset=utf-8", 502, "router_lost"), ("application/json", 500, "its own")],
)
def test_a_router_that_dies_under_serves_own_proxy_is_a_lost_router_and_a_routers_own_failure_is_its_own(
    front: Edge, two: list[Router], content_type: str, status: int, code: str
) -> None:
    front.start(*two)
    reported, _, body = front.ask(f"/500?{content_type}")
    assert (reported, body["error"]["code"]) == (status, code)


def test_one_source_cannot_take_all_connections(tmp_path: Path, two: list[Router]) -> None:
    request = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
    with edge(tmp_path, haproxy.Sources(10, ("127.0.0.2/32",))) as front:
        front.start(*two)
        full = [front.raw(b"") for _ in range(10)]
        reported = [front.raw(b"") for _ in range(haproxy.REFUSED_PER_SOURCE)]
        with contextlib.suppress(ConnectionResetError), front.raw(b"") as closed:  # at once, or after a moment
            assert closed.recv(1) == b""
        reported[-1].sendall(request)
        answer = reported[-1].recv(65_536)
        assert answer.startswith(b"HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\n")
        assert b'"code": "too_many_connections"' in answer
        full[-1].sendall(request)
        assert full[-1].recv(65_536).startswith(b"HTTP/1.1 200")
        for connection in (*reported, full[0]):
            connection.close()
        wait_until(lambda: front.ask()[0] == 200, WITHIN_S, "there is room again")
        trusted = [front.raw(request, "127.0.0.2") for _ in range(12 + haproxy.REFUSED_PER_SOURCE)]
        assert trusted[-1].recv(65_536).startswith(b"HTTP/1.1 200")
        for connection in itertools.chain(trusted, full):
            connection.close()


@pytest.mark.parametrize("path", ["/console/session", "//console/%73ession/"])
def test_one_source_cannot_guess_keys_by_thousands_and_others_log_in(
    tmp_path: Path, two: list[Router], path: str
) -> None:
    request = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n".encode()

    def status(front: Edge, source: str, sent: bytes = request) -> int:
        with front.raw(sent, source) as connection:
            return int(connection.recv(65_536).split()[1])

    with edge(tmp_path, haproxy.Sources(trusted=("127.0.0.3/32",))) as front:
        front.start(*two)
        answers = [status(front, "127.0.0.2") for _ in range(haproxy.LOGINS + 1)]
        assert answers == [200] * haproxy.LOGINS + [429]
        assert status(front, "127.0.0.1") == 200
        assert status(front, "127.0.0.2", b"GET /console/session HTTP/1.1\r\nhost: x\r\n\r\n") == 200
        trusted = [status(front, "127.0.0.3") for _ in range(haproxy.LOGINS + 1)]
        assert set(trusted) == {200}, "a proxy, with many people behind it"


def test_a_connection_has_one_request_at_a_time_as_http_2_is_not_spoken(front: Edge, two: list[Router]) -> None:
    """By prior knowledge it would have a hundred on each connection that a source may have."""
    front.start(*two)
    with front.raw(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))) as connection:
        answer = b"".join(iter(lambda: connection.recv(65_536), b""))
    assert answer.startswith(b"HTTP/1.1 400 ")


def test_a_client_that_closes_its_side_before_its_answer_is_notified(front: Edge, two: list[Router]) -> None:
    """It cannot be told from one that is gone, whose run has to end."""
    front.start(*two)
    for head in (b"GET /late HTTP/1.1\r\n", b"POST /late HTTP/1.1\r\ncontent-length: 0\r\n"):
        with front.raw(head + b"host: x\r\n\r\n") as connection:
            connection.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(lambda: connection.recv(65_536), b""))
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"closed for sending before the answer" in answer


@pytest.mark.parametrize("path", ["/-/routes", "/-/ROUTES", "/%2D/routes", "/-/routes?x=1"])
def test_serve_s_list_of_routes_is_closed(front: Edge, two: list[Router], path: str) -> None:
    front.start(*two)
    status, _, body = front.ask(path)
    assert (status, body["error"]["code"]) == (404, "not_found")


def test_slow_headers_and_bodies_end_in_time_and_quiet_answers_do_not(
    tmp_path: Path, two: list[Router], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(haproxy, "REQUEST_S", SOON)
    monkeypatch.setattr(haproxy, "CLIENT_S", SOON)
    with edge(tmp_path) as front:
        front.start(*two)
        idle = front.raw(b"")
        headers = front.raw(b"GET / HTTP/1.1\r\nho")
        body = front.raw(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\nabc")
        large = front.raw(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 900000\r\n\r\n" + b"a" * 100_000)
        nonsense = front.raw(b"nonsense\r\n\r\n")
        quiet = front.raw(b"GET /quiet HTTP/1.1\r\nhost: x\r\n\r\n")
        assert idle.recv(65_536) == b""
        # a head that is none or never whole gets a page of HAProxy's own, for which 2.8 takes no file
        assert headers.recv(65_536).startswith(b"HTTP/1.1 408 ")
        assert nonsense.recv(65_536).startswith(b"HTTP/1.1 400 ")
        assert body.recv(65_536).startswith(b"HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\n")
        answer = large.recv(65_536)
        assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n")
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            part = quiet.recv(65_536)
            assert part, f"cut after {received!r}"
            received += part
        for connection in (idle, headers, body, large, nonsense, quiet):
            connection.close()
