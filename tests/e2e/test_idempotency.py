"""An Idempotency-Key on several routers: the answer outlives the router that ran the request, and a run its client.

All of it is within the grace of 30 s, in which a run waits for a reader."""

from __future__ import annotations

import os
import signal
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests

from tests.e2e.observe import Observer
from tests.e2e.stack import REQUEST_TIMEOUT_S, Stack
from tests.e2e.three import MODEL, ROUTERS, all_routers, process, routers
from tests.waiting import wait_until

# tokens: 0.1 s and 3 s of the engine
SHORT = 20
LONG = 600
GONE_S = 30.0  # for Ray and HAProxy to notice a dead router
REPLAY = "x-idempotent-replay"
ID_HEADER = "x-serve-app-request-id"


def keyed() -> dict[str, str]:
    return {"Idempotency-Key": uuid.uuid4().hex}


def body(tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "The river", "max_tokens": tokens, "ignore_eos": True} | more


def restarts(target: Stack) -> float:
    """Runs that were started anew, by the metrics of all routers."""
    lines = target.get("/metrics").text.splitlines()
    return sum(
        float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith("serve_app_idempotent_requests_total{") and "restarted" in line
    )


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_outlives_the_router_that_ran_it(three: Stack, stream: bool) -> None:
    first, *others = all_routers(three)
    headers = keyed()
    asked = body(SHORT, stream=stream)
    answer = first.post("/v1/completions", asked, headers=headers)
    assert answer.status_code == 200
    os.kill(process(three, first), signal.SIGKILL)
    for other in others:  # at once, before anyone has noticed
        again = other.post("/v1/completions", asked, headers=headers)
        assert (again.status_code, again.headers.get(REPLAY)) == (200, "true")
        assert again.content == answer.content
        wrong = other.post("/v1/completions", body(SHORT + 1, stream=stream), headers=headers)
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "idempotency_key_reused")
    all_routers(three)


def test_a_repeat_on_another_router_joins_a_stream_whose_client_was_cut(three: Stack) -> None:
    first, other, *_ = all_routers(three)
    headers = keyed()
    asked = body(LONG, stream=True)
    url = f"{first.base_url}/v1/completions"
    whole = {**first.headers(), **headers}
    with requests.post(url, json=asked, headers=whole, stream=True, timeout=REQUEST_TIMEOUT_S) as cut:
        head = next(cut.iter_content(200))
    joined = other.post("/v1/completions", asked, headers=headers)
    assert joined.headers.get(REPLAY) == "true"
    assert joined.content.startswith(head)
    assert joined.content.endswith(b"data: [DONE]\n\n")
    receipt = three.get(f"/admin/requests/{joined.headers[ID_HEADER]}").json()
    assert not receipt["granted"], "nothing ran for the repeat"


@pytest.mark.long
def test_a_run_whose_router_was_killed_starts_anew_once(three: Stack) -> None:
    first, *others = all_routers(three)
    headers = keyed()
    asked = body(LONG)
    before = restarts(three)
    with ThreadPoolExecutor(3) as pool:
        cut = pool.submit(first.post, "/v1/completions", asked, headers=headers)
        observer = Observer(three)
        wait_until(lambda: observer.figures(MODEL)[0], GONE_S, "it runs", wanted=1)
        os.kill(process(three, first), signal.SIGKILL)
        repeats = [pool.submit(other.post, "/v1/completions", asked, headers=headers) for other in others]
        answers = [one.result() for one in repeats]
        assert isinstance(cut.exception(), requests.ConnectionError)
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.content for answer in answers}) == 1
    own = [answer for answer in answers if REPLAY not in answer.headers]
    assert len(own) == 1
    receipt = others[0].get(f"/admin/requests/{own[0].headers[ID_HEADER]}").json()
    assert receipt["router_losses"] == 1
    assert restarts(three) == before + 1
    wait_until(lambda: len(routers(three)), GONE_S, "routers", wanted=ROUTERS)
