"""The HTTP edge on fake engine replicas: every request is answered once, and counted once by how it ended."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from serve_app.core.routing import outliers
from serve_app.errors import EngineFailed
from serve_app.http import body, call_maker, contract, engine_calls
from serve_app.http.keyed import answers
from serve_app.settings import AdmissionSettings
from serve_app.transport import Frame, stream
from serve_app.types import Outcome
from tests.fakes.asgi_client import BATCH_KEY, CHAT, Client, Reply, ask, cancel, running, started
from tests.fakes.engines import FakeCluster, model, run, turns, until
from tests.fakes.router import LONG, SOON_S, expected_text


def test_answers_come_whole_streamed_or_not_for_a_crowd_of_clients() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1", "r2")
        sizes = [1 + number % 19 for number in range(80)]
        asked = (client.post(ask(f"p {n}", tokens, stream=bool(n % 3))) for n, tokens in enumerate(sizes))
        replies = await asyncio.gather(*asked)
        for number, (tokens, reply) in enumerate(zip(sizes, replies, strict=True)):
            assert reply.status == 200
            assert reply.text == expected_text(f"p {number}", tokens)
            if number % 3:
                assert reply.headers["content-type"].startswith("text/event-stream")
                assert reply.body.endswith(b"data: [DONE]\n\n")
            else:
                assert reply.headers["content-length"] == str(len(reply.body))
                assert json.loads(reply.body)["id"] == reply.headers["x-serve-app-request-id"]
        assert len({reply.headers["x-serve-app-request-id"] for reply in replies}) == len(replies)
        assert client.outcomes == {Outcome.OK: 80}
        assert client.figures("serve_app_completion_tokens_total", "tenant") == {("people",): sum(sizes)}
        assert client.figures("serve_app_queue_wait_seconds_count") == {(): 80}
        assert client.at_rest()

    run(scenario, model(slots=8))


async def _ok(client: Client, cluster: FakeCluster) -> None:
    assert (await client.post(ask("p"))).status == 200


async def _bad_json(client: Client, cluster: FakeCluster) -> None:
    assert (await client.request("POST", CHAT, b"{")).status == 400


async def _unknown_model(client: Client, cluster: FakeCluster) -> None:
    reply = await client.post(ask("p", model="no"))
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")


async def _class_above(client: Client, cluster: FakeCluster) -> None:
    assert (await client.post(ask("p", priority="high"), key=BATCH_KEY)).status == 403


async def _refused_by_engine(client: Client, cluster: FakeCluster) -> None:
    reply = await client.post(ask("", stream=False))
    assert (reply.status, reply.error["param"]) == (400, "prompt")


async def _refused_by_engine_streaming(client: Client, cluster: FakeCluster) -> None:
    reply = await client.post(ask("word " * 9000))
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
    assert reply.headers["content-type"] == "application/json"


async def _too_large(client: Client, cluster: FakeCluster) -> None:
    assert (await client.post(ask("p", n=8))).status == 400  # more sequences than a replica runs


async def _past_deadline(client: Client, cluster: FakeCluster) -> None:
    task, _ = await running(client, n=4)
    reply = await client.post(ask("p"), headers={"X-Deadline-Ms": "20"})
    assert (reply.status, reply.error["code"]) == (429, "deadline")
    await cancel(task)


async def _gone_while_waiting(client: Client, cluster: FakeCluster) -> None:
    task, _ = await running(client, n=4)
    waiting = client.posting(ask("p"))
    await turns(20)
    await cancel(waiting)
    await cancel(task)


async def _gone_before_the_first_frame(client: Client, cluster: FakeCluster) -> None:
    cluster["r1"].freeze()
    task = client.posting(ask("p"))
    await until(lambda: cluster["r1"].work == 1, SOON_S, "handed in")
    await cancel(task)
    cluster["r1"].thaw()


async def _gone_while_streaming(client: Client, cluster: FakeCluster) -> None:
    task, _ = await running(client)
    await cancel(task)
    assert await until(lambda: not cluster["r1"].work, SOON_S, "aborted") < 1.0


async def _lost(client: Client, cluster: FakeCluster) -> None:
    task, reply = await running(client)
    client.model.replica_set.info = None  # no engine is known that could go on with it
    cluster.kill("r1")
    await task
    assert (reply.status, reply.events[-1]["error"]["code"]) == (200, "engine_failed")
    assert reply.body.endswith(b"data: [DONE]\n\n")
    assert "choices" in reply.events[-2]


async def _never_ran(client: Client, cluster: FakeCluster) -> None:
    await cluster.stop_engines()
    for parts_of_model in client.edge.parts.models.values():
        parts_of_model.configure(
            parts_of_model.settings, AdmissionSettings(max_wait_s=0.2), 1
        )  # bound of the wait for another engine
    reply = await client.post(ask("p"))
    assert (reply.status, reply.error["code"]) == (502, "engine_unreachable")


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (_ok, [Outcome.OK]),
        (_bad_json, [Outcome.BAD_REQUEST]),
        (_unknown_model, [Outcome.BAD_REQUEST]),
        (_class_above, [Outcome.BAD_REQUEST]),
        (_refused_by_engine, [Outcome.BAD_REQUEST]),
        (_refused_by_engine_streaming, [Outcome.BAD_REQUEST]),
        (_too_large, [Outcome.BAD_REQUEST]),
        (_past_deadline, [Outcome.REFUSED, Outcome.CANCELLED_RUNNING]),
        (_gone_while_waiting, [Outcome.CANCELLED_QUEUED, Outcome.CANCELLED_RUNNING]),
        (_gone_before_the_first_frame, [Outcome.CANCELLED_RUNNING]),
        (_gone_while_streaming, [Outcome.CANCELLED_RUNNING]),
        (_lost, [Outcome.ENGINE_FAILED]),
        (_never_ran, [Outcome.ENGINE_FAILED]),
    ],
)
def test_a_request_is_counted_once_by_how_it_ended(act: Any, expected: list[Outcome]) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        await act(client, cluster)
        assert client.outcomes == dict.fromkeys(expected, 1)
        await until(client.at_rest, SOON_S, "all given back")

    run(scenario, waits={(outliers, "FIRST_EJECTION_S"): 0.02})


def test_a_send_that_raises_ends_the_request_in_the_engine_and_is_counted_once() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")

        async def gone(reply: Reply) -> None:
            if reply.chunks:
                raise OSError("the socket is closed")

        with pytest.raises(OSError, match="socket"):
            await client.post(ask("p", LONG), reading=gone)
        assert await until(lambda: not cluster["r1"].work, SOON_S, "aborted") < 1.0
        assert sum(client.outcomes.values()) == 1
        assert client.at_rest()

    run(scenario)


@pytest.mark.parametrize("cause", ["queue_full", "timeout", "deadline"])
def test_a_refusal_tells_when_to_come_back(cause: str) -> None:
    bounds = {"queue_full": {"max_queued": 0}, "timeout": {"max_wait_s": 0.05}}.get(cause)

    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1", admission=bounds)
        task, _ = await running(client, n=4)
        reply = await client.post(ask("p"), headers={"X-Deadline-Ms": "30"} if cause == "deadline" else {})
        assert (reply.status, reply.error["code"]) == (429, cause)
        assert int(reply.headers["retry-after"]) >= 1
        assert 0 < int(reply.headers["retry-after-ms"]) <= 1000 * int(reply.headers["retry-after"])
        assert client.outcomes == {Outcome.REFUSED: 1}
        await cancel(task)

    run(scenario)


@pytest.mark.parametrize("stream", [True, False])
def test_a_replica_lost_before_the_first_frame_is_not_seen_by_the_client(stream: bool) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1", "r2")
        for name in ("r1", "r2"):
            cluster[name].freeze()
        tasks = [client.posting(ask(f"p {n}", stream=stream)) for n in range(6)]
        await until(lambda: cluster["r1"].work == cluster["r2"].work == 3, SOON_S, "three on each")
        cluster.kill("r1")
        cluster["r2"].thaw()
        replies = await asyncio.gather(*tasks)
        assert [reply.text for reply in replies] == [expected_text(f"p {n}", 5) for n in range(6)]
        assert len(cluster.submits) == 9
        assert client.outcomes == {Outcome.OK: 6}

    run(scenario)


@pytest.mark.parametrize("headers", [{}, {"Idempotency-Key": "one"}])
def test_an_answer_that_is_not_streamed_runs_elsewhere_whenever_its_engine_is_lost(
    headers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1", "r2")
        halves: list[str] = []

        def in_parts(name: str) -> Any:
            """The first replica that is asked leaves with a part of the answer on its way."""
            made = cluster[name].engine.backend.run

            async def run_(submit: Any) -> Any:
                async for piece in made(submit):
                    if halves:
                        yield piece
                        continue
                    halves.append(name)
                    yield Frame(piece.number, piece.body[:9], 200, "json", piece.groups)
                    asyncio.get_running_loop().call_later(0.02, cluster.kill, name)  # for the part to arrive
                    await asyncio.Event().wait()

            return run_

        for name in ("r1", "r2"):
            monkeypatch.setattr(cluster[name].engine.backend, "run", in_parts(name))
        reply = await client.post(ask("p", 30, stream=False), headers=headers)
        assert (reply.status, reply.text) == (200, expected_text("p", 30))
        assert len(cluster.submits) == 2
        assert client.outcomes == {Outcome.OK: 1}
        assert client.figures("serve_app_completion_tokens_total", "tenant") == {("people",): 30}
        assert client.figures("serve_app_time_to_first_token_seconds_count") == {(): 1}
        assert client.at_rest()

    run(scenario)


def test_a_client_that_does_not_read_stops_nobody_and_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MAX_BUFFERED_BYTES", 20_000)

    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        reads = asyncio.Event()

        async def wait(reply: Reply) -> None:
            await reads.wait()

        slow = client.posting(ask("slow", LONG, n=4), reading=wait)  # all the slots there are
        await until(lambda: cluster["r1"].work == 4, SOON_S, "it runs")
        quick = await asyncio.wait_for(client.post(ask("quick", 50)), SOON_S)
        assert quick.text == expected_text("quick", 50)
        assert cluster["r1"].work == 0  # the cut request was aborted, or `quick` had waited for it
        reads.set()
        reply = await slow
        assert reply.events[-1]["error"]["code"] == "slow_client"
        assert 20_000 < len(reply.body) < 30_000
        assert sum(client.outcomes.values()) == 2

    run(scenario)


def test_many_clients_that_do_not_read_hold_no_more_than_the_router_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        unread = client.model.unread
        monkeypatch.setattr(unread, "_max_bytes", 50_000)
        reads = asyncio.Event()

        async def wait(reply: Reply) -> None:
            await reads.wait()

        most = 0
        slow = [client.posting(ask(f"slow {n}", LONG), reading=wait) for n in range(8)]

        def bounded() -> bool:
            nonlocal most
            most = max(most, unread.bytes)
            return unread.ended_requests >= 8

        await until(bounded, SOON_S, "all of them have ended")
        assert most <= 50_000
        quick = await asyncio.wait_for(client.post(ask("quick", 50)), SOON_S)
        assert quick.text == expected_text("quick", 50)
        reads.set()
        for reply in await asyncio.gather(*slow):
            assert reply.events[-1]["error"]["code"] == "slow_client"
        assert unread.bytes == 0
        assert client.at_rest()
        assert (await client.get("/metrics")).body.count(b'serve_app_slow_clients_total{router="router"} 8.0') == 1

    run(scenario, model(slots=9))


@pytest.mark.parametrize("stream", [True, False])
def test_a_repeat_under_one_idempotency_key_gets_the_same_bytes_and_runs_nothing(stream: bool) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        repeated = {"Idempotency-Key": "one"}
        both = [client.posting(ask("p", 30, stream=stream), headers=repeated) for _ in range(3)]
        replies = [*(await asyncio.gather(*both)), await client.post(ask("p", 30, stream=stream), headers=repeated)]
        assert {reply.body for reply in replies} == {replies[0].body}
        assert [reply.headers.get("x-idempotent-replay") for reply in replies] == [None, "true", "true", "true"]
        assert len(cluster.submits) == 1
        other = await client.post(ask("q"), headers=repeated)
        assert (other.status, other.error["code"]) == (400, "idempotency_key_reused")
        assert (await client.post(ask("p", 30), headers=repeated, key=BATCH_KEY)).status == 200  # another tenant's key
        assert len(cluster.submits) == 2
        assert client.outcomes == {Outcome.OK: 5, Outcome.BAD_REQUEST: 1}

    run(scenario)


@pytest.mark.parametrize("stream", [True, False])
def test_a_repeat_of_an_answer_too_long_to_keep_is_refused_and_runs_nothing(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        monkeypatch.setattr(answers, "MAX_ANSWER_BYTES", 100)
        repeated = {"Idempotency-Key": "one"}
        whole = await client.post(ask("p", 30, stream=stream), headers=repeated)
        assert whole.text == expected_text("p", 30)
        reply = await client.post(ask("p", 30, stream=stream), headers=repeated)
        assert (reply.status, reply.error["code"]) == (409, "idempotency_answer_not_kept")
        assert reply.headers["x-should-retry"] == "false"
        assert len(cluster.submits) == 1

    run(scenario)


def test_a_run_that_did_not_end_well_is_not_repeated_but_run_again() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1", "r2")
        repeated = {"Idempotency-Key": "one"}
        reply = Reply()
        first = client.posting(ask("p", LONG), headers=repeated, reply=reply)
        await until(lambda: bool(reply.chunks), SOON_S, "first frames")
        joined = Reply()
        second = client.posting(ask("p", LONG), headers=repeated, reply=joined)
        await until(lambda: bool(joined.chunks), SOON_S, "the repeat has joined")
        client.model.replica_set.info = None  # no engine is known that could go on
        cluster.kill(cluster.submits[0])
        await asyncio.gather(first, second)
        assert reply.events[-1]["error"]["code"] == "engine_failed"
        assert joined.body == reply.body  # it has got a part of this run: no other one can go on with it
        third = client.posting(ask("p", LONG), headers=repeated)
        await until(lambda: len(cluster.submits) == 2, SOON_S, "the third one runs")
        await cancel(third)
        await until(lambda: sum(client.outcomes.values()) == 3, SOON_S, "its run is aborted")
        assert client.outcomes == {Outcome.ENGINE_FAILED: 2, Outcome.CANCELLED_RUNNING: 1}

    run(scenario)


@pytest.mark.parametrize("words", [3, 50_000])
def test_a_large_body_is_looked_at_beside_the_event_loop(words: int, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: dict[str, int] = {}

    def noted(module: Any, name: str) -> None:
        real = getattr(module, name)

        def note(*arguments: Any, **named: Any) -> Any:
            looked[name] = threading.get_ident()
            return real(*arguments, **named)

        monkeypatch.setattr(module, name, note)

    noted(body, "decode")
    noted(engine_calls, "fingerprint")
    noted(contract, "split")
    noted(call_maker, "split_body")

    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        reply = await client.post(ask("p", ignored=["word"] * words), headers={"Idempotency-Key": "one"})
        assert (reply.status, reply.text) == (200, expected_text("p", 5))
        small = words < 1000
        assert {ident == threading.get_ident() for ident in looked.values()} == {small}
        assert len(looked) == 4

    run(scenario)


def test_without_a_valid_key_nothing_is_answered() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        for key in (None, "sk-wrong-0123456789"):
            for method, path in (("POST", CHAT), ("GET", "/health"), ("GET", "/metrics"), ("GET", "/nowhere")):
                reply = await client.request(method, path, key=key)
                assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
        assert not cluster.submits

    run(scenario)


def test_the_lifespan_and_a_websocket_are_answered() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await Client(cluster).start()
        sent: list[str] = []
        asked = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])

        async def receive() -> Any:
            return next(asked)

        async def send(message: Any) -> None:
            sent.append(message["type"])

        await client.edge({"type": "lifespan"}, receive, send)
        await client.edge({"type": "websocket"}, receive, send)
        assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete", "websocket.close"]

    run(scenario)


def test_an_engine_failure_with_a_wait_of_its_own_passes_it_on() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")

        async def submit(*_: Any, **__: Any) -> None:
            raise EngineFailed("no KV left", retry_after_s=2.5)

        cluster["r1"].engine.server.run = submit
        reply = await client.post(ask("p"))
        assert (reply.status, reply.headers["retry-after"], reply.headers["retry-after-ms"]) == (502, "3", "2500")

    run(scenario, waits={(outliers, "FIRST_EJECTION_S"): 0.02})
