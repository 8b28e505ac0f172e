"""Names that stand for models: rights, targets, fallbacks before the first byte and never after it, one charge."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from autoscaling.operations.node_records import NodeRecords
from serve_app.core.body_bounds import TOO_LONG
from serve_app.core.receipts import explain
from serve_app.core.records import Grouping, HistoryQuestion, HistorySum, RecordFilter
from serve_app.errors import EngineFailed, RateLimited, RequestFailed
from serve_app.router import ModelRouter, RequestLog
from serve_app.settings import Settings
from serve_app.system import DurationSketch
from tests.fakes.asgi_client import CHAT, KEY, Client, Reply, ask, cancel, router_app
from tests.fakes.engines import MODEL, FakeCluster, model, run, turns, until
from tests.fakes.router import LONG, SOON_S

SPARE = "spare"
NAME = "chat"
ONLY_NAME = "sk-only-the-name-0123456789"
HOME = {"model": MODEL, "weight": 1}
BOTH = [{"model": MODEL, "weight": 50}, {"model": SPARE, "weight": 50}]


class TwoModels(Client):
    """A router replica with two models, and a name before them."""

    def __init__(self, cluster: FakeCluster, route: dict[str, Any], spare_len: int = 8192, **settings: Any) -> None:
        super().__init__(cluster, **settings)
        self._spare = cluster.settings.model_copy(update={"name": SPARE, "max_model_len": spare_len})
        self.beside = cluster.beside(self._spare)
        self.route = {"name": NAME, "targets": [HOME], "fallbacks": [SPARE]} | route
        self.configured = self._with(self.route)

    def _with(self, route: dict[str, Any]) -> Settings:
        given = self.settings.model_dump(mode="json")
        only = {"key": ONLY_NAME, "tenant": "people", "models": [NAME]}
        keys = [*given["auth"]["keys"], only]
        models = [given["models"][0], self._spare.model_dump(mode="json")]
        return Settings.model_validate(given | {"models": models, "routes": [route], "auth": {"keys": keys}})

    async def start(self) -> TwoModels:
        await super().start()
        client = await self.cluster.queues("beside")
        admission = self.settings.admission
        self.spare = ModelRouter(self._spare, self.beside.handle(), admission, "beside", 1, client)
        self.beside.closing.append(self.spare.replica_set.close)
        models = {MODEL: self.model, SPARE: self.spare}
        self.edge = router_app(self.configured, models, self.metrics, self.limits, self.keyed_runs, log=self.log)
        await self.spare.start()
        await turns(20)
        return self

    def change(self, **route: Any) -> None:
        """Another configuration, taken over while the router runs."""
        self.edge.configure(self._with(self.route | route))

    def receipt(self, reply: Reply) -> dict[str, Any]:
        return self.edge.parts.receipts.kept[reply.headers["x-serve-app-request-id"]].to_json_fields()


async def begun(cluster: FakeCluster, replicas: str = "r1", spares: str = "s1", **more: Any) -> TwoModels:
    client = TwoModels(cluster, more.pop("route", {}), **more)
    await cluster.add(*replicas.split())
    await client.beside.add(*spares.split())
    return await client.start()


def named(prompt: str | list[str] = "hello", tokens: int = 5, **more: Any) -> dict[str, Any]:
    return ask(prompt, tokens, model=NAME, **more)


def test_the_answer_has_the_name_that_was_asked_for_and_a_header_says_what_ran() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await begun(cluster)
        whole = await client.post(named(stream=False))
        streamed = await client.post(named())
        chat = await client.post({"model": NAME, "messages": [{"role": "user", "content": "hi"}]}, CHAT)
        assert [json.loads(whole.body)["model"], json.loads(chat.body)["model"]] == [NAME, NAME]
        assert {event["model"] for event in streamed.events} == {NAME}
        assert [reply.headers["x-serve-app-model"] for reply in (whole, streamed, chat)] == [MODEL] * 3
        receipt = client.receipt(whole)
        assert (receipt["model"], receipt["asked_model"], receipt["hops"]) == (MODEL, NAME, ())
        own = await client.post(ask("hello", stream=False))
        assert json.loads(own.body)["model"] == MODEL
        assert "x-serve-app-model" not in own.headers
        assert client.receipt(own)["asked_model"] is None

    run(scenario, model())


def test_a_session_keeps_its_target_and_sessions_are_spread() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await begun(cluster, route={"targets": BOTH, "fallbacks": []})
        ran: dict[str, set[str]] = {}
        for number in range(12):
            session = f"s{number}"
            for prompt in ("first", "second"):
                reply = await client.post(named(prompt), headers={"X-Session-Id": session})
                ran.setdefault(session, set()).add(reply.headers["x-serve-app-model"])
        assert {len(models) for models in ran.values()} == {1}
        assert set.union(*ran.values()) == {MODEL, SPARE}

    run(scenario, model())


def test_a_key_with_the_right_to_the_name_reaches_its_models_through_it_alone() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await begun(cluster, replicas="", spares="s1")
        fallback = await client.post(named(), key=ONLY_NAME)
        assert (fallback.status, fallback.headers["x-serve-app-model"]) == (200, SPARE)
        for name in (MODEL, SPARE):
            refused = await client.post(ask("hello", model=name), key=ONLY_NAME)
            assert (refused.status, refused.error["code"]) == (403, "model_not_allowed")
        models = json.loads((await client.get("/v1/models", key=ONLY_NAME)).body)["data"]
        assert [one["id"] for one in models] == [NAME]
        assert models[0]["route"]["fallbacks"] == [SPARE]
        listed = [one["id"] for one in json.loads((await client.get("/v1/models")).body)["data"]]
        assert listed == [MODEL, SPARE, NAME]
        assert json.loads((await client.get(f"/v1/models/{NAME}")).body)["id"] == NAME

    run(scenario, model())


def test_a_request_whose_target_has_no_replica_runs_on_the_fallback_at_once() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await begun(cluster, replicas="")
        reply = await client.post(named(), headers={"X-Deadline-Ms": "2000"})
        assert (reply.status, len(reply.text.split())) == (200, 5)
        receipt = client.receipt(reply)
        assert (receipt["model"], receipt["hops"]) == (SPARE, ((MODEL, "no_replica"),))
        assert receipt["wait_s"] < 1
        kept_here = client.edge.parts.receipts.kept[reply.headers["x-serve-app-request-id"]]
        assert f"Asked for {NAME}, which stands for {SPARE}; it left {MODEL} (no_replica)." in explain(kept_here)
        (charged,) = client.usage_meter.next_batch().rows  # type: ignore[union-attr]
        assert (charged.model, charged.asked_model, charged.requests) == (SPARE, NAME, 1)

    run(scenario, model())


def test_use_has_the_name_beside_the_model_and_none_where_the_model_was_asked_for() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await begun(cluster)
        for body in (named(), ask("hello"), named(["a", "b"])):
            assert (await client.post(body)).status == 200
        batch = client.usage_meter.next_batch()
        assert batch is not None
        assert [(row.model, row.asked_model, row.requests) for row in batch.rows] == [(MODEL, NAME, 2), (MODEL, "", 1)]

    run(scenario, model())


def test_those_that_wait_leave_when_the_last_replica_is_lost_and_nothing_fails() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await begun(cluster)
        asked = [client.posting(named(f"p {number}", 20, stream=number % 2 == 0)) for number in range(12)]
        await until(lambda: client.model.queue.waiting > 2, SOON_S, "some wait")
        cluster.kill("r1")
        # streams of which the client has a part wait for the replica that Serve starts next
        await cluster.add("r2")
        replies = await asyncio.gather(*asked)
        assert [reply.status for reply in replies] == [200] * 12
        assert all("error" not in event for reply in replies[::2] for event in reply.events)
        hopped = [reply for reply in replies if client.receipt(reply)["hops"]]
        assert {client.receipt(reply)["model"] for reply in hopped} == {SPARE}
        assert hopped
        assert client.at_rest()

    run(scenario, model(slots=4))


def test_a_full_queue_sends_the_request_to_the_fallback() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await begun(cluster, admission={"max_queued": 0})
        task = client.posting(named("long", LONG))
        await until(lambda: client.model.queue.granted == 1, SOON_S, "it runs")
        reply = await client.post(named("short"))
        assert client.receipt(reply)["hops"] == ((MODEL, "queue_full"),)
        full = [client.posting(named("long", LONG))]
        await until(lambda: client.spare.queue.granted == 1, SOON_S, "both are full")
        refused = await client.post(named("one too many"))
        assert (refused.status, refused.error["code"]) == (429, "queue_full")
        for asked in (task, *full):
            asked.cancel()
        await asyncio.wait([task, *full])

    run(scenario, model(slots=1))


def test_an_engine_that_fails_before_the_first_byte_is_left_and_after_it_never() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await begun(cluster)
        backend: Any = cluster["r1"].engine.backend
        runs = backend.run

        def fails(submit: Any) -> Any:
            raise RequestFailed("an error of the model")

        backend.run = fails
        reply = await client.post(named())
        assert (reply.status, client.receipt(reply)["hops"]) == (200, ((MODEL, "engine_failed"),))

        async def breaks(submit: Any) -> Any:
            async for frame in runs(submit):
                yield frame
                raise EngineFailed("broken", code="slow_client")  # that no other replica continues

        backend.run = breaks
        broken = await client.post(named())
        assert broken.events[-1]["error"]
        assert client.receipt(broken)["hops"] == ()

    run(scenario, model())


def test_a_request_that_leaves_a_model_is_charged_once_and_a_limit_ends_it() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await begun(cluster, replicas="", limits={"requests_per_minute": 60})
        reply = await client.post(named())
        left, ran = client.limits.charges
        assert (left.end, ran.end) == ("refunded", (reply_tokens(client, reply), 0))
        client.limits.refusal = RateLimited("requests per minute")
        refused = await client.post(named())
        assert (refused.status, refused.error["code"]) == (429, "rate_limit")
        assert client.receipt(refused)["hops"] == ()

    run(scenario, model())


def reply_tokens(client: TwoModels, reply: Reply) -> int:
    receipt = client.receipt(reply)
    return int(receipt["prompt_tokens"] + receipt["output_tokens"])


def test_a_name_changes_while_requests_come() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await begun(cluster)
        before = await client.post(named())
        client.change(targets=[{"model": SPARE}], fallbacks=[])
        after = await client.post(named())
        assert [reply.headers["x-serve-app-model"] for reply in (before, after)] == [MODEL, SPARE]

    run(scenario, model())


def test_a_repeat_under_its_key_gets_the_same_answer_whatever_the_weights_are_by_then() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await begun(cluster)
        repeats = {"Idempotency-Key": "once"}
        first = await client.post(named(stream=False), headers=repeats)
        client.change(targets=[{"model": SPARE}], fallbacks=[])
        second = await client.post(named(stream=False), headers=repeats)
        assert (second.headers["x-idempotent-replay"], second.body) == ("true", first.body)

    run(scenario, model())


def test_a_repeat_under_its_key_is_the_same_request_at_a_target_of_another_length() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await begun(cluster, spare_len=512, http={"max_output_tokens": 1000})
        body = {"model": NAME, "messages": [{"role": "user", "content": "hi"}], "stop": "."}
        repeats = {"Idempotency-Key": "once"}
        first = await client.post(body, CHAT, headers=repeats)
        client.change(targets=[{"model": SPARE}], fallbacks=[])
        second = await client.post(body, CHAT, headers=repeats)
        assert (second.status, second.body) == (200, first.body)
        other = await client.post(body | {"user": "another"}, CHAT, headers=repeats)
        assert (other.status, other.error["code"]) == (400, "idempotency_key_reused")

    run(scenario, model())


@pytest.mark.parametrize("prompt", ["word " * 100, "w" * 80_000], ids=["the engine finds it", "the router finds it"])
def test_a_prompt_that_is_too_long_for_the_target_runs_on_a_larger_fallback(prompt: str) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await begun(cluster)
        reply = await client.post(named(prompt))
        assert (reply.status, reply.headers["x-serve-app-model"]) == (200, SPARE)
        assert client.receipt(reply)["hops"] == ((MODEL, "too_large"),)
        alone = await client.post(ask(prompt))
        assert (alone.status, alone.error["code"]) == (400, "context_length_exceeded")

    run(scenario, model(max_model_len=64))


@pytest.mark.parametrize("prompt", ["word " * 100, "w" * 80_000], ids=["the engine finds it", "the router finds it"])
def test_what_no_model_of_a_name_could_run_is_the_client_s_error(prompt: str) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await begun(cluster, spare_len=32)
        for body in (named(prompt), named(prompt, stream=False)):
            reply = await client.post(body)
            assert (reply.status, reply.error["code"], reply.error["param"]) == (400, TOO_LONG, "prompt")
        assert client.outcomes == {"bad_request": 2}
        assert client.at_rest()

    run(scenario, model(max_model_len=64))


def test_what_the_target_could_run_later_is_no_error_of_the_client_where_the_fallback_is_too_small() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await begun(cluster, replicas="", spare_len=32)
        reply = await client.post(named("word " * 100, stream=False))
        assert (reply.status, reply.error["code"]) == (503, "no_replica")
        assert client.receipt(reply)["hops"][0] == (MODEL, "no_replica")

    run(scenario, model())


def test_a_list_of_prompts_goes_by_the_name_too() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await begun(cluster, replicas="")
        reply = await client.post(ask(["a", "b"], model=NAME, stream=False), key=KEY)
        assert (reply.status, len(json.loads(reply.body)["choices"])) == (200, 2)
        assert client.receipt(reply)["model"] == SPARE
        assert json.loads(reply.body)["model"] == NAME

    run(scenario, model())


def kept(folder: Path) -> list[dict[str, Any]]:
    """The records of requests on the disk."""
    files = sorted(folder.glob("requests*"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_a_shadow_runs_beside_the_request_for_nobody_and_stops_while_something_waits(tmp_path: Path) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        log = RequestLog(tmp_path, "router", "node")
        route = {"fallbacks": [], "shadow": {"model": SPARE, "share": 1}}
        client = await begun(cluster, route=route, log=log, limits={"requests_per_minute": 60})
        shadows = client.edge.shadows
        reply = await client.post(named(stream=False))
        await until(lambda: len(client.beside.submits) == 1 and not shadows.running, SOON_S, "the shadow ran")
        await log.flush()
        found = {record["model"]: record for record in kept(tmp_path)}
        assert found[SPARE]["is_shadow"]
        assert (found[SPARE]["asked_model"], found[SPARE]["request_class"]) == (NAME, "low")
        assert found[SPARE]["output_tokens"] == found[MODEL]["output_tokens"] == 5
        assert len(client.limits.charges) == 1
        (charged,) = client.usage_meter.next_batch().rows  # type: ignore[union-attr]
        assert (charged.model, charged.tenant) == (MODEL, "people")
        wanted = RecordFilter(asked_model=NAME)
        assert len(NodeRecords(tmp_path).requests(wanted)) == 2, "the shadow's record is one of the name"
        question = HistoryQuestion(0.0, by=Grouping.NAME)
        counted = HistorySum(question, DurationSketch)
        counted.add_rows(NodeRecords(tmp_path).history(question))
        assert {row["name"]: row["ok"] for row in counted.rows()} == {NAME: 1, SPARE: 1}
        assert client.outcomes == {"ok": 1}
        assert reply.status == 200
        long = client.posting(named("long", LONG))
        await until(lambda: len(client.beside.submits) == 2, SOON_S, "another shadow runs")
        own = [client.posting(ask("own", 3, model=SPARE))]
        answers = await asyncio.gather(*own)
        assert [answer.status for answer in answers] == [200]
        await until(lambda: not shadows.running, SOON_S, "the shadow has stopped")
        long.cancel()
        await asyncio.wait([long])
        await log.close()

    run(scenario, model(slots=1))


def test_no_shadow_begins_while_a_request_waits_at_another_router() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        route = {"fallbacks": [], "shadow": {"model": SPARE, "share": 1}}
        client = await begun(cluster, route=route)
        other = await TwoModels(cluster, route).start()
        runs = other.posting(ask("long", LONG, model=SPARE))
        await until(lambda: other.spare.queue.granted == 1, SOON_S, "it runs")
        waits = other.posting(ask("next", 3, model=SPARE))
        await until(lambda: client.spare.waiting_anywhere == 1, SOON_S, "this router knows of it")
        assert client.spare.waiting == 0
        submitted = len(client.beside.submits)
        assert (await client.post(named(stream=False))).status == 200
        assert not client.edge.shadows.running
        runs.cancel()
        assert (await waits).status == 200
        await asyncio.wait([runs])
        await until(lambda: client.spare.waiting_anywhere == 0, SOON_S, "nothing waits")
        assert (await client.post(named(stream=False))).status == 200
        await until(lambda: len(client.beside.submits) == submitted + 2, SOON_S, "the shadow runs behind the next one")

    run(scenario, model(slots=1))


def test_a_shadow_that_runs_ends_for_a_request_that_waits_at_another_router() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        route = {"fallbacks": [], "shadow": {"model": SPARE, "share": 1}}
        client = await begun(cluster, route=route)
        other = await TwoModels(cluster, route).start()
        long = client.posting(named("long", LONG))
        await until(lambda: len(client.beside.submits) == 1, SOON_S, "the shadow runs")
        waits = other.posting(ask("next", 3, model=SPARE, priority="low"))  # for which no request is preempted
        await until(lambda: not client.edge.shadows.running, SOON_S, "the shadow has stopped")
        assert (await waits).status == 200
        await cancel(long)

    run(scenario, model(slots=1))


def test_a_shadow_that_waits_itself_ends_alone() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        route = {"fallbacks": [], "shadow": {"model": SPARE, "share": 1}}
        client = await begun(cluster, route=route)
        other = await TwoModels(cluster, route).start()
        long = client.posting(named("long", LONG))
        await until(lambda: len(client.beside.submits) == 1, SOON_S, "the shadow runs")
        await cancel(long)
        running = set(client.edge.shadows.running)
        for router in (client, other):
            assert (await router.post(named(stream=False))).status == 200
            shadows = router.edge.shadows
            await until(lambda found=shadows: found.running <= running, SOON_S, "the one that waited has ended")
            await until(lambda: client.spare.waiting_anywhere == 0, SOON_S, "nothing waits")
        assert client.edge.shadows.running == running
        assert len(client.beside.submits) == 1

    run(scenario, model(slots=1))
