"""Responses that a router keeps: turns that continue others, what of an answer is stored, and whose it is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import Response

from serve_app.errors import RateLimited
from serve_app.http.api.store_sweep import StoreSweep
from serve_app.http.responses import memory
from tests.fakes.asgi_client import BATCH_KEY, KEY, Client, Reply, cancel, router_app, started
from tests.fakes.engines import MODEL, FakeCluster, model, run, until
from tests.fakes.router import LONG, SOON_S
from tests.fakes.stores import FakeStore, follower_of

RESPONSES = "/v1/responses"
TENANTS = ({"key": KEY, "tenant": "people"}, {"key": BATCH_KEY, "tenant": "batch"})
TURNS = 4
Scenario = Callable[[Client, FakeStore, FakeCluster], Awaitable[None]]


@pytest.fixture
def store(tmp_path: Path) -> FakeStore:
    return FakeStore(tmp_path)


def check(store: FakeStore, scenario: Scenario, *replicas: str, step_s: float = 0.001, **changed: Any) -> None:
    """Run on a router with engines and the store; `changed`: sections of the settings."""

    async def everything(cluster: FakeCluster) -> None:
        client = await started(cluster, *(replicas or ("r1",)))
        auth = {"keys": TENANTS}
        settings = client.edge.settings.model_validate(client.edge.settings.model_dump() | {"auth": auth} | changed)
        follower = follower_of(store)
        models = client.edge.parts.models
        client.edge = router_app(settings, models, client.metrics, limits=client.limits, follower=follower)
        await follower.follow()
        await scenario(client, store, cluster)

    run(everything, model(step_s=step_s), waits={(memory, "KEEP_S"): 0.1, (memory, "RETRY_S"): 0.02})


def ask(text: Any, tokens: int = 5, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": text, "max_output_tokens": tokens} | more


async def posted(client: Client, body: dict[str, Any], status: int = 200, **named: Any) -> dict[str, Any]:
    reply = await client.post(body, RESPONSES, **named)
    assert reply.status == status, reply.body
    return dict(json.loads(reply.body))


async def got(client: Client, path: str, status: int = 200, **named: Any) -> dict[str, Any]:
    reply = await client.get(f"{RESPONSES}/{path}", **named)
    assert reply.status == status, reply.body
    return dict(json.loads(reply.body))


def text_of(response: dict[str, Any]) -> str:
    return Response.model_validate(response).output_text


def events(reply: Reply) -> list[dict[str, Any]]:
    found = [event for event in reply.body.decode().split("\n\n")[:-1] if not event.startswith(":")]
    return [json.loads(event.partition("data: ")[2]) for event in found]


def error_of(body: dict[str, Any]) -> tuple[Any, Any]:
    return body["error"]["param"], body["error"]["code"]


def test_a_turn_is_answered_as_if_the_whole_conversation_was_sent(store: FakeStore) -> None:
    async def scenario(client: Client, store: FakeStore, _: FakeCluster) -> None:
        history: list[dict[str, Any]] = []
        previous: dict[str, Any] = {}
        for number in range(TURNS):
            history.append({"role": "user", "content": f"turn {number}"})
            turn = await posted(client, ask(f"turn {number}", store=True, **previous))
            whole = await posted(client, ask(history))
            assert (turn["store"], whole["store"]) == (True, False)
            assert text_of(turn) == text_of(whole)
            assert turn["usage"] == whole["usage"]
            assert turn["previous_response_id"] == previous.get("previous_response_id")
            history += turn["output"]
            previous = {"previous_response_id": turn["id"]}
        counted = await client.post({"model": MODEL, "input": "x", **previous}, f"{RESPONSES}/input_tokens")
        alone = await client.post({"model": MODEL, "input": "x"}, f"{RESPONSES}/input_tokens")
        assert json.loads(counted.body)["input_tokens"] > json.loads(alone.body)["input_tokens"]
        assert json.loads(counted.body).keys() == json.loads(alone.body).keys()

    check(store, scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_stored_is_what_was_sent(store: FakeStore, stream: bool) -> None:
    async def scenario(client: Client, store: FakeStore, _: FakeCluster) -> None:
        asked = ask("hello", store=True, stream=stream, metadata={"a": "b"}, instructions="Be brief.")
        reply = await client.post(asked, RESPONSES)
        sent = json.loads(reply.body) if not stream else events(reply)[-1]["response"]
        assert int(reply.headers.get("content-length", len(reply.body))) == len(reply.body)
        assert Response.model_validate(sent).metadata == {"a": "b"}
        assert await got(client, sent["id"]) == sent
        if stream:
            found = events(reply)
            assert [event["sequence_number"] for event in found] == list(range(len(found)))
            assert {event["response"]["store"] for event in found if "response" in event} == {True}

    check(store, scenario)


def test_an_answer_that_another_engine_continues_is_stored_whole(store: FakeStore) -> None:
    async def scenario(client: Client, store: FakeStore, cluster: FakeCluster) -> None:
        undisturbed = await posted(client, ask("go", 60))
        reply = Reply()
        task = client.posting(ask("go", 60, store=True, stream=True), path=RESPONSES, reply=reply)
        await until(lambda: b"output_text.delta" in reply.body, SOON_S, "text")
        busy = next(name for name, one in cluster.replicas.items() if one.work)
        cluster.kill(busy)
        await task
        sent = events(reply)[-1]["response"]
        assert text_of(sent) == text_of(undisturbed)
        assert await got(client, sent["id"]) == sent

    check(store, scenario, "r1", "r2", step_s=0.005)


def test_nothing_is_stored_unless_it_is_asked_for(store: FakeStore) -> None:
    async def scenario(client: Client, store: FakeStore, _: FakeCluster) -> None:
        made = await posted(client, ask("hello"))
        assert made["store"] is False
        assert (await got(client, made["id"], 404))["error"]["code"] == "response_not_found"
        wrong = await posted(client, ask("hello", previous_response_id=made["id"]), 404)
        assert error_of(wrong) == ("previous_response_id", "previous_response_not_found")
        assert made["id"] in wrong["error"]["message"]

    check(store, scenario)


def test_a_setting_stores_what_does_not_say_otherwise(store: FakeStore) -> None:
    async def scenario(client: Client, store: FakeStore, _: FakeCluster) -> None:
        made = await posted(client, ask("hello"))
        assert (await got(client, made["id"]))["store"] is True
        refused = await posted(client, ask("hello", store=False))
        await got(client, refused["id"], 404)
        continued = await posted(client, ask("more", store=False, previous_response_id=made["id"]))
        assert (continued["store"], continued["previous_response_id"]) == (False, made["id"])
        await got(client, continued["id"], 404)

    check(store, scenario, responses={"store_by_default": True})


def test_another_tenant_s_ids_are_unknown_ids(store: FakeStore) -> None:
    async def scenario(client: Client, store: FakeStore, _: FakeCluster) -> None:
        made = await posted(client, ask("a secret", store=True))
        unknown = f"resp_{'0' * 32}"
        for path in ("", "/input_items"):
            theirs = await got(client, made["id"] + path, 404, key=BATCH_KEY)
            assert theirs == json.loads(
                json.dumps(await got(client, unknown + path, 404, key=BATCH_KEY)).replace(unknown, made["id"])
            )
        for method, path in (("DELETE", ""), ("POST", "/cancel")):
            assert (await client.request(method, f"{RESPONSES}/{made['id']}{path}", key=BATCH_KEY)).status == 404
        more = ask("more", previous_response_id=made["id"])
        assert error_of(await posted(client, more, 404, key=BATCH_KEY))[0] == "previous_response_id"
        reference = ask([{"type": "item_reference", "id": made["output"][0]["id"]}])
        assert error_of(await posted(client, reference, 404, key=BATCH_KEY)) == ("input.0", "item_not_found")
        await posted(client, more)  # it is still there

    check(store, scenario)


def test_a_deleted_response_is_gone_and_cannot_be_continued(store: FakeStore) -> None:
    async def scenario(client: Client, store: FakeStore, _: FakeCluster) -> None:
        first = await posted(client, ask("one", store=True))
        second = await posted(client, ask("two", store=True, previous_response_id=first["id"]))
        reply = await client.request("DELETE", f"{RESPONSES}/{first['id']}")
        assert json.loads(reply.body) == {"id": first["id"], "object": "response", "deleted": True}
        await got(client, first["id"], 404)
        assert (await got(client, second["id"]))["output"] == second["output"]
        wrong = await posted(client, ask("three", previous_response_id=second["id"]), 404)
        assert first["id"] in wrong["error"]["message"]

    check(store, scenario)


def test_a_reference_stands_for_the_item_that_it_names(store: FakeStore) -> None:
    async def scenario(client: Client, store: FakeStore, _: FakeCluster) -> None:
        made = await posted(client, ask("one", store=True))
        (item,) = made["output"]
        user = {"role": "user", "content": "two"}
        by_reference = await posted(client, ask([{"type": "item_reference", "id": item["id"]}, user], store=True))
        assert text_of(by_reference) == text_of(await posted(client, ask([item, user])))
        items = (await got(client, f"{by_reference['id']}/input_items", query="order=asc"))["data"]
        assert items[0] == item

    check(store, scenario)


def test_input_items_come_in_pages(store: FakeStore) -> None:
    async def scenario(client: Client, store: FakeStore, _: FakeCluster) -> None:
        history = [{"role": "user", "content": f"part {number}"} for number in range(5)]
        made = await posted(client, ask(history, store=True))
        path = f"{made['id']}/input_items"
        whole = await got(client, path, query="order=asc&include[]=message.input_image.image_url")
        texts = [item["content"][0]["text"] for item in whole["data"]]
        assert texts == [f"part {number}" for number in range(5)]
        assert {item["type"] for item in whole["data"]} == {"message"}
        found: list[str] = []
        query = "limit=2"
        while True:
            page = await got(client, path, query=query)
            found += [item["id"] for item in page["data"]]
            query = f"limit=2&after={page['last_id']}"
            if not page["has_more"]:
                break
        assert found == [item["id"] for item in reversed(whole["data"])]
        for wrong, param in (("order=up", "order"), ("limit=0", "limit"), ("after=x", "after"), ("a=1", "a")):
            assert error_of(await got(client, path, 400, query=wrong))[0] == param

    check(store, scenario)


def test_a_client_that_leaves_a_stream_leaves_a_cancelled_response(store: FakeStore) -> None:
    async def scenario(client: Client, store: FakeStore, _: FakeCluster) -> None:
        reply = Reply()
        task = client.posting(ask("go", LONG, store=True, stream=True), path=RESPONSES, reply=reply)
        await until(lambda: b"output_text.delta" in reply.body, SOON_S, "text")
        await cancel(task)
        found = events(reply)
        name = found[0]["response"]["id"]
        await until(lambda: store.sql.responses.chain("people", name, [], 2**20).missing is None, SOON_S, "a record")
        kept = await got(client, name)
        assert kept["status"] == "cancelled"
        assert text_of(kept) == "".join(event["delta"] for event in found if event["type"].endswith("text.delta"))
        assert client.at_rest()
        assert (await posted(client, ask("go on", previous_response_id=name)))["status"] == "incomplete"

    check(store, scenario, step_s=0.005)


def test_without_the_store_only_what_needs_it_is_refused(store: FakeStore) -> None:
    async def scenario(client: Client, store: FakeStore, _: FakeCluster) -> None:
        made = await posted(client, ask("one", store=True))
        store.away = True
        for body in (ask("two", store=True), ask("two", previous_response_id=made["id"])):
            assert (await posted(client, body, 503))["error"]["code"] == "no_store"
        assert (await got(client, made["id"], 503))["error"]["code"] == "no_store"
        assert (await posted(client, ask("two")))["store"] is False
        assert (await posted(client, ask("two", store=False)))["store"] is False

    check(store, scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_could_not_be_stored_is_sent_and_says_so(store: FakeStore, stream: bool) -> None:
    async def scenario(client: Client, store: FakeStore, _: FakeCluster) -> None:
        undisturbed = await posted(client, ask("one", 40))
        before = client.engine_tokens()
        task = client.posting(ask("one", 40, store=True, stream=stream), path=RESPONSES)
        await until(lambda: client.engine_tokens() > before, SOON_S, "tokens")
        store.away = True
        reply = await task
        assert (reply.status, client.outcomes) == (200, {"ok": 2})
        assert int(reply.headers.get("content-length", len(reply.body))) == len(reply.body)
        made = events(reply)[-1]["response"] if stream else json.loads(reply.body)
        assert (made["store"], text_of(made), made["usage"]) == (False, text_of(undisturbed), undisturbed["usage"])
        if stream:
            numbers = [event["sequence_number"] for event in events(reply)]
            assert numbers == list(range(len(numbers)))
        store.away = False
        wrong = await posted(client, ask("two", previous_response_id=made["id"]), 404)
        assert error_of(wrong) == ("previous_response_id", "previous_response_not_found")

    check(store, scenario, step_s=0.005)


def test_an_answer_above_the_tenant_s_bytes_says_that_it_is_not_kept(store: FakeStore) -> None:
    async def scenario(client: Client, store: FakeStore, _: FakeCluster) -> None:
        older = await posted(client, ask("one", store=True))
        made = await posted(client, ask("w" * 65_000, store=True))
        assert made["store"] is False
        await got(client, made["id"], 404)
        await got(client, older["id"])  # it made no room for what is not kept

    check(store, scenario, responses={"max_bytes_per_tenant": 2**16})


def test_a_turn_does_not_run_while_the_store_is_away(store: FakeStore) -> None:
    async def scenario(client: Client, store: FakeStore, _: FakeCluster) -> None:
        store.away = True
        for stream in (False, True):
            reply = await client.post(ask("one", store=True, stream=stream), RESPONSES)
            assert (reply.status, client.engine_tokens(), client.limits.charges) == (503, 0, [])

    check(store, scenario, step_s=0.005)


LIMITED = {"keys": [{**TENANTS[0], "max_class": "normal", "limits": {"tokens_per_minute": 10_000}}, TENANTS[1]]}


def test_a_turn_is_charged_once_and_for_the_whole_conversation(store: FakeStore) -> None:
    async def scenario(client: Client, store: FakeStore, _: FakeCluster) -> None:
        text = "word " * 500
        made = await posted(client, ask(text, store=True))
        turn = await posted(client, ask("two", previous_response_id=made["id"]))
        charged = client.limits.charges[-1]
        assert charged.request.tokens > 500  # by estimate, before it ran
        assert charged.end == (turn["usage"]["total_tokens"], 0)

    check(store, scenario, auth=LIMITED)


def test_a_repeat_of_a_turn_costs_nothing_before_the_store_says_what_it_is(store: FakeStore) -> None:
    async def scenario(client: Client, store: FakeStore, _: FakeCluster) -> None:
        made = await posted(client, ask("one", store=True))
        more = ask("two", store=True, previous_response_id=made["id"])
        turn = await posted(client, more, headers={"Idempotency-Key": "k"})
        client.limits.refusal = RateLimited("requests per minute")
        assert await posted(client, more, headers={"Idempotency-Key": "k"}) == turn
        assert len(client.limits.charges) == 2

    check(store, scenario, auth=LIMITED)


def test_a_conversation_above_the_bounds_of_a_body_is_refused(store: FakeStore) -> None:
    async def scenario(client: Client, store: FakeStore, _: FakeCluster) -> None:
        made = await posted(client, ask("word " * 500, store=True))
        wrong = await posted(client, ask("word " * 500, previous_response_id=made["id"]), 413)
        assert error_of(wrong) == ("previous_response_id", "body_too_large")

    check(store, scenario, http={"max_body_bytes": 4096})


def test_a_tenant_s_oldest_responses_make_room(store: FakeStore) -> None:
    async def scenario(client: Client, store: FakeStore, _: FakeCluster) -> None:
        first = await posted(client, ask("word " * 6000, store=True))
        theirs = await posted(client, ask("word " * 6000, store=True), key=BATCH_KEY)
        for _ in range(2):
            last = await posted(client, ask("word " * 6000, store=True))
        await got(client, first["id"], 404)
        await got(client, last["id"])
        await got(client, theirs["id"], key=BATCH_KEY)
        wrong = await posted(client, ask("words " * 12_000, store=True), 413)
        assert error_of(wrong) == ("store", "storage_quota_exceeded")

    check(store, scenario, responses={"max_bytes_per_tenant": 2**16})


def test_responses_end_after_their_time(store: FakeStore) -> None:
    async def scenario(client: Client, store: FakeStore, _: FakeCluster) -> None:
        made = await posted(client, ask("one", store=True))
        await got(client, made["id"], 404)
        assert await StoreSweep(lambda: store, lambda: client.edge.settings).sweep() == 1

    check(store, scenario, responses={"keep_s": 1e-6})


def test_a_lower_bound_of_time_holds_for_what_is_stored_already(store: FakeStore) -> None:
    async def scenario(client: Client, store: FakeStore, _: FakeCluster) -> None:
        made = await posted(client, ask("one", store=True))
        settings = client.edge.settings
        sweep = StoreSweep(lambda: store, lambda: settings)
        assert await sweep.sweep() == 0
        settings = settings.model_copy(update={"responses": settings.responses.model_copy(update={"keep_s": 1e-6})})
        assert await sweep.sweep() == 1
        await got(client, made["id"], 404)

    check(store, scenario)


def test_a_repeat_under_an_idempotency_key_is_the_same_response(store: FakeStore) -> None:
    async def scenario(client: Client, store: FakeStore, _: FakeCluster) -> None:
        headers = {"Idempotency-Key": "turn-1"}
        made = await posted(client, ask("one", store=True), headers=headers)
        again = await posted(client, ask("one", store=True), headers=headers)
        assert again == made
        assert await got(client, made["id"]) == made
        other = await posted(client, ask("one"), 400, headers=headers)
        assert other["error"]["code"] == "idempotency_key_reused"

    check(store, scenario)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"store": "yes"}, "store"),
        ({"previous_response_id": 5}, "previous_response_id"),
        ({"background": "yes"}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"input": [{"type": "item_reference", "id": 5}]}, "input.0.id"),
    ],
)
def test_what_is_no_turn_is_refused_by_name(store: FakeStore, more: dict[str, Any], param: str) -> None:
    async def scenario(client: Client, store: FakeStore, _: FakeCluster) -> None:
        assert error_of(await posted(client, ask("one") | more, 400))[0] == param

    check(store, scenario)


def test_an_error_names_the_place_in_what_was_sent(store: FakeStore) -> None:
    async def scenario(client: Client, store: FakeStore, _: FakeCluster) -> None:
        made = await posted(client, ask("one", store=True))
        user = {"role": "user", "content": "two"}
        wrong = {"role": "user", "content": [{"type": "input_text", "text": "a", "uuid": "x"}]}
        for items, path in (([user, wrong], "input.1.content.0.uuid"), ([user, 5], "messages.3")):  # ours; the engine's
            refused = await posted(client, ask(items, previous_response_id=made["id"]), 400)
            assert error_of(refused)[0] == path

    check(store, scenario)


def test_a_response_that_has_ended_is_neither_cancelled_nor_streamed_again(store: FakeStore) -> None:
    async def scenario(client: Client, store: FakeStore, _: FakeCluster) -> None:
        made = await posted(client, ask("one", store=True))
        assert (await client.post({}, f"{RESPONSES}/{made['id']}/cancel")).status == 400
        assert error_of(await got(client, made["id"], 400, query="stream=true&starting_after=3"))[0] == "stream"

    check(store, scenario)


def test_concurrent_turns_of_a_conversation_are_branches(store: FakeStore) -> None:
    async def scenario(client: Client, store: FakeStore, _: FakeCluster) -> None:
        first = await posted(client, ask("one", store=True))
        asked = [ask(f"branch {number}", store=True, previous_response_id=first["id"]) for number in range(TURNS)]
        made = await asyncio.gather(*(posted(client, body) for body in asked))
        assert len({one["id"] for one in made}) == TURNS
        for number, branch in enumerate(made):
            (item,) = (await got(client, f"{branch['id']}/input_items"))["data"]
            assert item["content"][0]["text"] == f"branch {number}"

    check(store, scenario)
