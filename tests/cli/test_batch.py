"""`serve-app batch` against an endpoint of the tests: submit, list, status, watch, cancel, results."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from serve_app.cli import batch_commands
from serve_app.cli.batch import show, show_list
from tests.cli.test_chat import KEY, reply, run, serve  # noqa: F401 - fixtures
from tests.cli.test_layout import piped, terminal
from tests.fakes.batch_endpoint import CREATED_AT, BatchEndpoint, batch_endpoint
from tests.requires import requires

requires("linux")

CHAT = "/v1/chat/completions"
ROWS = 3
DOCUMENT = Path(__file__).parents[2] / "docs/how-to/run-batches.md"
Batch = Callable[..., Result]


def row(number: int, url: str = CHAT, **fields: Any) -> bytes:
    body = {"model": "tiny", "messages": [{"role": "user", "content": f"Grüße {number}"}]}
    return json.dumps({"custom_id": f"row-{number}", "method": "POST", "url": url, "body": body} | fields).encode()


def write(path: Path, *lines: bytes) -> Path:
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / 'the "night" of grüße.jsonl', *map(row, range(ROWS)))


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[BatchEndpoint]:
    monkeypatch.setattr(batch_commands, "PIPED_POLL_S", 0.0)
    with batch_endpoint(KEY) as found:
        yield found


@pytest.fixture
def batch(run: Callable[..., Result], endpoint: BatchEndpoint) -> Batch:  # noqa: F811
    """Runs `serve-app batch ...` at the endpoint."""
    return lambda *arguments: run("batch", arguments[0], "--url", endpoint.url, "--key", KEY, *map(str, arguments[1:]))


def counts(completed: int, failed: int, total: int = ROWS) -> dict[str, Any]:
    return {"request_counts": {"total": total, "completed": completed, "failed": failed}}


def test_submit_uploads_the_file_and_makes_a_batch_of_it(batch: Batch, endpoint: BatchEndpoint, file: Path) -> None:
    result = batch("submit", file, "--window", "48h", "--metadata", "team=night", "--metadata", "a=b=c")
    assert result.exit_code == 0, result.output
    ((file_id, content),) = endpoint.files.items()
    assert content == file.read_bytes()
    assert endpoint.names[file_id] == "the %22night%22 of grüße.jsonl"
    ((batch_id, made),) = endpoint.batches.items()
    assert (made["input_file_id"], made["endpoint"], made["completion_window"]) == (file_id, CHAT, "48h")
    assert made["metadata"] == {"team": "night", "a": "b=c"}
    assert result.stdout.splitlines()[0].split("\t")[:3] == ["batch", batch_id, "validating"]
    assert f"serve-app batch watch {batch_id} --url {endpoint.url}" in result.stderr


def test_json_is_the_batch_and_nothing_else(batch: Batch, endpoint: BatchEndpoint, file: Path) -> None:
    made = batch("submit", file, "--json")
    batch_id = json.loads(made.stdout)["id"]
    assert made.stderr == ""
    assert json.loads(batch("status", batch_id, "--json").stdout) == endpoint.batches[batch_id]
    assert json.loads(batch("cancel", batch_id, "--json").stdout)["status"] == "cancelling"
    assert [one["id"] for one in json.loads(batch("list", "--json").stdout)["data"]] == [batch_id]


def test_what_is_wrong_with_a_file_is_reported_before_anything_is_sent(
    batch: Batch, endpoint: BatchEndpoint, tmp_path: Path
) -> None:
    lines = row(1), b"{no json", b"", row(1), row(2, "/v1/embeddings"), row(3, method="GET")
    result = batch("submit", write(tmp_path / "bad.jsonl", *lines))
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    wrong = r"bad\.jsonl: line 2: .* line 4: .*custom_id.* line 5: .*/v1/embeddings.* Nothing was sent\."
    assert re.search(wrong, result.stderr)
    assert "line 6" not in result.stderr
    assert endpoint.asked == []


def test_rows_for_another_endpoint_are_wrong(batch: Batch, endpoint: BatchEndpoint, file: Path) -> None:
    result = batch("submit", file, "--endpoint", "/v1/responses")
    assert result.exit_code == 2
    assert "line 1: The url is /v1/chat/completions, the batch is for /v1/responses." in result.stderr
    assert endpoint.asked == []


@pytest.mark.parametrize("kind", ["missing", "folder", "empty"])
def test_a_file_that_is_none_is_one_line(batch: Batch, endpoint: BatchEndpoint, tmp_path: Path, kind: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").touch()
    result = batch("submit", tmp_path / kind)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert str(tmp_path / kind) in result.stderr
    assert endpoint.asked == []


def test_wrong_metadata_is_one_line(batch: Batch, endpoint: BatchEndpoint, file: Path) -> None:
    result = batch("submit", file, "--metadata", "team")
    assert (result.exit_code, endpoint.asked) == (2, [])
    assert "--metadata team" in result.stderr


def test_a_key_that_is_refused_uploads_nothing(run: Callable[..., Result], endpoint: BatchEndpoint, file: Path) -> None:  # noqa: F811
    result = run("batch", "submit", "--url", endpoint.url, "--key", "sk-other", str(file))
    assert result.exit_code == 1
    assert "the key was refused" in result.stderr
    assert endpoint.asked == ["GET /v1/batches"]


def test_a_batch_that_is_refused_leaves_no_file_behind(batch: Batch, endpoint: BatchEndpoint, file: Path) -> None:
    endpoint.refusals["POST /v1/batches"] = [(400, "no batch is run here")]
    result = batch("submit", file)
    assert (result.exit_code, endpoint.files) == (2, {})
    assert result.stderr == "error: 400: no batch is run here\n"


def test_a_batch_that_may_have_been_made_is_looked_for_in_the_list(
    batch: Batch, endpoint: BatchEndpoint, file: Path
) -> None:
    endpoint.refusals["POST /v1/batches"] = [(503, "the store is away")]
    result = batch("submit", file)
    assert result.exit_code == 1
    (file_id,) = endpoint.files
    assert file_id in result.stderr
    assert "serve-app batch list" in result.stderr


def test_submit_with_watch_ends_with_the_status_of_the_batch(batch: Batch, endpoint: BatchEndpoint, file: Path) -> None:
    endpoint.steps += [
        {"status": "in_progress", **counts(0, 0)},
        {"status": "in_progress", **counts(2, 0)},
        {"status": "completed", "output_file_id": "file-out", **counts(2, 1)},
    ]
    result = batch("submit", file, "--watch")
    assert result.exit_code == 0, result.output
    rows = [line.split("\t") for line in result.stdout.splitlines()]
    assert [(one[3], *one[4:7]) for one in rows] == [
        ("validating", "0", "0", "0"),
        ("in_progress", "0", "0", "3"),
        ("in_progress", "2", "0", "3"),
        ("completed", "2", "1", "3"),
    ]
    assert "serve-app batch results" in result.stderr


@pytest.mark.parametrize(("status", "code"), [("completed", 0), ("failed", 1), ("expired", 1), ("cancelled", 1)])
def test_the_exit_status_of_a_watch_is_that_of_the_batch(
    batch: Batch, endpoint: BatchEndpoint, status: str, code: int
) -> None:
    assert batch("watch", endpoint.add(1, status=status)).exit_code == code


def test_a_watch_says_why_a_batch_has_failed(batch: Batch, endpoint: BatchEndpoint) -> None:
    errors = {"data": [{"code": "model_not_found", "line": 1, "message": "there is no model x"}]}
    batch_id = endpoint.add(1, status="failed", errors=errors)
    assert batch("watch", batch_id).stderr == f"{batch_id} has failed: there is no model x\n"


def test_a_watch_says_where_the_answers_and_the_failed_rows_are(batch: Batch, endpoint: BatchEndpoint) -> None:
    batch_id = endpoint.add(1, status="completed", error_file_id="file-err", **counts(0, 3))
    (hint,) = batch("watch", batch_id).stderr.splitlines()
    assert hint.startswith(f"rows failed: serve-app batch results {batch_id} --errors --url")


def test_a_watch_goes_on_while_the_endpoint_fails_and_says_so(batch: Batch, endpoint: BatchEndpoint) -> None:
    batch_id = endpoint.add(1, status="in_progress", **counts(1, 0))
    endpoint.steps += [{}, {"status": "completed"}]
    endpoint.refusals[f"GET /v1/batches/{batch_id}"] = [None, (500, "a router has died")]
    result = batch("watch", batch_id)
    assert result.exit_code == 0, result.output
    assert "no answer: 500: a router has died; the watch goes on" in result.stderr
    assert "it answers again" in result.stderr


def test_ctrl_c_leaves_the_batch_and_says_how_to_come_back(
    batch: Batch, endpoint: BatchEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(batch_commands.Watch, "run", interrupted)
    batch_id = endpoint.add(1, status="in_progress")
    result = batch("watch", batch_id)
    assert result.exit_code == 130
    assert f"{batch_id} goes on; come back with: serve-app batch watch {batch_id} --url" in result.stderr
    assert endpoint.batches[batch_id]["status"] == "in_progress"


def test_the_list_has_the_newest_first_and_pages(batch: Batch, endpoint: BatchEndpoint) -> None:
    ids = [endpoint.add(number) for number in range(250)]
    shown = [line.split("\t")[1] for line in batch("list").stdout.splitlines()]
    assert shown == ids[:-21:-1]
    page = json.loads(batch("list", "--limit", 220, "--after", shown[-1], "--json").stdout)
    assert [one["id"] for one in page["data"]] == ids[229:9:-1]
    assert (page["has_more"], page["last_id"]) == (True, ids[10])
    assert json.loads(batch("list", "--after", ids[10], "--json").stdout)["has_more"] is False
    assert endpoint.asked.count("GET /v1/batches") == 1 + 3 + 1


RUNNING: dict[str, Any] = {
    "id": "batch_0123456789abcdef0123456789abcdef",
    "status": "in_progress",
    "endpoint": CHAT,
    "created_at": CREATED_AT,
    "in_progress_at": CREATED_AT,
    "expires_at": CREATED_AT + 1,
    "input_file_id": "file-in",
    "output_file_id": None,
    "error_file_id": None,
    "metadata": {"team": "night"},
    **counts(1, 1, 4),
}
FAILED = RUNNING | {
    "status": "failed",
    "failed_at": CREATED_AT + 60,
    "request_counts": None,
    "errors": {"data": [{"code": "model_not_found", "line": 7, "message": "there is no model x", "param": None}]},
}


def test_a_terminal_shows_where_a_batch_stands() -> None:
    lines = [line.strip() for line in terminal(show, RUNNING, 120)]
    assert lines[0] == f"{RUNNING['id']}: in_progress  2 of 4 rows  1 failed"
    assert re.fullmatch(r"0.0 rows/s since it began  expected end .*Z, in .* d.*  after it expires", lines[1])
    assert lines[2:] == [
        f"{CHAT}  created 2025-11-25T19:46:40Z  expires 2025-11-25T19:46:41Z",
        "input  file-in",
        "team=night",
    ]
    assert [line.strip() for line in terminal(show, FAILED, 120)] == [
        f"{RUNNING['id']}: failed",
        f"{CHAT}  created 2025-11-25T19:46:40Z  ended 2025-11-25T19:47:40Z",
        "input  file-in",
        "team=night",
        "line 7: there is no model x",
    ]


def test_in_a_pipe_a_batch_is_records() -> None:
    head, *others = piped(show, FAILED)
    assert head == [
        *("batch", RUNNING["id"], "failed", "0", "0", "0"),
        *(CHAT, "2025-11-25T19:46:40Z", "2025-11-25T19:47:40Z"),
    ]
    assert others == [
        ["file", "input", "file-in"],
        ["metadata", "team", "night"],
        ["error", "7", "model_not_found", "there is no model x"],
    ]
    assert [line[0] for line in piped(show, RUNNING)] == ["batch", "forecast", "file", "metadata"]
    assert piped(show_list, {"data": [], "has_more": False, "last_id": None}) == []


def test_a_list_says_how_to_see_older_ones() -> None:
    found = {"data": [RUNNING], "has_more": True, "last_id": RUNNING["id"]}
    assert f"serve-app batch list --after {RUNNING['id']}" in " ".join(terminal(show_list, found, 200)[-1].split())
    assert terminal(show_list, {"data": [], "has_more": False, "last_id": None}) == ["There is no batch."]


OUTPUT = b'{"custom_id": "row-0", "response": {"body": "gr\xc3\xbc\xc3\x9fe"}}\n' * 3


def ended(endpoint: BatchEndpoint, status: str = "completed", **files: str) -> str:
    endpoint.files |= {"file-out": OUTPUT, "file-err": b'{"custom_id": "row-9"}\n'}
    return endpoint.add(1, status=status, **files)


def test_results_go_to_stdout_as_they_are(batch: Batch, endpoint: BatchEndpoint) -> None:
    batch_id = ended(endpoint, output_file_id="file-out", error_file_id="file-err")
    result = batch("results", batch_id)
    assert (result.exit_code, result.stdout_bytes) == (0, OUTPUT)
    assert f"rows failed: serve-app batch results {batch_id} --errors" in result.stderr
    errors = batch("results", batch_id, "--errors")
    assert (errors.stdout_bytes, errors.stderr) == (endpoint.files["file-err"], "")


def test_results_replace_a_file_whole_or_leave_it(batch: Batch, endpoint: BatchEndpoint, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    target = folder / "answers.jsonl"
    target.write_text("of yesterday")
    batch_id = ended(endpoint, output_file_id="file-out")
    endpoint.cut_after = 10
    broken = batch("results", batch_id, "--out", target)
    assert (broken.exit_code, target.read_text()) == (1, "of yesterday")
    assert "the connection broke" in broken.stderr
    endpoint.cut_after = None
    assert batch("results", batch_id, "--out", target).exit_code == 0
    assert (target.read_bytes(), list(folder.iterdir())) == (OUTPUT, [target])
    (folder / "usual").touch()
    assert target.stat().st_mode == (folder / "usual").stat().st_mode
    nowhere = batch("results", batch_id, "--out", folder / "none" / "a.jsonl")
    assert nowhere.exit_code == 2
    assert "No such file or directory" in nowhere.stderr


@pytest.mark.parametrize(
    ("status", "files", "options", "code", "reported"),
    [
        ("in_progress", {}, (), 1, "serve-app batch watch"),
        ("in_progress", {}, ("--errors",), 1, "serve-app batch watch"),
        ("completed", {"error_file_id": "file-err"}, (), 1, "--errors"),
        ("completed", {"output_file_id": "file-out"}, ("--errors",), 0, "no row of"),
        ("cancelled", {"output_file_id": "file-out"}, (), 0, ""),
        ("failed", {}, (), 1, "without the answer of any row"),
    ],
)
def test_results_that_are_not_there_are_reported_in_words(
    batch: Batch,
    endpoint: BatchEndpoint,
    status: str,
    files: dict[str, str],
    options: tuple[str, ...],
    code: int,
    reported: str,
) -> None:
    result = batch("results", ended(endpoint, status, **files), *options)
    assert result.exit_code == code
    assert reported in result.stderr
    assert len(result.stderr.splitlines()) <= 1


def test_an_unknown_batch_and_an_endpoint_that_is_none_are_one_line(
    batch: Batch,
    run: Callable[..., Result],  # noqa: F811
) -> None:
    for command in ("status", "watch", "cancel", "results"):
        result = batch(command, "../batches/x")
        assert result.exit_code == 2, command
        assert result.stderr.startswith("error: 404: ")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    nobody = run("batch", "watch", "batch_1", "--url", f"http://127.0.0.1:{port}")
    assert nobody.exit_code == 1
    assert "nothing answers" in nobody.stderr
    assert run("batch", "list").exit_code == 3  # no instance runs


@pytest.mark.parametrize("answer", [b"<html>", b"[]", b'{"object": "list", "data": [{}]}'])
def test_a_server_of_another_kind_is_one_line(
    run: Callable[..., Result],  # noqa: F811
    serve: Callable[..., str],  # noqa: F811
    answer: bytes,
) -> None:
    url = serve(lambda request, _: reply(request, 200, answer))
    for command in (("list",), ("status", "batch_1")):
        result = run("batch", *command, "--url", url)
        assert result.exit_code == 2
        assert result.stderr == f"error: {url} does not answer as OpenAI's API does\n"


def test_the_example_of_the_sdk_gets_its_answers(
    endpoint: BatchEndpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Word for word; against a stack with workers it runs in `tests/e2e`."""
    (example,) = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    body = {"choices": [{"message": {"content": "Hi."}}]}
    answers = [{"custom_id": f"question-{number}", "response": {"body": body}} for number in range(2)]
    endpoint.files["file-out"] = "\n".join(map(json.dumps, answers)).encode()
    endpoint.steps += [{"status": "completed", "output_file_id": "file-out", **counts(2, 0, 2)}]
    monkeypatch.setenv("OPENAI_BASE_URL", f"{endpoint.url}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    exec(compile(example, str(DOCUMENT), "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.splitlines()[1:] == ["question-0 Hi.", "question-1 Hi."]
    (uploaded,) = [content for file_id, content in endpoint.files.items() if file_id != "file-out"]
    assert [json.loads(line)["custom_id"] for line in uploaded.splitlines()] == ["question-0", "question-1"]
    assert "GET /v1/files/file-out/content" in endpoint.asked
