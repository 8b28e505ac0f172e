"""The request log, the history and the events by HTTP: what was sent is there, and of other tenants nothing."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from serve_app.http.api.record_routes import recorded_receipt
from serve_app.http.prefix_blocks import BLOCK_BYTES, MAX_BLOCKS, prefix_blocks
from serve_app.names import RECORDS_FOLDER
from serve_app.router import RequestLog
from serve_app.system import EventKind, event, keep_events, record_files
from serve_app.types import Operation
from tests.fakes.asgi_client import ADMIN_KEY, BATCH_KEY, CHAT, KEY, Client, Reply, ask, cancel, running
from tests.fakes.cluster_calls import NoCluster, RecordedCluster
from tests.fakes.engines import MODEL, FakeCluster, model, run, until
from tests.fakes.router import SOON_S

Scenario = Callable[["Recorded"], Awaitable[None]]


class Recorded:
    """A router replica with a request log, and its callers."""

    def __init__(self, cluster: FakeCluster, folder: Path, **client: Any) -> None:
        self._since = time.time() - time.monotonic()
        self.log = RequestLog(folder, "router", "n1", self.wall)
        self.calls = RecordedCluster(folder)
        self.client = Client(cluster, log=self.log, calls=self.calls, **client)

    def wall(self) -> float:
        """The wall's clock of the scenario: it goes with the time of its loop, which is virtual."""
        return self._since + time.monotonic()

    async def get(self, route: str, key: str = ADMIN_KEY, status: int = 200, **query: Any) -> dict[str, Any]:
        reply = await self.client.get(f"/admin/{route}", key=key, query=urlencode(query))
        assert reply.status == status, reply.body
        return dict(json.loads(reply.body))

    async def refused(self, route: str, key: str = ADMIN_KEY, status: int = 400, **query: Any) -> dict[str, Any]:
        return dict((await self.get(route, key, status, **query))["error"])


def check(
    folder: Path,
    scenario: Scenario,
    *,
    replicas: tuple[str, ...] = ("r1",),
    client: dict[str, Any] | None = None,
    **settings: Any,
) -> None:
    async def whole(cluster: FakeCluster) -> None:
        await cluster.add(*replicas)
        recorded = Recorded(cluster, folder, **client or {})
        await recorded.client.start()
        await scenario(recorded)
        await recorded.log.close()

    run(whole, settings=model(**settings))


def test_every_request_that_has_ended_is_in_the_next_answer_with_its_receipt(tmp_path: Path) -> None:
    async def scenario(recorded: Recorded) -> None:
        before = recorded.wall()
        reply = await recorded.client.post(ask("one two", stream=False), headers={"X-Request-Id": "mine"})
        found = await recorded.get("requests")
        (record,) = found["data"]
        receipt = await recorded.get("requests/mine")
        same = receipt.keys() - {"story", "waited_for"}
        for name in same:
            known = receipt[name]
            assert record[name] == (pytest.approx(known, abs=1e-6) if isinstance(known, float) else known), name
        assert (found["object"], found["complete"], found["missing"]) == ("list", True, [])
        assert record["request_id"] == reply.headers["x-serve-app-request-id"]
        assert (record["router"], record["node"], record["key_id"]) == ("router", "n1", "desk")
        assert (record["operation"], record["is_row"], record["waited_for"]) == ("completion", False, {})
        (only,) = record["runs"]
        assert (only["replica_id"], only["end"]) == ("r1", "answered")
        assert 0.0 <= only["began_s"] <= only["ended_s"] <= record["total_s"]
        arrived = datetime.fromisoformat(record["time"]).timestamp()
        assert before - 0.001 <= arrived <= recorded.wall()  # a time is shown in whole milliseconds

    check(tmp_path, scenario)


def test_a_log_has_no_text_of_a_prompt_and_the_same_beginning_has_the_same_blocks(tmp_path: Path) -> None:
    async def scenario(recorded: Recorded) -> None:
        secret = "heron-in-the-reeds " * 400
        for user in ("a", "b"):
            messages = [{"role": "system", "content": secret}, {"role": "user", "content": user}]
            await recorded.client.post({"model": MODEL, "messages": messages, "max_tokens": 2}, path=CHAT)
        first, second = (one["prefix_blocks"] for one in (await recorded.get("requests"))["data"])
        assert first == second
        assert len(first) == len(secret) // BLOCK_BYTES

    check(tmp_path, scenario, max_model_len=8192)
    assert len(list(tmp_path.iterdir())) == 2
    assert all(b"heron" not in path.read_bytes() for path in tmp_path.iterdir())


def test_blocks_end_where_prompts_part_and_tenants_share_none() -> None:
    def blocks(text: str, salt: str = "a") -> tuple[str, ...]:
        return prefix_blocks(Operation.COMPLETION, {"prompt": text}, salt)

    common = "x" * 3 * BLOCK_BYTES
    long = blocks(common + "y" * BLOCK_BYTES)
    assert long[:3] == blocks(common + "z" * BLOCK_BYTES)[:3]
    assert long[3] != blocks(common + "z" * BLOCK_BYTES)[3]
    assert blocks("z" + common)[0] not in long
    assert not set(long) & set(blocks(common + "y" * BLOCK_BYTES, "b"))
    assert len(set(long)) == len(long) == 4
    assert blocks("short") == ()
    assert len(blocks("x" * (MAX_BLOCKS + 9) * BLOCK_BYTES)) == MAX_BLOCKS
    assert prefix_blocks(Operation.COMPLETION, {"prompt": ["x" * 9000]}, "a") == ()
    assert len(prefix_blocks(Operation.COMPLETION, {"prompt": list(range(1000))}, "a")) == 1
    assert prefix_blocks(Operation.EMBEDDING, {"input": common}, "a") == ()


def test_a_key_sees_its_own_tenant_s_requests_and_history_and_an_operator_all(tmp_path: Path) -> None:
    async def scenario(recorded: Recorded) -> None:
        for key, count in ((KEY, 2), (BATCH_KEY, 1)):
            for _ in range(count):
                await recorded.client.post(ask("a", stream=False), key=key)
        for key, query, tenants in (
            (ADMIN_KEY, {}, ["batch", "people", "people"]),
            (ADMIN_KEY, {"tenant": "batch"}, ["batch"]),
            (KEY, {}, ["people", "people"]),
            (BATCH_KEY, {}, ["batch"]),
            (BATCH_KEY, {"tenant": "batch"}, ["batch"]),
        ):
            found = await recorded.get("requests", key, **query)
            assert [one["tenant"] for one in found["data"]] == tenants
            rows = (await recorded.get("history", key, **query))["data"]
            assert sum(row["ok"] for row in rows) == len(tenants)
            named = (await recorded.get("history", key, by="tenant", **query))["data"]
            assert {row["name"]: row["arrivals"] for row in named} == {one: tenants.count(one) for one in tenants}
            (of_name,) = (await recorded.get("history", key, by="name", name=MODEL, **query))["data"]
            assert (of_name["name"], of_name["arrivals"], of_name["ok"]) == (MODEL, len(tenants), len(tenants))
            for route in ("requests", "history"):
                assert (await recorded.get(route, key, name="other", **query))["data"] == []
        for route in ("requests", "history"):
            refused = await recorded.refused(route, BATCH_KEY, 403, tenant="people")
            assert (refused["code"], refused["param"]) == ("not_admin", "tenant")
        assert (await recorded.refused("events", BATCH_KEY, 403))["code"] == "not_admin"

    check(tmp_path, scenario)


def test_the_history_agrees_with_the_requests(tmp_path: Path) -> None:
    async def scenario(recorded: Recorded) -> None:
        for tokens in (3, 4, 5):
            await recorded.client.post(ask("a b", tokens, stream=False))
        await recorded.client.post(ask("a", tokens=10**9, n=10**6), key=BATCH_KEY)
        records = (await recorded.get("requests"))["data"]
        found = await recorded.get("history", step_s=3600, since="2020-01-01T00:00:00Z", by="class")
        assert (found["step_s"], found["by"], found["complete"]) == (3600, "class", True)
        rows = {row["name"]: row for row in found["data"]}
        normal = rows["normal"]
        ok = [one for one in records if one["outcome"] == "ok"]
        assert (normal["ok"], normal["arrivals"], normal["output_tokens"]) == (3, 3, 12)
        assert normal["prompt_tokens"] == sum(one["prompt_tokens"] for one in ok)
        assert normal["request_p95_s"] == pytest.approx(sorted(one["total_s"] for one in ok)[1], rel=0.03, abs=0.001)
        assert rows["low"]["bad_request"] == 1
        assert datetime.fromisoformat(normal["time"]).minute == 0

    check(tmp_path, scenario)


def test_what_waits_now_is_shown_with_what_it_waits_for(tmp_path: Path) -> None:
    async def scenario(recorded: Recorded) -> None:
        first, _ = await running(recorded.client)
        reply = Reply()
        second = recorded.client.posting(ask("waits"), reply=reply, headers={"X-Request-Id": "second"})
        await until(lambda: recorded.client.model.queue.waiting == 1, SOON_S, "it waits")
        found = await recorded.get("requests", waiting=1)
        assert (found["complete"], found["missing"]) == (False, ["quota_actor"])
        (record,) = found["data"]
        recorded.calls.waits = {recorded.client.model.queue.ticket_of(record["request_id"]): "slots"}
        found = await recorded.get("requests", KEY, waiting=1)
        (record,) = found["data"]
        assert (record["client_id"], record["outcome"], record["waits_for"]) == ("second", None, "slots")
        assert 0.0 < record["wait_s"] <= record["total_s"]
        assert "queued_as" not in record
        assert (await recorded.get("requests", BATCH_KEY, waiting=1))["data"] == []
        assert (await recorded.get("requests", waiting=1, model="other"))["data"] == []
        assert (await recorded.get("requests", waiting=1, name="other"))["data"] == []
        assert len((await recorded.get("requests", waiting=1, name=MODEL))["data"]) == 1
        await cancel(first)
        await second
        assert (await recorded.get("requests", waiting=1))["data"] == []
        ended = (await recorded.get("requests", limit=1))["data"]
        assert [one["client_id"] for one in ended] == ["second"]
        assert sum(ended[0]["waited_for"].values()) > 0.0

    check(tmp_path, scenario, slots=1)


@pytest.mark.parametrize(("over_limit", "reason"), [("wait", "limit"), ("refuse", "quota_actor")])
def test_what_waits_aside_for_a_limit_is_shown_with_that_reason(tmp_path: Path, over_limit: str, reason: str) -> None:
    async def scenario(recorded: Recorded) -> None:
        limits = recorded.client.limits
        limits.held = asyncio.Event()
        asking = recorded.client.posting(ask("a"), headers={"X-Request-Id": "mine"})
        await until(lambda: len(limits.asked) == 1, SOON_S, "it is to be charged")
        await asyncio.sleep(2.0)  # of virtual time
        found = await recorded.get("requests", waiting=1)
        assert found["complete"], "the quota actor is not needed for it"
        (record,) = found["data"]
        assert (record["client_id"], record["waits_for"], record["outcome"]) == ("mine", reason, None)
        assert record["wait_s"] == pytest.approx(2.0, abs=0.1)
        limits.held.set()
        assert (await asking).status == 200
        assert (await recorded.get("requests", waiting=1))["data"] == []

    tenants = {"people": {"over_limit": over_limit}}
    check(tmp_path, scenario, client={"limits": {"requests_per_minute": 60}, "admission": {"tenants": tenants}})


def test_what_waits_for_a_first_replica_is_shown_in_the_queue_or_not(tmp_path: Path) -> None:
    async def scenario(recorded: Recorded) -> None:
        generates = recorded.client.posting(ask("a"))
        tokenizes = recorded.client.posting({"model": MODEL, "prompt": "a"}, path="/tokenize")
        model = recorded.client.model
        await until(lambda: model.waiting == 2, SOON_S, "both wait")
        ids = {one["operation"]: one["request_id"] for one in (await recorded.get("requests", waiting=1))["data"]}
        recorded.calls.waits = {model.queue.ticket_of(ids["completion"]): "no_replica"}
        found = (await recorded.get("requests", waiting=1))["data"]
        assert {one["operation"]: one["waits_for"] for one in found} == {
            "completion": "no_replica",
            "tokenize": "no_replica",
        }
        for asking in (generates, tokenizes):
            await cancel(asking)
        assert (await recorded.get("requests", waiting=1))["data"] == []

    check(tmp_path, scenario, replicas=())


def test_an_answer_without_a_receipt_states_what_is_known_of_the_request(tmp_path: Path) -> None:
    async def scenario(recorded: Recorded) -> None:
        runs, reply = await running(recorded.client)
        waits = recorded.client.posting(ask("waits"), headers={"X-Request-Id": "second"})
        queue = recorded.client.model.queue
        await until(lambda: queue.waiting == 1, SOON_S, "it waits")
        running_id = reply.headers["x-serve-app-request-id"]
        for name, state in ((running_id, "runs on r1, since"), (f"cmpl-{running_id}", "runs on"), ("second", "waits")):
            known = await recorded.refused(f"requests/{name}", status=404)
            assert known["code"] == "request_not_ended"
            assert f"has not ended: it {state}" in known["message"]
            assert (await recorded.refused(f"requests/{name}", BATCH_KEY, 404))["code"] == "request_not_found"
        await cancel(waits)
        await cancel(runs)
        assert (await recorded.get("requests/second"))["outcome"] == "cancelled_queued"
        unknown = await recorded.refused("requests/mistyped", status=404)
        assert unknown["code"] == "request_not_found"
        assert "no request 'mistyped' is known to this key: it does not wait or run" in unknown["message"]
        assert unknown["message"].endswith("nor in the request log of the last 7 days")
        recorded.calls.missing = ["n2"]
        lacking = await recorded.refused("requests/mistyped", status=404)
        assert lacking["message"].endswith("; no answer came from node n2")

    check(tmp_path, scenario, slots=1)


def test_pages_have_every_request_once_while_more_come(tmp_path: Path) -> None:
    async def scenario(recorded: Recorded) -> None:
        names = [(await recorded.client.post(ask("a", 1))).headers["x-serve-app-request-id"] for _ in range(5)]
        found = []
        cursor = {}
        while True:
            page = await recorded.get("requests", limit=2, **cursor)
            found += [one["request_id"] for one in page["data"]]
            if page["next_cursor"] is None:
                break
            cursor = {"cursor": page["next_cursor"]}
            await recorded.client.post(ask("a", 1))
        assert found == names[::-1]

    check(tmp_path, scenario)


def test_a_receipt_that_no_router_has_any_more_is_found_in_the_log(tmp_path: Path) -> None:
    async def scenario(recorded: Recorded) -> None:
        reply = await recorded.client.post(ask("a", stream=False), headers={"X-Request-Id": "mine"})
        receipt = await recorded.get("requests/mine")
        await recorded.log.flush()
        for name in (json.loads(reply.body)["id"], "mine"):
            found, _ = await recorded_receipt(recorded.calls, name, None)
            assert found is not None
            assert (found["story"], found["request_id"]) == (receipt["story"], receipt["request_id"])
            assert await recorded_receipt(recorded.calls, name, "batch") == (None, [])
        assert await recorded_receipt(recorded.calls, "yours", None) == (None, [])
        recorded.calls.missing = ["n2"]
        assert await recorded_receipt(recorded.calls, "yours", None) == (None, ["node n2"])
        assert await recorded_receipt(NoCluster(), "mine", None) == (None, ["the request log"])

    check(tmp_path, scenario)


def test_events_are_those_of_log_records_and_come_newest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RECORDS_FOLDER, str(tmp_path))
    logger = logging.getLogger("ray.serve")
    before = [*logger.handlers]
    writer = keep_events(tmp_path, "router-a")
    assert writer is not None
    try:
        logger.warning("Replica %s is gone", "x7", extra=event(EventKind.HEALTH, "x7", model="chat"))
        logger.info("Replica %s is no event", "x7")
        logger.info("Deployment %s has %d", "chat", 2, extra=event(EventKind.SCALING, "chat", target=2))
        writer.write({"at": 1.0, "kind": "snapshot", "subject": "chat", "level": "info", "message": "", "details": {}})
        writer.flush()
    finally:
        logger.handlers = before

    async def scenario(recorded: Recorded) -> None:
        found = await recorded.get("events")
        scaling, health = found["data"]
        assert (scaling["kind"], scaling["subject"], scaling["level"]) == ("scaling", "chat", "info")
        assert (scaling["message"], scaling["details"]) == ("Deployment chat has 2", {"target": 2})
        assert (health["message"], health["level"], health["source"]) == ("Replica x7 is gone", "warning", "router-a")
        assert datetime.fromisoformat(health["time"]).tzinfo is not None
        assert [one["kind"] for one in (await recorded.get("events", kind="snapshot"))["data"]] == ["snapshot"]
        assert [one["kind"] for one in (await recorded.get("events", limit=1))["data"]] == ["scaling"]
        later = (datetime.now(UTC) + timedelta(minutes=1)).isoformat()
        assert (await recorded.get("events", since=later))["data"] == []

    check(tmp_path, scenario)


def test_an_answer_names_a_router_whose_disk_was_full_and_no_request_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def scenario(recorded: Recorded) -> None:
        with monkeypatch.context() as disk:
            disk.setattr(record_files.os, "write", full)
            assert (await recorded.client.post(ask("a", stream=False))).status == 200
            found = await recorded.get("requests")
            assert found["data"] == []
            await asyncio.sleep(1.0)  # of virtual time, by which the log goes, too
            begun = datetime.fromtimestamp(recorded.wall(), UTC).isoformat()
        assert found["missing"] == ["router router: 2 records that its disk did not take"]
        assert (await recorded.client.post(ask("b", stream=False))).status == 200
        assert len((await recorded.get("requests"))["data"]) == 1
        assert not (await recorded.get("requests"))["complete"]
        assert (await recorded.get("requests", since=begun))["complete"], "nothing was lost since then"
        assert (await recorded.get("history", since=begun))["complete"]

    check(tmp_path, scenario)


def test_an_answer_names_the_nodes_that_it_lacks(tmp_path: Path) -> None:
    async def scenario(recorded: Recorded) -> None:
        recorded.calls.missing = ["n2"]
        for route in ("requests", "history", "events"):
            found = await recorded.get(route)
            assert (found["complete"], found["missing"]) == (False, ["node n2"])

    check(tmp_path, scenario)


@pytest.mark.parametrize(
    ("route", "query", "param"),
    [
        ("requests", {"class": "urgent"}, "class"),
        ("requests", {"outcome": "good"}, "outcome"),
        ("requests", {"failed": "yes"}, "failed"),
        ("requests", {"failed": "1", "outcome": "ok"}, "outcome"),
        ("requests", {"limit": "1001"}, "limit"),
        ("requests", {"since": "yesterday"}, "since"),
        ("requests", {"cursor": "here"}, "cursor"),
        ("requests", {"sort": "time"}, "sort"),
        ("history", {"step_s": "90"}, "step_s"),
        ("history", {"by": "key"}, "by"),
        ("history", {"limit": "5"}, "limit"),
        ("events", {"kind": "party"}, "kind"),
    ],
)
def test_a_wrong_parameter_is_named(tmp_path: Path, route: str, query: dict[str, str], param: str) -> None:
    async def scenario(recorded: Recorded) -> None:
        assert (await recorded.refused(route, **query))["param"] == param

    check(tmp_path, scenario)


def test_without_any_node_the_routes_say_so() -> None:
    async def whole(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        client = await Client(cluster, calls=NoCluster()).start()
        for route in ("requests", "history", "events"):
            reply = await client.get(f"/admin/{route}", key=ADMIN_KEY)
            assert (reply.status, reply.error["code"]) == (503, "no_controller")

    run(whole)
