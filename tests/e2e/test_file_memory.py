"""What files of batches hold in memory, in all processes that they pass."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import requests

from benchmarks.common.processes import title_of
from serve_app.names import BATCH_WORKER, ROUTER
from tests.e2e import stack as stacks
from tests.e2e.stack import REQUEST_TIMEOUT_S, Stack
from tests.e2e.test_batches import COMPLETIONS, WINDOW, ended
from tests.requires import missing, requires

MB = 2**20
REPLICA = "ray::ServeReplica:serve_app:"
PROCESSES = (REPLICA + ROUTER, REPLICA + BATCH_WORKER, "ray::FileOwner", "ray::StoreOwner")
# the client has sent all of it in a tenth of that, where nothing holds it back
STOPPED_FILE = 64 * MB
STOPPED_S = 2.0
AHEAD_MB = 24  # pieces on their way, and what allocators keep; a third of the file
# the most rows of a batch, in 100 MB
LARGE_ROWS = 50_000
LARGE_PROMPT = 1900
GROWTH_MB = 64  # of any process, whatever the size of the file: some 30 were seen
LARGE_S = 1800.0  # 150 rows a second were seen on two cores that others used as well
LARGE: dict[str, Any] = {
    "models": [
        {
            "name": "wide",
            "engine": "simulated",
            "max_num_seqs": 128,
            "cpus_per_rank": 0.5,
            "simulated": {"decode_step_s": 0.005, "kv_cache_tokens": 1_000_000},
        }
    ],
    "batch": {"workers": 1},
}


def processes(large_stack: Stack) -> dict[int, str]:
    if large_stack.cluster is None:
        missing("the processes of an external stack cannot be seen")
    assert large_stack.cluster is not None
    titles = {pid: title_of(pid) for pid in large_stack.cluster.pids()}
    return {pid: name for pid, title in titles.items() for name in PROCESSES if title.startswith(name)}


def memory_mb(pid: int, field: str) -> float:
    """VmRSS: now; VmHWM: the most so far."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def row(number: int, prompt: str, tokens: object = 1) -> bytes:
    body = {"model": "wide", "prompt": prompt, "max_tokens": tokens}
    found = {"custom_id": f"row {number}", "method": "POST", "url": COMPLETIONS, "body": body}
    return json.dumps(found).encode() + b"\n"


def form(size: int) -> Iterator[bytes]:
    """An upload of rows of 64 KiB."""
    part = '--b\r\nContent-Disposition: form-data; name="{}"{}\r\n\r\n'
    yield (part.format("purpose", "") + "batch\r\n" + part.format("file", '; filename="rows.jsonl"')).encode()
    for number in range(size // 65_536):
        yield row(number, "x" * 65_000)
    yield b"\r\n--b--\r\n"


def upload(large_stack: Stack, size: int) -> requests.Response:
    return large_stack.post("/v1/files", data=form(size), headers={"Content-Type": "multipart/form-data; boundary=b"})


def test_a_client_waits_while_its_file_cannot_be_written_and_no_router_holds_it(
    stack: Stack, client: openai.OpenAI
) -> None:
    small = upload(stack, 65_536)
    assert small.status_code == 200, small.text
    found = processes(stack)
    (owner,) = [pid for pid, name in found.items() if name == "ray::FileOwner"]
    routers = [pid for pid, name in found.items() if name == REPLICA + ROUTER]
    before = {pid: memory_mb(pid, "VmRSS") for pid in routers}
    answers: list[requests.Response] = []
    uploading = threading.Thread(target=lambda: answers.append(upload(stack, STOPPED_FILE)))
    os.kill(owner, signal.SIGSTOP)
    try:
        uploading.start()
        time.sleep(STOPPED_S)  # the file's bytes would have arrived
        after = {pid: memory_mb(pid, "VmRSS") for pid in routers}
        assert not answers
    finally:
        os.kill(owner, signal.SIGCONT)
        uploading.join(REQUEST_TIMEOUT_S)
    assert [one.status_code for one in answers] == [200]
    for answer in (small, *answers):
        client.files.delete(answer.json()["id"])
    assert {pid: after[pid] - before[pid] for pid in routers if after[pid] - before[pid] > AHEAD_MB} == {}


@pytest.fixture
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    requires("linux")
    with stacks.own(tmp_path_factory.mktemp("large"), LARGE, name="large") as large_stack:
        yield large_stack


@pytest.mark.long
def test_a_file_of_a_hundred_megabytes_and_its_results_are_in_no_process_s_memory(large: Stack, tmp_path: Path) -> None:
    """Every second row is refused, so that both files are long."""
    path = tmp_path / "rows.jsonl"
    with path.open("wb") as file:
        file.writelines(row(n, "x" * LARGE_PROMPT, "no number" if n % 2 else 1) for n in range(LARGE_ROWS))
    with large.client(timeout=LARGE_S) as client:
        warm = client.files.create(file=("one.jsonl", row(0, "one")), purpose="batch")
        made = lambda file_id: client.batches.create(  # noqa: E731
            input_file_id=file_id, endpoint=COMPLETIONS, completion_window=WINDOW
        )
        assert ended(client, made(warm.id)).status == "completed"
        before = {pid: memory_mb(pid, "VmHWM") for pid in processes(large)}
        with path.open("rb") as content:
            uploaded = client.files.create(file=("rows.jsonl", content), purpose="batch")
        assert uploaded.bytes == path.stat().st_size
        assert grown(large, before) == {}, "while it was uploaded"
        done = ended(client, made(uploaded.id), LARGE_S)
        assert done.request_counts is not None
        assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", 25_000, 25_000)
        assert grown(large, before) == {}, "while its rows ran"
        for file_id, remainder in ((done.output_file_id, 0), (done.error_file_id, 1)):
            assert file_id is not None
            numbers = (int(json.loads(line)["custom_id"].split()[1]) for line in streamed(client, file_id))
            assert all(number == 2 * index + remainder for index, number in enumerate(numbers))
        assert grown(large, before) == {}, "while its results were downloaded"


def streamed(client: openai.OpenAI, file_id: str) -> Iterator[str]:
    with client.files.with_streaming_response.content(file_id) as answer:
        yield from answer.iter_lines()


def grown(large_stack: Stack, before: dict[int, float]) -> dict[str, float]:
    """By how many MB, of those that have grown by more than they may."""
    found = {name: memory_mb(pid, "VmHWM") - before[pid] for pid, name in processes(large_stack).items()}
    return {name: round(more) for name, more in found.items() if more > GROWTH_MB}
