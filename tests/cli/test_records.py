"""`serve-app requests`, `history`, `events` and `top` with a server of the tests."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from rich.console import Console
from typer.testing import Result

from serve_app.cli import records, top
from serve_app.core.receipts import Receipt
from serve_app.core.records import full_record, record_fields
from serve_app.types import Outcome, RequestClass
from tests.cli.test_chat import KEY, reply, run, serve  # noqa: F401 - fixtures
from tests.requires import requires

requires("linux")

Run = Callable[..., Result]
Serve = Callable[[Callable[[BaseHTTPRequestHandler, Any], None]], str]
AT = 1_700_000_000.0
ROW = {
    "time": "2026-11-25T09:00:00.000Z",
    "name": "high",
    "arrivals": 4,
    "ok": 3,
    "refused": 1,
    "failed": 0,
    "prompt_tokens": 10,
    "output_tokens": 20,
    "first_token_p95_s": 0.25,
    "request_p95_s": 2.5,
    "wait_p95_s": None,
}
EVENT = {
    "time": "2023-11-14T22:13:20Z",
    "at": AT,
    "kind": "scaling",
    "subject": "chat",
    "level": "info",
    "message": "Deployment engine-chat changed its target",
    "details": {},
}


def record(request: str, outcome: Outcome = Outcome.OK, **changes: Any) -> dict[str, Any]:
    receipt = Receipt(
        *(request, RequestClass.HIGH, "acme", "chat", outcome, 5.0, 0.25, 2.5),
        granted=True,
        first_token_s=0.5,
        prompt_tokens=3,
        output_tokens=4,
        waits={"slots": 0.25},
    )
    kept = full_record(record_fields(receipt, AT, {})) | changes
    return {"time": "2023-11-14T22:13:20.000Z", **kept}


def answering(
    answers: dict[str, Any], asked: list[tuple[str, dict[str, list[str]]]]
) -> Callable[[BaseHTTPRequestHandler, Any], None]:
    """Answers of each path, one after the other, the last one for ever; text is sent as it is."""

    def answer(handler: BaseHTTPRequestHandler, _: Any) -> None:
        url = urlsplit(handler.path)
        asked.append((url.path, parse_qs(url.query)))
        left = answers[url.path]
        found = left.pop(0) if len(left) > 1 else left[0]
        reply(handler, 200, found.encode() if isinstance(found, str) else json.dumps(found).encode())

    return answer


def page(*data: dict[str, Any], cursor: str | None = None, missing: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"object": "list", "data": data, "complete": not missing, "missing": missing, "next_cursor": cursor}


def test_piped_each_request_is_a_line_and_what_is_missing_another(run: Run, serve: Serve) -> None:  # noqa: F811
    asked: list[tuple[str, dict[str, list[str]]]] = []
    found = page(
        record("r1"), record("r2", Outcome.REFUSED, refused="timeout", asked_model="helper"), missing=("node n2",)
    )
    url = serve(answering({"/admin/requests": [found]}, asked))
    done = run("requests", "--url", url, "--key", KEY, "--failed", "--name", "helper", "--lines", "5")
    assert done.exit_code == 0, done.output
    first, second, missing = (line.split("\t") for line in done.stdout.splitlines())
    assert first[0] == "request"
    assert first[2:] == ["high", "acme", "chat", "chat", "ok", "slots", "250ms", "500ms", "2.5s", "3+4", "r1"]
    assert second[4:8] == ["helper", "chat", "refused", "timeout"]
    assert missing == ["missing", "node n2"]
    assert asked == [("/admin/requests", {"failed": ["1"], "name": ["helper"], "limit": ["5"]})]


def test_on_a_terminal_the_name_stands_only_where_one_differs_from_its_model() -> None:
    for asked_model in (None, "helper"):
        console = Console(file=io.StringIO(), force_terminal=True, width=140, color_system=None)
        records.show_requests(page(record("r1"), record("r2", asked_model=asked_model)), console)
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert ("name" in text, "helper" in text) == (asked_model is not None, asked_model is not None)


def test_an_export_has_every_page_and_is_there_whole_or_not_at_all(
    run: Run,  # noqa: F811
    serve: Serve,  # noqa: F811
    tmp_path: Path,
) -> None:
    asked: list[tuple[str, dict[str, list[str]]]] = []
    pages = [page(record("a"), record("b"), cursor="1.0-b"), page(record("c"))]
    url = serve(answering({"/admin/requests": pages}, asked))
    path = tmp_path / "requests.jsonl"
    done = run("requests", "--url", url, "--key", KEY, "--since", "2026-11-01", "--export", str(path))
    assert done.exit_code == 0, done.output
    assert [json.loads(line)["request_id"] for line in path.read_text().splitlines()] == ["a", "b", "c"]
    assert [query.get("cursor") for _, query in asked] == [None, ["1.0-b"]]
    assert "3 requests" in done.stderr
    nowhere = run("requests", "--url", url, "--key", KEY, "--export", str(tmp_path / "none" / "file"))
    assert (nowhere.exit_code, "none/file" in nowhere.stderr) == (2, True)
    assert list(tmp_path.iterdir()) == [path]


def test_an_export_that_lacks_a_node_fails(run: Run, serve: Serve, tmp_path: Path) -> None:  # noqa: F811
    url = serve(answering({"/admin/requests": [page(record("a"), missing=("node n2",))]}, []))
    path = tmp_path / "requests.jsonl"
    done = run("requests", "--url", url, "--key", KEY, "--export", str(path))
    assert (done.exit_code, "node n2 did not answer" in done.stderr) == (1, True)
    assert len(path.read_text().splitlines()) == 1


def test_a_history_asks_for_as_many_rows_as_fit(run: Run, serve: Serve) -> None:  # noqa: F811
    asked: list[tuple[str, dict[str, list[str]]]] = []
    found = {"object": "history", "step_s": 60, "by": "class", "data": [ROW], "complete": True, "missing": []}
    url = serve(answering({"/admin/history": [found]}, asked))
    done = run("history", "--url", url, "--key", KEY, "--by", "class")
    assert done.exit_code == 0, done.output
    cells = done.stdout.rstrip("\n").split("\t")
    assert (cells[0], cells[2:]) == ("history", ["high", "4", "3", "1", "0", "30", "250ms", "2.5s", "-"])
    assert (asked[-1][1]["by"], asked[-1][1]["step_s"]) == (["class"], ["all"])
    for since, step in (("1d", "1800"), ("6h", "900"), ("10m", "60")):
        assert run("history", "--url", url, "--key", KEY, "--since", since).exit_code == 0
        assert int(asked[-1][1]["step_s"][0]) >= int(step) // 2
    by_name = run("history", "--url", url, "--key", KEY, "--step", "15m", "--name", "helper", "--by", "name", "--json")
    assert by_name.exit_code == 0
    assert [asked[-1][1][word] for word in ("step_s", "name", "by")] == [["900"], ["helper"], ["name"]]


def test_on_a_terminal_a_history_has_bars() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None)
    rows = [{**ROW, "arrivals": count} for count in (8, 4, 0)]
    records.show_history({"data": rows, "by": "total", "step_s": 60, "missing": []}, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    full, half, none = text.splitlines()[1:]
    assert (full.count("█"), half.count("█"), none.count("█")) == (records.BAR, records.BAR // 2, 0)


def test_events_come_in_order_of_time(run: Run, serve: Serve) -> None:  # noqa: F811
    later = {**EVENT, "at": AT + 1, "level": "warning", "message": "Deployment engine-chat lost replicas"}
    url = serve(answering({"/admin/events": [page(later, EVENT)]}, []))
    done = run("events", "--url", url, "--key", KEY)
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    assert [(line[0], *line[2:]) for line in lines] == [
        ("event", "scaling", "info", "chat", EVENT["message"]),
        ("event", "scaling", "warning", "chat", later["message"]),
    ]
    done = run("events", "--url", url, "--key", KEY, "--json")
    assert [json.loads(line)["at"] for line in done.stdout.splitlines()] == [AT, AT + 1]


def test_followed_events_are_shown_once_and_a_router_that_is_away_is_asked_again(
    run: Run,  # noqa: F811
    serve: Serve,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    new = {**EVENT, "at": AT + 3, "message": "new"}
    looks = 0

    def pause(seconds_s: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(records.time, "sleep", pause)
    url = serve(answering({"/admin/events": [page(EVENT), page(new, EVENT)]}, []))
    done = run("events", "--url", url, "--key", KEY, "--follow", "--json", "--since", "2023-11-01")
    assert [json.loads(line)["message"] for line in done.stdout.splitlines()] == [EVENT["message"], "new"]


STATUS = {
    "state": "running",
    "message": "",
    "routers": [{"id": "r1", "state": "RUNNING"}],
    "models": [
        {
            "name": "chat",
            "state": "healthy",
            "message": "",
            "target": 2,
            "replicas": [{"id": "x7k2", "state": "RUNNING", "address": "10.0.0.1"}],
        }
    ],
}
ENGINE = {"replica": "x7k2", "slots": 8, "slots_used": 3, "kv_tokens": 1000, "kv_tokens_used": 120}
METRICS = (
    "# TYPE serve_app_engine_tokens_per_second gauge\n"
    'serve_app_engine_tokens_per_second{model="chat",replica="x7k2"} 42.0\n'
    "# TYPE serve_app_ejected gauge\n"
    'serve_app_ejected{router="a",model="chat"} 1.0\nserve_app_ejected{router="b",model="chat"} 0.0\n'
)


def test_top_shows_models_queues_with_reasons_and_replicas_in_80_columns(run: Run, serve: Serve) -> None:  # noqa: F811
    waiting = [
        record(name, wait_s=wait_s, waits_for=reason)
        for name, wait_s, reason in (("a", 1.0, "slots"), ("b", 4.0, None))
    ]
    answers = {
        "/admin/status": [STATUS],
        "/admin/requests": [page(*waiting)],
        "/admin/quota": [{"engines": [ENGINE]}],
        "/metrics": [METRICS],
    }
    url = serve(answering(answers, []))
    done = run("top", "--url", url, "--key", KEY, "--json", "--once")
    assert done.exit_code == 0, done.output
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    (model,) = found["models"]
    assert (model["running"], model["wanted"], model["ejected"], model["tokens_per_s"]) == (1, 2, 1, 42.0)
    reasons = {"slots": 1, "unknown": 1}
    assert model["queues"] == [{"class": "high", "waiting": 2, "oldest_s": 4.0, "reasons": reasons}]
    assert model["replicas"] == [
        {
            "replica": "x7k2",
            "state": "RUNNING",
            "address": "10.0.0.1",
            "slots_used": 3,
            "slots_total": 8,
            "kv_used": 120,
            "kv_total": 1000,
            "tokens_per_s": 42.0,
        }
    ]
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    console.print(top.shown(found))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= 80
    for part in (
        "chat  healthy  1/2 replicas  2 waiting  42 tokens/s  1 ejected",
        "slots 1, unknown 1",
        "3/8 slots",
        "12% KV",
    ):
        assert part in text
