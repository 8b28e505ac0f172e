"""What was sent is what request log, history, terminal and events say, also of a router that is gone."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from serve_app.cli import top
from serve_app.cli.endpoint import Endpoint
from tests.e2e.half_closed import send
from tests.e2e.stack import BATCH_KEY, PEOPLE_KEY, Stack
from tests.e2e.three import EMBED, MODEL, SLOTS, all_routers, process, routers
from tests.waiting import wait_until

EVENT_S = 30.0  # until Serve has another router, and its controller has seen both
WRITTEN_S = 1.0  # a router writes what has ended five times a second
REQUESTS = 5


def now() -> str:
    return datetime.now(UTC).isoformat()


def answers(three: Stack, path: str, key: str = PEOPLE_KEY, **query: Any) -> dict[str, Any]:
    found = three.get(f"/admin/{path}", headers=three.headers(key), params=query)
    assert found.status_code == 200, found.text
    return dict(found.json())


def command(three: Stack, *arguments: str) -> str:
    return three.command(*arguments, key=PEOPLE_KEY, columns=80)


def test_what_was_sent_is_in_the_log_and_the_history_of_all_routers(three: Stack, tmp_path: Path) -> None:
    begun = now()
    sent = Counter[str]()
    tokens = 0
    for router in all_routers(three):
        for number in range(REQUESTS):
            body = {"model": MODEL, "prompt": "a b c", "max_tokens": number + 1}
            tokens += router.post("/v1/completions", body).json()["usage"]["completion_tokens"]
            sent[MODEL] += 1
        assert router.post("/v1/embeddings", {"model": EMBED, "input": "a"}).status_code == 200
        assert router.post("/v1/completions", {"model": MODEL, "prompt": "a", "n": 10**6}).status_code == 400
        sent[EMBED] += 1
        sent[MODEL] += 1
    for router in all_routers(three):
        found = json.loads(router.get("/admin/requests", params={"since": begun, "limit": 100}).text)
        assert (found["complete"], found["missing"]) == (True, [])
        assert Counter(one["model"] for one in found["data"]) == sent
        assert len({one["router"] for one in found["data"]}) == len(all_routers(three))
        times = [one["time"] for one in found["data"]]
        assert times == sorted(times, reverse=True)
    records = answers(three, "requests", since=begun)["data"]
    assert sum(one["output_tokens"] or 0 for one in records if one["model"] == MODEL) == tokens

    history = answers(three, "history", since=begun, by="model", step_s=86_400)
    rows = {row["name"]: row for row in history["data"]}
    shown = json.loads(command(three, "requests", "--since", begun, "--lines", "1000", "--json"))["data"]
    assert {one["request_id"] for one in shown} == {one["request_id"] for one in records}
    path = tmp_path / "requests.jsonl"
    command(three, "requests", "--since", begun, "--export", str(path))
    assert [json.loads(line)["request_id"] for line in path.read_text().splitlines()] == [
        one["request_id"] for one in records
    ]
    assert history["complete"]
    assert rows[MODEL]["ok"] >= sent[MODEL] - len(all_routers(three))  # the whole day's
    assert rows[MODEL]["first_token_p95_s"] > 0.0


@pytest.mark.long
def test_a_minute_s_history_agrees_with_its_requests(three: Stack) -> None:
    """By a tenant that nobody else uses here."""
    before = answers(three, "history", BATCH_KEY, step_s=86_400)["data"]
    for _ in range(REQUESTS):
        body = {"model": MODEL, "prompt": "a b c", "max_tokens": 3}
        assert three.post("/v1/completions", body, headers=three.headers(BATCH_KEY)).status_code == 200
    after = answers(three, "history", BATCH_KEY, step_s=86_400)["data"]
    for name, each in (("arrivals", 1), ("ok", 1), ("output_tokens", 3)):
        grown = sum(row[name] for row in after) - sum(row[name] for row in before)
        assert grown == each * REQUESTS, name
    assert {one["tenant"] for one in answers(three, "requests", BATCH_KEY, limit=1000)["data"]} == {"batch"}


def test_what_waits_is_shown_by_the_terminal_with_its_reasons(three: Stack) -> None:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 8000, "stream": True}
    connections = [send(three, "/v1/completions", body) for _ in range(SLOTS + 3)]
    try:
        wait_until(lambda: len(answers(three, "requests", waiting=1)["data"]) >= 3, 20.0, "three wait")
        found = top.look(Endpoint(three.base_url, PEOPLE_KEY))  # a process would start too late on a busy machine
        (model,) = (one for one in found["models"] if one["model"] == MODEL)
        (queue,) = model["queues"]
        assert queue["class"] == "normal"
        assert queue["waiting"] >= 3
        assert set(queue["reasons"]) <= {"slots", "guard_slots", "turn"}
        assert model["replicas"][0]["slots_total"] == SLOTS
        assert answers(three, "requests", BATCH_KEY, waiting=1)["data"] == []
    finally:
        for connection in connections:
            connection.close()
    found = json.loads(command(three, "top", "--once", "--json"))
    assert {one["model"] for one in found["models"]} >= {MODEL, EMBED}
    assert max(map(len, command(three, "top", "--once").splitlines())) <= 80


@pytest.mark.long
def test_a_killed_router_s_requests_are_found_by_all_others_and_its_end_is_an_event(three: Stack) -> None:
    begun = now()
    victim = all_routers(three)[0]
    answer = victim.post("/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 2})
    name = answer.headers["x-serve-app-request-id"]
    wait_until(lambda: _is_written(three, name), 10 * WRITTEN_S, "it is written")
    os.kill(process(three, victim), signal.SIGKILL)
    wait_until(lambda: victim.base_url in {one.base_url for one in routers(three)}, EVENT_S, "its end", wanted=False)
    all_routers(three)

    receipt = answers(three, f"requests/{name}")
    assert (receipt["outcome"], receipt["output_tokens"]) == ("ok", 2)
    assert receipt["story"][0].startswith(f"{name}: normal request of people to {MODEL}, answered")
    assert "answered after" in command(three, "explain", name)
    assert name in {one["request_id"] for one in answers(three, "requests", since=begun)["data"]}

    def lost() -> bool:
        events = answers(three, "events", since=begun, limit=1000)["data"]
        return any(one["subject"] == "router" and one["details"].get("lost") for one in events)

    wait_until(lost, EVENT_S, "the event of the lost router")
    assert "router" in command(three, "events", "--since", "1h")


def _is_written(three: Stack, name: str) -> bool:
    since = (datetime.now(UTC) - timedelta(minutes=5)).isoformat()
    return name in {one["request_id"] for one in answers(three, "requests", since=since, limit=1000)["data"]}
