"""Keys made, replaced and ended while three routers run, each asked by its own port, and the store's actor killed."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from typer.testing import CliRunner

from serve_app.cli.commands import app
from serve_app.names import STORE_FILE
from tests.e2e.crashing import kill
from tests.e2e.stack import REQUEST_TIMEOUT_S, Stack
from tests.e2e.three import MODEL, RESTART_S, ROUTER, ROUTERS, all_routers, processes, routers
from tests.waiting import wait_until

KEYS = "/admin/keys"
STORE = "ray::StoreOwner"
FOLLOW_S = 1.0  # the promise: every router follows a change within that
BUSY_S = 4.0  # of this test, beside others of the suite
ACTOR_BACK_S = 30.0  # its process starts in two seconds; it reads nothing
WRITES = 30  # keys made while the actor is killed under them


def actor(target: Stack) -> int | None:
    """The process of the store's actor."""
    found = processes(target, STORE)
    return found[0] if len(found) == 1 else None


def statuses(target: list[Stack], key: str) -> set[int]:
    """How the routers answer a request with this key."""
    body = {"model": MODEL, "prompt": "The river", "max_tokens": 2}
    return {one.post("/v1/completions", body, headers=one.headers(key)).status_code for one in target}


def follows(target: list[Stack], key: str, status: int, goal: str) -> None:
    took = wait_until(lambda: statuses(target, key), FOLLOW_S + BUSY_S, goal, wanted={status})
    print(f"{goal}: all routers after {took.wall_s:.2f} s")


def answered(ask: Callable[[], requests.Response]) -> requests.Response:
    """The store's answer: while its actor is away, a call gets a 503 and is repeated."""

    def look() -> list[requests.Response]:
        answer = ask()
        is_away = answer.status_code == 503 and answer.json()["error"]["code"] == "no_store"
        return [] if is_away else [answer]

    (answer,) = wait_until(look, ACTOR_BACK_S, "the store answers").found
    return answer


def created(target: Stack, **fields: Any) -> requests.Response:
    return target.post(KEYS, {"name": "e2e", "tenant": "acme"} | fields)


def made_by(answer: requests.Response) -> dict[str, Any]:
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


def make(target: Stack, **fields: Any) -> dict[str, Any]:
    return made_by(created(target, **fields))


def revoke(target: Stack, made: dict[str, Any]) -> None:
    url = f"{target.base_url}{KEYS}/{made['id']}"
    answer = answered(lambda: requests.delete(url, headers=target.headers(), timeout=REQUEST_TIMEOUT_S))
    assert answer.status_code == 200, answer.text


def listed(target: Stack) -> list[dict[str, Any]]:
    """The records of all keys."""
    return list(answered(lambda: target.get(KEYS)).json()["data"])


@pytest.fixture
def each(three: Stack) -> Iterator[list[Stack]]:
    """Each router; the keys of a test are revoked after it."""
    yield all_routers(three)
    for record in listed(three):
        if record["source"] == "store" and record["state"] == "active":
            revoke(three, record)


def test_a_key_is_made_used_on_every_router_replaced_and_revoked(three: Stack, each: list[Stack]) -> None:
    made = make(each[0])
    follows(each, made["key"], 200, "a new key")
    rotated = each[1].post(f"{KEYS}/{made['id']}/rotate", {"grace_s": 3600}).json()
    follows(each, rotated["key"], 200, "its successor")
    assert statuses(each, made["key"]) == {200}
    revoke(each[2], made)
    for key in (made["key"], rotated["key"]):
        follows(each, key, 401, "a revoked key")
    other = make(each[0], models=["another"])
    follows(each, other["key"], 403, "a key for another model")
    assert other["key"] not in three.get(KEYS).text


def test_the_command_line_makes_and_ends_keys(three: Stack, each: list[Stack]) -> None:
    assert three.cluster is not None
    instance = ["--url", three.base_url, "--key", three.api_key]
    made = CliRunner().invoke(app, ["keys", "create", "laptop", "--max-concurrent", "2", *instance])
    assert made.exit_code == 0, made.output
    columns = made.stdout.strip().split("\t")
    follows(each, columns[-1], 200, "a key of the command line")
    assert CliRunner().invoke(app, ["keys", "revoke", columns[1], *instance]).exit_code == 0
    follows(each, columns[-1], 401, "its end")


def test_every_router_has_the_record_of_who_deployed_and_who_changed_a_key(three: Stack, each: list[Stack]) -> None:
    made = make(each[0])
    revoke(three, made)
    for router in each:
        page = router.get("/admin/audit", params={"limit": 1000}).json()
        assert not page["has_more"]
        changes = [entry for entry in page["data"] if entry["target"] == made["id"]]
        assert [entry["action"] for entry in changes] == ["key.create", "key.revoke"]
        assert {entry["tenant"] for entry in changes} == {"people"}
        assert made["key"] not in str(page)
        deployed = page["data"][0]
        assert (deployed["action"], deployed["author"], deployed["digest_before"]) == ("deploy", "machine", None)
        assert len(deployed["digest_after"]) == 64


def test_the_file_is_in_the_instances_folder_and_its_owners_alone(three: Stack, each: list[Stack]) -> None:
    assert three.cluster is not None
    file = three.cluster.state.store_file
    pid = actor(three)
    assert pid is not None
    assert psutil.Process(pid).environ()[STORE_FILE] == str(file)
    made = make(each[0])
    files = [one for one in file.parent.iterdir() if one.name.startswith(file.name)]
    assert {stat.S_IMODE(one.stat().st_mode) for one in files} == {0o600}
    assert stat.S_IMODE(Path(file.parent).stat().st_mode) == 0o700
    assert [one for one in files if made["key"].encode() in one.read_bytes()] == []


@pytest.mark.long
def test_the_actor_killed_under_writes_loses_no_key_that_was_answered(three: Stack, each: list[Stack]) -> None:
    known = make(each[0])
    follows(each, known["key"], 200, "a key from before")
    made = []
    for number in range(WRITES):
        if number in (10, 20):
            pid = actor(three)
            if pid is not None:
                kill(pid)
        made.append(made_by(answered(lambda router=each[number % ROUTERS]: created(router))))
        assert statuses(each, known["key"]) == {200}
    kept = {one["id"] for one in listed(three)}
    assert [one["id"] for one in made if one["id"] not in kept] == []
    wait_until(lambda: statuses(each, made[-1]["key"]), ACTOR_BACK_S, "the last key on every router", wanted={200})


@pytest.mark.long
def test_a_router_that_starts_while_the_store_stands_still_knows_the_keys_of_the_others(
    three: Stack, each: list[Stack]
) -> None:
    made = make(each[0])
    follows(each, made["key"], 200, "a key from before")
    pid = actor(three)
    before = set(processes(three, ROUTER))
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        kill(processes(three, ROUTER)[0])
        wait_until(lambda: len(set(processes(three, ROUTER)) - before), RESTART_S, "a new router", wanted=1)
        wait_until(lambda: len(routers(three)), RESTART_S, "routers", wanted=ROUTERS)
        wait_until(lambda: statuses(routers(three), made["key"]), RESTART_S, "the key on all of them", wanted={200})
        assert three.get(KEYS).status_code == 503
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: three.get(KEYS).status_code, ACTOR_BACK_S, "the store is back", wanted=200)
