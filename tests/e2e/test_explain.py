"""What became of a request: told by every router, whichever one the request came to."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

from tests.e2e.half_closed import read_until, send
from tests.e2e.observe import ABORT_S
from tests.e2e.stack import BATCH_KEY, PEOPLE_KEY, Stack
from tests.e2e.three import MODEL, ROUTERS, SLOTS, all_routers, routers
from tests.waiting import wait_until

LONG_TOKENS = 8000  # 40 s: whoever takes a slot with it keeps it until its client leaves
ID_HEADER = "x-serve-app-request-id"
CLI_S = 60.0  # of a command that takes a second


def receipts_of(three: Stack, name: str) -> list[dict[str, Any]]:
    """What each router says of a request."""
    answers = [router.get(f"/admin/requests/{name}") for router in routers(three)]
    assert [answer.status_code for answer in answers] == [200] * ROUTERS, [answer.text for answer in answers]
    return [answer.json() for answer in answers]


def test_every_router_tells_of_a_finished_request_by_any_of_its_names(three: Stack) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}
    for number, router in enumerate(all_routers(three)):
        answer = router.post("/v1/chat/completions", body, headers={"X-Request-Id": f"trace-{number}"})
        names = (answer.headers[ID_HEADER], f"chatcmpl-{answer.headers[ID_HEADER]}", f"trace-{number}")
        receipts = [receipt for name in names for receipt in receipts_of(three, name)]
        assert all(receipt == receipts[0] for receipt in receipts)
        found = receipts[0]
        assert (found["outcome"], found["tenant"], found["output_tokens"]) == ("ok", "people", 5)
        assert found["kv_token_s"] > 0
        assert (found["slo"], found["ttft_slo_s"], found["itl_slo_s"]) == ("met", 60.0, 10.0)
        assert found["story"][1].startswith(("Started", "Waited"))  # at once, but for a busy machine


def test_every_router_tells_why_a_request_was_refused(three: Stack) -> None:
    body = {"model": MODEL, "prompt": "a", "max_tokens": LONG_TOKENS, "stream": True, "priority": "critical"}
    open_ones = []
    refused = ""
    try:
        for _ in range(3 * SLOTS):
            connection = send(three, "/v1/completions", body)
            open_ones.append(connection)
            head = read_until(connection, b"\r\n\r\n").decode()
            if " 429 " in head.splitlines()[0]:
                refused = _id_in(head)
                break
        assert refused, "all slots are taken many times over, and nobody was refused"
        for found in receipts_of(three, refused):
            assert (found["outcome"], found["refused"], found["granted"]) == ("refused", "queue_full", False)
            assert found["retry_after_s"] > 0
            assert found["slo"] == "refused"
            assert any(line.startswith("Refused (queue_full)") for line in found["story"])
    finally:
        for connection in open_ones:
            connection.close()


def test_every_router_tells_of_a_client_that_left(three: Stack) -> None:
    def ask() -> str:
        connection = send(three, "/v1/completions", body)
        head = read_until(connection, b"\r\n\r\n").decode()
        if " 200 " in head.splitlines()[0]:
            read_until(connection, b"data: ")
        connection.close()
        return _id_in(head) if " 200 " in head.splitlines()[0] else ""

    body = {"model": MODEL, "prompt": "a", "max_tokens": LONG_TOKENS, "stream": True}
    name = ""
    while not name:  # bound: those of the last test leave their slots within a second
        name = ask()
    wait_until(
        lambda: all_routers(three)[0].get(f"/admin/requests/{name}").status_code, ABORT_S, "the receipt", wanted=200
    )
    for found in receipts_of(three, name):
        assert (found["outcome"], found["granted"]) == ("cancelled_running", True)
        assert 0 < found["output_tokens"] < LONG_TOKENS


def test_a_key_finds_its_own_tenant_s_on_any_router_and_an_unknown_name_is_reported_to_be_one(three: Stack) -> None:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 2}
    name = three.post("/v1/completions", body, headers=three.headers(BATCH_KEY)).json()["id"]
    for router in all_routers(three):
        own = router.get(f"/admin/requests/{name}", headers=three.headers(BATCH_KEY))
        assert own.json()["tenant"] == "batch"
        assert router.get(f"/admin/requests/{name}").status_code == 200  # an operator
    others = three.post("/v1/completions", body).json()["id"]
    refused = three.get(f"/admin/requests/{others}", headers=three.headers(BATCH_KEY))
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "request_not_found")
    unknown = three.get("/admin/requests/chatcmpl-0")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "request_not_found")


def test_the_command_tells_the_story(three: Stack) -> None:
    answer = three.post("/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 2})
    command = [sys.executable, "-m", "serve_app.cli", "explain", answer.json()["id"], "--url", three.base_url]
    environment = os.environ | {"SERVE_APP_API_KEY": PEOPLE_KEY, "COLUMNS": "200"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=CLI_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "normal request of people to tiny-sim, answered after" in done.stdout
    assert "  Ran on " in done.stdout


def _id_in(head: str) -> str:
    found = re.search(rf"^{ID_HEADER}: (\w+)", head, re.MULTILINE | re.IGNORECASE)
    assert found is not None, head
    return found[1]
