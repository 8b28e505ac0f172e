"""The Python client on the real edge and fake engines: typed answers, streams, errors, with and without `await`."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk

import serve_app
from serve_app.client.client import Client
from serve_app.errors import BadRequest, EngineFailed, NotFound, Overloaded, Unauthorized
from serve_app.http.asgi_bridge import AsgiBridge
from serve_app.types import Outcome
from tests.fakes import asgi_client
from tests.fakes.asgi_client import KEY
from tests.fakes.engines import MODEL, FakeCluster, model, until
from tests.fakes.handle_calls import client_of, home, run
from tests.fakes.router import LONG, SOON_S, expected_text
from tests.waiting import patient

HELLO = [{"role": "user", "content": "Hi"}]
JOIN_S = 10.0  # of threads that have nothing left to do


async def started(cluster: FakeCluster, key: str = KEY) -> tuple[Client, asgi_client.Client]:
    """A client whose calls run in this loop, and the router it calls."""
    await cluster.add("r1")
    router = await asgi_client.Client(cluster).start()
    return client_of(AsgiBridge(router.edge), key, asyncio.get_running_loop()), router


async def gone(router: asgi_client.Client, outcome: Outcome, count: int = 1) -> None:
    await until(router.at_rest, SOON_S, "nothing waits, nothing is granted")
    await until(lambda: router.outcomes.get(outcome) == count, SOON_S, f"{count} ended as {outcome}")


def test_connect_is_the_package_s_own_name() -> None:
    assert serve_app.connect.__module__ == "serve_app.client.connection"
    with pytest.raises(AttributeError, match="disconnect"):
        serve_app.disconnect  # noqa: B018 - it is the look-up that raises


def test_importing_the_package_brings_nothing_with_it() -> None:
    program = "import serve_app, sys; print(sorted({'ray', 'openai', 'pydantic', 'vllm'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


def test_a_session_s_calls_take_neither_another_session_nor_another_model() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        llm, _ = await started(cluster)
        session = llm.session("agent", kv_tokens=64)
        for name in ("session", "model"):
            with pytest.raises(TypeError, match=f"{name} cannot be given here"):
                await session.chat(HELLO, **{name: "other"})
            with pytest.raises(TypeError, match=f"{name} cannot be given here"):
                session.stream(HELLO, **{name: "other"})

    run(scenario)


def test_answers_are_of_the_openai_package_s_types() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        llm, router = await started(cluster)
        chat = await llm.chat(HELLO, max_tokens=5)
        assert type(chat) is ChatCompletion
        assert chat.usage is not None
        assert chat.usage.completion_tokens == 5
        completion = await llm.complete("p", max_tokens=5)
        assert type(completion) is Completion
        assert completion.choices[0].text == expected_text("p", 5)
        chunks = [chunk async for chunk in llm.stream(HELLO, max_tokens=5)]
        assert {type(chunk) for chunk in chunks} == {ChatCompletionChunk}
        reported = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert reported == chat.choices[0].message.content
        pieces = [piece.choices[0].text async for piece in llm.stream_complete("p", max_tokens=5)]
        assert "".join(pieces) == expected_text("p", 5)
        assert [one.id for one in await llm.models()] == [MODEL]
        assert router.outcomes == {Outcome.OK: 4}

    run(scenario)


def test_embeddings_are_of_the_openai_package_s_type() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        llm, _ = await started(cluster)
        answer = await llm.embed(["a", "b"])
        assert type(answer) is CreateEmbeddingResponse
        assert [one.index for one in answer.data] == [0, 1]
        assert all(isinstance(number, float) for number in answer.data[0].embedding)
        packed = await llm.embed("a", encoding_format="base64")
        assert isinstance(packed.data[0].embedding, str), "as it came, where OpenAI's type has no room for it"

    run(scenario, model(task="embed"))


def test_errors_are_those_of_the_edge() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        llm, router = await started(cluster)
        with pytest.raises(NotFound) as unknown:
            await llm.chat(HELLO, model="nobody")
        assert unknown.value.code == "model_not_found"
        with pytest.raises(BadRequest, match="did you mean `max_tokens`"):
            await llm.chat(HELLO, max_token=5)  # type: ignore[call-arg]
        with pytest.raises(BadRequest) as wrong:
            await anext(llm.stream(HELLO, max_tokens="many"))  # type: ignore[typeddict-item]
        assert wrong.value.param == "max_tokens"
        async with llm.stream_complete("fills it", n=4, max_tokens=LONG) as filling:
            await anext(filling)
            with pytest.raises(Overloaded) as late:
                await llm.complete("p", deadline_s=0.05)
        assert late.value.code == "deadline"
        assert late.value.retry_after_s is not None
        stranger, _ = await started(cluster, "sk-of-nobody-0123456789")
        with pytest.raises(Unauthorized):
            await stranger.models()
        await gone(router, Outcome.REFUSED)

    run(scenario)


def test_an_engine_lost_in_mid_stream_raises_after_what_was_reported() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        llm, router = await started(cluster)
        reported: list[str] = []

        async def read() -> None:
            async for piece in llm.stream_complete("long", max_tokens=LONG):
                reported.append(piece.choices[0].text)
                if len(reported) == 3:
                    router.model.replica_set.info = None  # no engine is known that could go on
                    cluster.kill("r1")

        with pytest.raises(EngineFailed):
            await read()
        assert "".join(reported) == expected_text("long", len(reported))
        await gone(router, Outcome.ENGINE_FAILED)

    run(scenario, model(step_s=0.005))


async def _break(llm: Client) -> None:
    async for _ in llm.stream_complete("long", max_tokens=LONG):
        break


async def _break_and_keep(llm: Client) -> Any:
    stream = llm.stream_complete("long", max_tokens=LONG)
    async for _ in stream:
        break
    await asyncio.sleep(0)
    assert [chunk async for chunk in stream] == []
    return stream


async def _close_twice(llm: Client) -> None:
    stream = llm.stream_complete("long", max_tokens=LONG)
    await anext(stream)
    await stream.aclose()
    await stream.aclose()


async def _leave_the_block(llm: Client) -> None:
    async with llm.stream_complete("long", max_tokens=LONG) as stream:
        await anext(stream)


async def _drop(llm: Client) -> None:
    await anext(llm.stream_complete("long", max_tokens=LONG))


async def _cancel(llm: Client) -> None:
    call = asyncio.create_task(llm.complete("long", max_tokens=LONG))
    await asyncio.sleep(patient(0.05))  # it runs by then; if not, it is cancelled in the line, and the test says so
    call.cancel()
    await asyncio.wait({call})


@pytest.mark.parametrize("leave", [_break, _break_and_keep, _close_twice, _leave_the_block, _drop, _cancel])
def test_leaving_ends_the_request(leave: Callable[[Client], Any]) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        llm, router = await started(cluster)
        kept = await leave(llm)
        await gone(router, Outcome.CANCELLED_RUNNING)
        del kept

    run(scenario)


def test_a_stream_that_is_never_read_is_never_sent() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        llm, _ = await started(cluster)
        async with llm.stream(HELLO):
            pass
        assert cluster.submits == []

    run(scenario)


def test_the_only_model_is_asked_for_once_and_again_when_it_has_gone() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        llm, router = await started(cluster)
        asked: list[str] = []
        edge = router.edge

        async def watching(scope: Any, receive: Any, send: Any) -> None:
            asked.append(scope["path"])
            await edge(scope, receive, send)

        llm = client_of(AsgiBridge(watching), KEY, asyncio.get_running_loop())
        for _ in range(2):
            await llm.complete("p", max_tokens=1)
        assert asked.count("/v1/models") == 1
        llm.only_model_name = "one that has left"
        with pytest.raises(NotFound):
            await llm.complete("p", max_tokens=1)
        await llm.complete("p", max_tokens=1)
        assert asked.count("/v1/models") == 2
        named = client_of(AsgiBridge(watching), KEY, asyncio.get_running_loop(), model=MODEL)
        await named.complete("p", max_tokens=1)
        assert asked.count("/v1/models") == 2

    run(scenario)


def test_sync_calls_from_threads_while_the_loop_runs() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        llm, router = await started(cluster)

        def thread() -> list[str]:
            whole = llm.sync.complete("p", max_tokens=5).choices[0].text
            pieces = [piece.choices[0].text for piece in llm.sync.stream_complete("p", max_tokens=5)]
            chat = llm.sync.chat(HELLO, max_tokens=5).choices[0].message.content
            streamed = [chunk.choices[0].delta.content or "" for chunk in llm.sync.stream(HELLO, max_tokens=5)]
            assert chat == "".join(streamed)
            assert [one.id for one in llm.sync.models()] == [MODEL]
            return [whole, "".join(pieces)]

        reported = await asyncio.gather(*(asyncio.to_thread(thread) for _ in range(4)))
        assert reported == [[expected_text("p", 5)] * 2] * 4
        with pytest.raises(RuntimeError, match="use `await`"):
            llm.sync.complete("p")
        with pytest.raises(RuntimeError, match="use `await`"):
            next(llm.sync.stream(HELLO))
        assert router.outcomes == {Outcome.OK: 16}

    run(scenario)


def test_leaving_a_sync_stream_ends_the_request() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        llm, router = await started(cluster)

        def leave() -> None:
            for _ in llm.sync.stream_complete("long", max_tokens=LONG):
                break
            with llm.sync.stream_complete("long", max_tokens=LONG) as stream:
                next(stream)
            with pytest.raises(StopIteration):
                next(stream)
            dropped = iter(llm.sync.stream_complete("long", max_tokens=LONG))
            next(dropped)

        await asyncio.to_thread(leave)
        await gone(router, Outcome.CANCELLED_RUNNING, 3)

    run(scenario)


def test_a_sync_stream_that_another_thread_closes_ends() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        llm, router = await started(cluster)
        stream = llm.sync.stream_complete("fills it", n=4, max_tokens=LONG)
        waits = llm.sync.stream_complete("waits in the line", max_tokens=LONG)
        chunks: list[Completion] = []

        def read() -> None:
            for chunk in stream:
                chunks.append(chunk)

        reading = asyncio.create_task(asyncio.to_thread(read))
        await until(lambda: bool(chunks), SOON_S, "first chunks")
        cluster["r1"].freeze()  # on a busy machine it would end before the other is closed
        queued = asyncio.create_task(asyncio.to_thread(list, waits))
        await until(lambda: router.model.queue.waiting == 1, SOON_S, "in the line")
        waits.close()
        assert await queued == []
        stream.close()
        await reading
        assert {type(chunk) for chunk in chunks} == {Completion}
        await gone(router, Outcome.CANCELLED_RUNNING)
        await gone(router, Outcome.CANCELLED_QUEUED)

    run(scenario)


def test_calls_from_another_loop_than_the_home_loop() -> None:
    """As in a script: the calls run in a thread of their own, and each `asyncio.run` has its own loop."""

    async def serve(cluster: FakeCluster) -> None:
        llm, router = await started(cluster)

        async def elsewhere() -> str:
            async for _ in llm.stream_complete("long", max_tokens=LONG):
                break
            texts = [piece.choices[0].text async for piece in llm.stream_complete("p", max_tokens=50)]
            return "".join(texts)

        reported: list[str] = []
        thread = threading.Thread(target=lambda: reported.extend(asyncio.run(elsewhere()) for _ in range(2)))
        thread.start()
        await asyncio.to_thread(thread.join, JOIN_S)
        assert reported == [expected_text("p", 50)] * 2
        await gone(router, Outcome.CANCELLED_RUNNING, 2)

    run(serve)


def test_closing_leaves_the_cluster_once_whatever_happens() -> None:
    left: list[int] = []

    def broken() -> Any:
        raise RuntimeError("Ray is gone")

    leaving = contextlib.ExitStack()
    leaving.callback(left.append, 1)
    llm = Client(broken, KEY, leaving)
    with pytest.raises(RuntimeError, match="gone"):
        llm.sync.models()
    llm.close()
    llm.close()
    assert left == [1]


def test_a_client_neither_travels_nor_shows_its_key() -> None:
    with home() as loop:
        llm = client_of(AsgiBridge(lambda *_: None), "sk-secret-0123456789", loop)  # type: ignore[arg-type,return-value]
        with pytest.raises(TypeError, match="connect"):
            pickle.dumps(llm)
        assert "secret" not in repr(llm) + repr(vars(llm))
        with llm:
            pass
        with pytest.raises(RuntimeError, match="closed"):
            llm.sync.models()
