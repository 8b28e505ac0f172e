"""Files and batches over the official SDK, unchanged: answers, a cancel, a killed worker, a model that sleeps."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types import Batch

from benchmarks.common.processes import titled
from serve_app.names import BATCH_WORKER
from tests.e2e import stack as stacks
from tests.e2e.crashing import kill
from tests.e2e.observe import FILL_S, Observer
from tests.e2e.stack import PEOPLE_KEY, TINY, Stack
from tests.requires import missing, requires
from tests.waiting import wait_until

POLL_S = 0.1
END_S = 30.0  # of a batch that takes seconds
BACK_S = 90.0  # of a batch whose worker dies: its rows return after 30 s, and a new worker starts meanwhile
ENDED = ("completed", "failed", "expired", "cancelled")
COMPLETIONS = "/v1/completions"
MESSAGES = "/v1/messages"
WINDOW = "24h"
ASLEEP = "asleep"
SLEEPS: dict[str, Any] = {
    "models": [
        {
            "name": ASLEEP,
            "engine": "simulated",
            "max_num_seqs": 8,
            "cpus_per_rank": 0.5,
            "simulated": {"decode_step_s": 0.005, "start_s": 0.5},
            "replicas": {"min_replicas": 0, "max_replicas": 1, "downscale_delay_s": 2.0, "look_back_s": 1.5},
        }
    ],
    "batch": {"workers": 1},
}


@pytest.fixture
def lane(stack: Stack) -> Stack:
    """The stack, if it has a worker of batches."""
    if stack.cluster is None:
        missing("the worker of an external stack cannot be seen")
    return stack


def row(name: str, model: str, prompt: str, tokens: int, **more: Any) -> dict[str, Any]:
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0} | more
    return {"custom_id": name, "method": "POST", "url": COMPLETIONS, "body": body}


def begun(client: openai.OpenAI, rows: list[dict[str, Any]], endpoint: Any = COMPLETIONS) -> Batch:
    """A batch of these rows, from its upload on."""
    content = io.BytesIO(b"".join(json.dumps(one).encode() + b"\n" for one in rows))
    file = client.files.create(file=("rows.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window=WINDOW)


def ended(client: openai.OpenAI, batch: Batch, bound_s: float = END_S) -> Batch:
    def look() -> Batch | None:
        found = client.batches.retrieve(batch.id)
        return found if found.status in ENDED else None

    seen = lambda: client.batches.retrieve(batch.id)  # noqa: E731
    found = wait_until(look, bound_s, "the batch has ended", seen=seen, poll_s=POLL_S).found
    assert found is not None
    return found


def lines(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    return [] if file_id is None else [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def workers(own_stack: Stack) -> list[int]:
    assert own_stack.cluster is not None
    title = f"ray::ServeReplica:serve_app:{BATCH_WORKER}"
    return titled(own_stack.cluster.pids(), title)


def test_a_batch_has_an_answer_or_an_error_for_each_of_its_rows(
    lane: Stack, client: openai.OpenAI, simulated: str
) -> None:
    rows = [row(f"row {number}", simulated, f"Say {number}", 5 + number) for number in range(30)]
    rows[7]["body"]["prompt"] = ""  # the router refuses it
    done = ended(client, begun(client, rows))
    assert (done.status, done.errors) == ("completed", None)
    assert done.request_counts is not None
    assert done.request_counts.model_dump() == {"total": 30, "completed": 29, "failed": 1}
    found = lines(client, done.output_file_id)
    wrong = lines(client, done.error_file_id)
    assert [one["custom_id"] for one in found] == [one["custom_id"] for one in rows if one is not rows[7]]
    tokens = [one["response"]["body"]["usage"]["completion_tokens"] for one in found]
    assert tokens == [one["body"]["max_tokens"] for one in rows if one is not rows[7]]
    assert {(one["response"]["status_code"], one["error"]) for one in found} == {(200, None)}
    assert [(one["custom_id"], one["response"]["status_code"]) for one in wrong] == [("row 7", 400)]
    counts = lambda: f"{simulated} (batch)" in lane.get("/admin/usage?by=model").text  # noqa: E731
    wait_until(counts, END_S, "its use is counted", poll_s=POLL_S)  # what has ended is counted within seconds


def test_a_batch_has_the_answers_of_the_same_requests_one_by_one(lane: Stack, client: openai.OpenAI) -> None:
    if TINY not in lane.models:
        missing(f"the external stack does not serve {TINY}")
    rows = [
        row(f"row {number}", TINY, f"The {word} of", 12) for number, word in enumerate(["king", "sea", "end", "day"])
    ]
    done = ended(client, begun(client, rows))
    batched = [one["response"]["body"]["choices"][0]["text"] for one in lines(client, done.output_file_id)]
    single = [client.completions.create(**one["body"]).choices[0].text for one in rows]
    assert batched == single


def test_a_row_may_be_a_messages_request(lane: Stack, client: openai.OpenAI) -> None:
    if TINY not in lane.models:
        missing(f"the external stack does not serve {TINY}")
    asked = {"model": TINY, "max_tokens": 8, "temperature": 0}
    bodies = [asked | {"messages": [{"role": "user", "content": text}]} for text in ("Hello", "What is serve-app?")]
    bodies.append(asked | {"messages": []})  # refused, in Anthropic's form
    rows = [
        {"custom_id": str(number), "method": "POST", "url": MESSAGES, "body": body}
        for number, body in enumerate(bodies)
    ]
    done = ended(client, begun(client, rows, MESSAGES))
    found = [one["response"]["body"] for one in lines(client, done.output_file_id)]
    single = [lane.post(MESSAGES, body).json() for body in bodies[:2]]
    assert [one["content"] for one in found] == [one["content"] for one in single]
    assert {one["type"] for one in found} == {"message"}
    (wrong,) = lines(client, done.error_file_id)
    assert wrong["response"]["body"]["error"]["type"] == "invalid_request_error"


def test_a_cancelled_batch_keeps_the_answers_that_it_has(lane: Stack, client: openai.OpenAI, simulated: str) -> None:
    rows = [row(f"row {number}", simulated, "Go on", 20 if number < 8 else 400) for number in range(60)]
    batch = begun(client, rows)
    wait_until(lambda: counted(client, batch) > 0, FILL_S, "rows with an answer")
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    done = ended(client, batch)
    assert done.status == "cancelled"
    found = lines(client, done.output_file_id)
    wrong = lines(client, done.error_file_id)
    assert Counter(one["custom_id"] for one in found + wrong) == Counter(one["custom_id"] for one in rows)
    assert 0 < len(found) < len(rows)
    assert {one["error"]["code"] for one in wrong} == {"batch_cancelled"}


def counted(client: openai.OpenAI, batch: Batch) -> int:
    counts = client.batches.retrieve(batch.id).request_counts
    return 0 if counts is None else counts.completed


@pytest.mark.long  # 30 s of waiting for a lease; in one process: tests/batch/test_worker_kills.py
def test_a_batch_whose_worker_is_killed_misses_no_row_and_has_none_twice(
    lane: Stack, client: openai.OpenAI, simulated: str
) -> None:
    rows = [row(f"row {number}", simulated, f"Say {number}", 100) for number in range(60)]
    batch = begun(client, rows)
    wait_until(lambda: counted(client, batch) > 0, FILL_S, "rows with an answer")
    for pid in workers(lane):
        kill(pid)
    done = ended(client, batch, BACK_S)
    assert done.status == "completed"
    found = lines(client, done.output_file_id)
    assert [one["custom_id"] for one in found] == [one["custom_id"] for one in rows]
    assert lines(client, done.error_file_id) == []


@pytest.fixture
def sleeping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    requires("linux")
    with stacks.own(tmp_path_factory.mktemp("asleep"), SLEEPS, name="asleep") as own_stack:
        yield own_stack


@pytest.mark.long
def test_a_batch_wakes_its_model_and_lets_it_sleep_when_it_is_done(sleeping: Stack) -> None:
    observer = Observer(sleeping)
    with sleeping.client(PEOPLE_KEY) as client:
        done = ended(client, begun(client, [row(f"row {one}", ASLEEP, "Hello", 50) for one in range(40)]), BACK_S)
        assert done.status == "completed"
        assert len(lines(client, done.output_file_id)) == 40
    slots = lambda: observer.value("serve_app_slots", model=ASLEEP)  # noqa: E731
    wait_until(slots, END_S, "slots of the model", wanted=0.0)
