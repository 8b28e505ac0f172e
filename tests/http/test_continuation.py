"""A stream that loses its replica goes on on another one: its client gets the bytes of an undisturbed stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from serve_app.core.routing import outliers
from serve_app.errors import EngineFailed
from serve_app.http.asgi_bridge import AsgiBridge
from serve_app.http.python_calls import CallKind, make_request, read_events
from serve_app.router import model_router
from serve_app.transport import NOT_CONTINUABLE
from serve_app.types import Outcome
from tests.fakes.asgi_client import CHAT, COMPLETIONS, KEY, Client, Reply, ask, running, started
from tests.fakes.engines import MODEL, FakeCluster, model, run, until
from tests.fakes.router import LONG, SOON_S, expected_text
from tests.fakes.scripted_stream import PROMPT, SCRIPT, TOKENS, WHOLE, ScriptedEngines, dies

RESPONSES = "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: ask("p"),
    CHAT: {"model": MODEL, "messages": [{"role": "user", "content": "p"}], "stream": True},
    RESPONSES: {"model": MODEL, "input": "p", "stream": True},
}
QUICK = {(outliers, "FIRST_EJECTION_S"): 0.01, (model_router, "RETRY_PAUSE_S"): 0.001}


async def scripted(
    cluster: FakeCluster, lose: Callable[[str], None] | None = None, **settings: Any
) -> tuple[Client, ScriptedEngines]:
    """A router on two scripted engines; without `lose`, the connection of one that is lost breaks."""
    client = await started(cluster, "r1", "r2", **settings)
    await until(lambda: client.model.replica_set.info is not None, SOON_S, "the engines' limits")
    engines = ScriptedEngines(cluster, lose or cluster.break_channels)
    engines.install(cluster.replicas)
    return client, engines


def story(client: Client, reply: Reply) -> Any:
    found = client.edge.parts.receipts.find(reply.headers["x-serve-app-request-id"], None)
    assert found is not None
    return found


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES])
@pytest.mark.parametrize("loss", [dies, None], ids=["dies", "breaks"])
def test_cut_at_any_message_the_client_gets_the_bytes_of_an_undisturbed_stream(path: str, loss: Any) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client, engines = await scripted(cluster, loss)
        for border in range(len(SCRIPT)):
            engines.cuts = [border]
            engines.submits = []
            reply = await client.post(BODIES[path], path=path)
            assert (reply.status, reply.body) == (200, WHOLE), border
            first, second = engines.submits
            assert (first.groups, first.events, first.cached_tokens) == ([], 0, 0)
            assert bool(second.events) is bool(border)
            assert second.cached_tokens == (PROMPT.cached_tokens if border else 0)
            assert second.created == first.created > 0 or not border
        assert client.outcomes == {Outcome.OK: len(SCRIPT)}
        assert client.figures("serve_app_migrations_total", "model") == {(MODEL,): len(SCRIPT) - 1.0}
        assert client.figures("serve_app_retries_total", "priority") == {("normal",): len(SCRIPT)}
        assert client.figures("serve_app_migration_gap_seconds_count", "model") == {(MODEL,): len(SCRIPT) - 1.0}
        assert client.figures("serve_app_not_continuable_total", "reason") == {}
        assert client.figures("serve_app_completion_tokens_total", "model") == {(MODEL,): len(SCRIPT) * TOKENS}
        await until(client.at_rest, SOON_S, "all given back")

    run(scenario, waits=QUICK)


def test_cut_twice_it_continues_twice_and_its_receipt_says_where() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client, engines = await scripted(cluster)
        for first in range(1, len(SCRIPT)):
            for second in range(first, len(SCRIPT)):
                engines.cuts = [first, second]
                engines.places = []
                reply = await client.post(ask("p"))
                assert reply.body == WHOLE, (first, second)
                receipt = story(client, reply)
                assert receipt.trace.losses == 2
                # a run that was lost before its first frame did not go on
                ran = engines.places[1:] if first < second else engines.places[2:]
                assert [name for name, _ in receipt.trace.continued] == ran
                assert (receipt.prompt_tokens, receipt.output_tokens) == (7, TOKENS)
                document = json.loads((await client.get(f"/admin/requests/{receipt.request_id}")).body)
                (line,) = [one for one in document["story"] if "in the middle" in one]
                assert line.count("continued on") == len(ran)

    run(scenario, waits=QUICK)


def test_the_third_loss_ends_it_with_an_error_event() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client, engines = await scripted(cluster, dies)
        engines.cuts = [1, 2, 4]
        reply = await client.post(ask("p"))
        assert reply.body.startswith(b"".join(event for pull in SCRIPT[:4] for event in pull.events))
        assert reply.events[-1]["error"]["code"] == "engine_failed"
        assert client.figures("serve_app_not_continuable_total", "reason") == {("losses",): 1.0}
        assert client.outcomes == {Outcome.ENGINE_FAILED: 1}
        assert story(client, reply).output_tokens == 4  # those of four pulls
        await until(client.at_rest, SOON_S, "all given back")

    run(scenario, waits=QUICK)


@pytest.mark.parametrize("refusal", ["engine", "request", "refused", "queue"])
def test_what_cannot_be_continued_ends_with_an_error_event_and_is_counted(refusal: str) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client, engines = await scripted(cluster, admission={"max_wait_s": 0.2, "no_replica_wait_s": 0.2})
        engines.cuts = [3]
        path = COMPLETIONS
        body = ask("p")
        if refusal == "engine":
            info = client.model.replica_set.info
            client.model.replica_set.info = msgspec.structs.replace(info, continues=False)  # type: ignore[type-var]
        elif refusal == "request":
            path = RESPONSES
            body = BODIES[RESPONSES] | {"include": ["message.output_text.logprobs"]}
        elif refusal == "refused":
            engines.lose = _dies_and_leaves_another_script(engines)
        else:
            engines.lose = lambda name: [cluster.kill(one) for one in ("r1", "r2")]  # type: ignore[assignment]
        reply = await client.post(body, path=path)
        assert reply.body.startswith(b"".join(event for pull in SCRIPT[:3] for event in pull.events))
        assert reply.body.count(b"[DONE]") == (path != RESPONSES)
        assert b"engine_failed" in reply.body or NOT_CONTINUABLE.encode() in reply.body
        assert client.figures("serve_app_not_continuable_total", "reason") == {(refusal,): 1.0}
        assert client.figures("serve_app_migrations_total", "model") == {}
        assert client.outcomes == {Outcome.ENGINE_FAILED: 1}
        assert f"not continued ({refusal})" in "".join(
            json.loads((await client.get(f"/admin/requests/{story(client, reply).request_id}")).body)["story"]
        )
        await until(client.at_rest, SOON_S, "all given back")

    run(scenario, waits=QUICK)


def _dies_and_leaves_another_script(engines: ScriptedEngines) -> Callable[[str], None]:
    """The other engines refuse what this one has begun."""

    async def refuse(*_: Any) -> None:
        raise EngineFailed("not exactly", code=NOT_CONTINUABLE)

    def lose(name: str) -> None:
        for other in set(engines.cluster.replicas) - {name}:
            engines.cluster[other].engine.server.run = refuse  # type: ignore[method-assign]
        dies(name)

    return lose


def test_a_stream_older_than_the_longest_wait_continues_as_a_young_one_does() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1", "r2", admission={"max_wait_s": 0.1})
        task, reply = await running(client)
        await asyncio.sleep(0.3)  # three times what a request may wait
        cluster.kill("r1" if cluster["r1"].work else "r2")
        before = len(reply.chunks)
        await until(lambda: len(reply.chunks) > before + 5, SOON_S, "it goes on")
        task.cancel()
        await asyncio.wait({task})
        assert expected_text("long", LONG).startswith(reply.text)
        assert client.outcomes == {Outcome.CANCELLED_RUNNING: 1}

    run(scenario)


def test_it_waits_for_a_replica_that_comes_and_is_notified_between_its_events() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        reply = Reply()
        task = client.posting(ask("p", 300), headers={"X-Queue-Status": "1"}, reply=reply)
        await until(lambda: bool(reply.chunks), SOON_S, "it runs")
        cluster.kill("r1")
        await until(lambda: reply.chunks[-1].startswith(b": queue"), SOON_S, "a comment")
        await cluster.add("r2")
        await task
        events = [event for event in reply.body.split(b"\n\n") if not event.startswith(b":")]
        reply.chunks = [b"\n\n".join(events)]
        assert (reply.text, client.outcomes) == (expected_text("p", 300), {Outcome.OK: 1})

    run(scenario)


def test_a_run_under_a_key_has_one_answer_which_its_repeats_get() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client, engines = await scripted(cluster)
        for border in range(1, len(SCRIPT)):
            engines.cuts = [border]
            engines.submits = []
            keyed = {"Idempotency-Key": f"key-{border}"}
            first, joined = await asyncio.gather(*(client.post(ask("p"), headers=keyed) for _ in range(2)))
            repeated = await client.post(ask("p"), headers=keyed)
            assert (first.body, joined.body, repeated.body) == (WHOLE, WHOLE, WHOLE)
            assert len(engines.submits) == 2

    run(scenario, waits=QUICK)


def test_a_call_by_handle_gets_one_stream() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client, engines = await scripted(cluster)
        engines.cuts = [4]
        request = make_request(CallKind.STREAM_COMPLETE, {"prompt": "p", "model": MODEL, "api_key": KEY})
        events = [event async for event in read_events(AsgiBridge(client.edge).exchange(request))]
        assert b"".join(b"data: " + event + b"\n\n" for event in events) + b"data: [DONE]\n\n" == WHOLE

    run(scenario, waits=QUICK)


def test_the_prompts_of_a_list_continue_each_for_itself() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1", "r2")
        reply = Reply()
        prompts = ["a", "b", "c", "d"]
        task = client.posting(ask(prompts, 200), reply=reply)
        await until(lambda: cluster["r1"].work and cluster["r2"].work and len(reply.chunks) > 20, SOON_S, "all run")
        cluster.kill("r1")
        await task
        texts = dict.fromkeys(range(len(prompts)), "")
        for event in reply.events:
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == {number: expected_text(prompt, 200) for number, prompt in enumerate(prompts)}
        assert reply.body.count(b"[DONE]") == 1
        receipt = story(client, reply)
        assert receipt.trace.losses == len(receipt.trace.continued) > 0

    run(scenario, model(slots=4))


def test_a_client_that_reads_too_slowly_is_not_the_engines_loss() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client, engines = await scripted(cluster)

        async def slow(reply: Reply) -> None:
            if reply.chunks:
                for stream in list(client.model.unread.streams):
                    stream.abort_unread()

        reply = await client.post(ask("p"), reading=slow)
        assert reply.events[-1]["error"]["code"] == "slow_client"
        assert len(engines.submits) == 1
        assert client.figures("serve_app_not_continuable_total", "reason") == {}

    run(scenario, waits=QUICK)
