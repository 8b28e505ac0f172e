"""What became of a request: told by every router, whichever one the request came to."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e import stack as stacks
from tests.e2e.observe import ABORT_S, FILL_S, within
from tests.e2e.stack import BATCH_KEY, PEOPLE_KEY, Stack
from tests.e2e.three import routers
from tests.e2e.wire import read_until, send
from tests.requires import requires

MODEL, SLOTS, ROUTERS = "tiny-sim", 4, 2
LONG_TOKENS = 8000  # 40 s: whoever takes a slot with it keeps it until its client leaves
CONFIG: dict[str, Any] = {
    "models": [
        {"name": MODEL, "engine": "simulated", "max_num_seqs": SLOTS, "simulated": {"decode_step_s": 0.005}},
    ],
    "router": {"replicas": ROUTERS},
    "admission": {
        "max_queued": 0,  # who cannot run at once is refused
        "classes": {"normal": {"ttft_slo_s": 60.0, "itl_slo_s": 10.0}},  # kept by whatever is answered at all
    },
    "auth": {
        "keys": [
            {"key": PEOPLE_KEY, "tenant": "people", "max_class": "high", "admin": True},
            {"key": BATCH_KEY, "tenant": "batch", "max_class": "low", "default_class": "low"},
        ]
    },
}
ID_HEADER = "x-serve-app-request-id"
CLI_S = 60.0  # of a command that takes a second


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    requires("linux")
    with stacks.own(tmp_path_factory.mktemp("explain"), CONFIG, "explain") as started:
        within(FILL_S, lambda: len(routers(started)), ROUTERS, "routers")
        yield started


def told(there: Stack, name: str) -> list[dict[str, Any]]:
    """What each router says of a request."""
    answers = [router.get(f"/admin/requests/{name}") for router in routers(there)]
    assert [answer.status_code for answer in answers] == [200] * ROUTERS, [answer.text for answer in answers]
    return [answer.json() for answer in answers]


def test_every_router_tells_of_a_finished_request_by_any_of_its_names(there: Stack) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}
    for number, router in enumerate(routers(there)):
        answer = router.post("/v1/chat/completions", body, headers={"X-Request-Id": f"trace-{number}"})
        names = (answer.headers[ID_HEADER], f"chatcmpl-{answer.headers[ID_HEADER]}", f"trace-{number}")
        receipts = [receipt for name in names for receipt in told(there, name)]
        assert all(receipt == receipts[0] for receipt in receipts)
        found = receipts[0]
        assert (found["outcome"], found["tenant"], found["output_tokens"]) == ("ok", "people", 5)
        assert found["kv_token_s"] > 0
        assert (found["slo"], found["ttft_slo_s"], found["itl_slo_s"]) == ("met", 60.0, 10.0)
        assert found["story"][1].startswith(("Started at once", "Waited"))  # at once, but for a busy machine


def test_every_router_tells_why_a_request_was_refused(there: Stack) -> None:
    body = {"model": MODEL, "prompt": "a", "max_tokens": LONG_TOKENS, "stream": True}
    open_ones, refused = [], ""
    try:
        for _ in range(3 * SLOTS):
            connection = send(there, "/v1/completions", body)
            open_ones.append(connection)
            head = read_until(connection, b"\r\n\r\n").decode()
            if " 429 " in head.splitlines()[0]:
                refused = _id_in(head)
                break
        assert refused, "all slots are taken many times over, and nobody was refused"
        for found in told(there, refused):
            assert (found["outcome"], found["refused"], found["granted"]) == ("refused", "queue_full", False)
            assert found["retry_after_s"] > 0
            assert found["slo"] == "refused"
            assert any(line.startswith("Refused (queue_full)") for line in found["story"])
    finally:
        for connection in open_ones:
            connection.close()


def test_every_router_tells_of_a_client_that_left(there: Stack) -> None:
    def ask() -> str:
        connection = send(there, "/v1/completions", body)
        head = read_until(connection, b"\r\n\r\n").decode()
        if " 200 " in head.splitlines()[0]:
            read_until(connection, b"data: ")
        connection.close()
        return _id_in(head) if " 200 " in head.splitlines()[0] else ""

    body = {"model": MODEL, "prompt": "a", "max_tokens": LONG_TOKENS, "stream": True}
    name = ""
    while not name:  # bound: those of the last test leave their slots within a second
        name = ask()
    within(ABORT_S, lambda: routers(there)[0].get(f"/admin/requests/{name}").status_code, 200, "the receipt")
    for found in told(there, name):
        assert (found["outcome"], found["granted"]) == ("cancelled_running", True)
        assert 0 < found["output_tokens"] < LONG_TOKENS


def test_a_key_finds_its_own_tenant_s_on_any_router_and_an_unknown_name_is_said_to_be_one(there: Stack) -> None:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 2}
    name = there.post("/v1/completions", body, headers=there.headers(BATCH_KEY)).json()["id"]
    for router in routers(there):
        own = router.get(f"/admin/requests/{name}", headers=there.headers(BATCH_KEY))
        assert own.json()["tenant"] == "batch"
        assert router.get(f"/admin/requests/{name}").status_code == 200  # an operator
    others = there.post("/v1/completions", body).json()["id"]
    refused = there.get(f"/admin/requests/{others}", headers=there.headers(BATCH_KEY))
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "request_not_found")
    unknown = there.get("/admin/requests/chatcmpl-0")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "request_not_found")


def test_the_command_tells_the_story(there: Stack) -> None:
    answer = there.post("/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 2})
    command = [sys.executable, "-m", "serve_app.cli", "explain", answer.json()["id"], "--url", there.base_url]
    environment = os.environ | {"SERVE_APP_API_KEY": PEOPLE_KEY, "COLUMNS": "200"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=CLI_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "normal request of people to tiny-sim, answered after" in done.stdout
    assert "  Ran on " in done.stdout


def _id_in(head: str) -> str:
    found = re.search(rf"^{ID_HEADER}: (\w+)", head, re.MULTILINE | re.IGNORECASE)
    assert found is not None, head
    return found[1]
