"""Each of the seven questions of a night is answered by one command: on data whose answer is known.

The data goes the way of a router: its log writes it, the routes read it, the command prints it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from typer.testing import Result

from autoscaling.scaling_events import ScalingEvents
from scripts.dashboards.overview import overview
from serve_app.core.receipts import Receipt, RequestTrace
from serve_app.core.records import full_record, record_fields
from serve_app.http.api.record_routes import RecordRoutes, recorded_receipt
from serve_app.http.api.routes import resolve
from serve_app.names import RECORDS_FOLDER, deployment_of
from serve_app.router import RequestLog, RouterAnswers
from serve_app.settings import GB
from serve_app.system import EventKind, RecordBounds, event, keep_events
from serve_app.system.sketch import ACCURACY
from serve_app.types import Identity, Outcome, RequestClass
from tests.cli.test_chat import KEY, reply, run, serve  # noqa: F401 - fixtures
from tests.cli.test_layout import QUOTA
from tests.fakes.cluster_calls import RecordedCluster
from tests.requires import requires

requires("linux")

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/how-to/watch.md"
CONSOLE = ROOT / "serve_app/http/console/files"
MINUTE_S = 60.0
HOUR_S = 3600.0
OPERATOR = Identity("people", RequestClass.CRITICAL, RequestClass.NORMAL, admin=True)
BOUNDS = RecordBounds(keep_s=86_400.0, max_bytes=2**30)
REASON = "31 requests wait at class low, 1 replica answers 3.4 requests/s: 3 replicas wanted"
FAILED_NOW = "f" * 32
SLOW = "5" * 32  # a request whose first token is divided
# Seconds to the first token of the last hour, by class.
FIRST_TOKENS = {
    RequestClass.HIGH: [number / 200 for number in range(1, 101)],
    RequestClass.LOW: [2.0 + number / 20 for number in range(40)],
}
TENANTS = {RequestClass.HIGH: "product", RequestClass.LOW: "night"}
TOKENS = {RequestClass.HIGH: 100, RequestClass.LOW: 4000}  # of each request: the fewer requests use the most
QUESTIONS = {
    "who waits and why": "requests --waiting",
    "which tenant hogs": "history --by tenant",
    "p95 of the first token by class in the last hour": "history --by class --since 1h",
    "what does GPU memory do": "quota",
    "why did it scale": "events --kind scaling",
    "what failed in the last ten minutes": "requests --failed --since 10m",
    "model or router?": "explain ID",
}

Ask = Callable[[str], list[list[str]]]  # a question, and the cells of each line of its answer


def receipt(name: str, request_class: RequestClass, first_s: float | None, **more: Any) -> Receipt:
    fields: dict[str, Any] = {
        "outcome": Outcome.OK,
        "total_s": (first_s or 0.0) + 1.0,
        "wait_s": 0.001,
        "prompt_tokens": TOKENS[request_class],
        "output_tokens": 10,
        "trace": RequestTrace(replica_id="x7k2"),
    }
    tenant = TENANTS[request_class]
    named = {"request_id": name, "request_class": request_class, "tenant": tenant, "model": "chat", "arrived": 5.0}
    return Receipt(granted=True, first_token_s=first_s, **named | fields | more)


def ended(now: float) -> Iterator[tuple[float, Receipt]]:
    """Requests in the order of their ends: a bad time two hours ago, the last hour, the last minutes."""
    died = {"outcome": Outcome.ENGINE_FAILED, "output_tokens": 0}
    yield now - 2 * HOUR_S, receipt("old", RequestClass.HIGH, 99.0, prompt_tokens=10**7)
    yield now - 2 * HOUR_S, receipt("old and failed", RequestClass.HIGH, None, total_s=3.0, **died)
    yield now - 11 * MINUTE_S, receipt("failed before", RequestClass.HIGH, None, total_s=3.0, **died)
    for request_class, values in FIRST_TOKENS.items():
        for number, first_s in enumerate(values):
            yield now - 10 * MINUTE_S, receipt(f"{request_class.label}-{number}", request_class, first_s)
    long_s = 20 * MINUTE_S  # it has arrived before the last ten minutes, and failed in them
    yield now - MINUTE_S, receipt(FAILED_NOW, RequestClass.LOW, None, total_s=long_s, **died)
    waits = {"slots": 1.25, "guard_slots": 0.25}
    yield now - 1.0, receipt(SLOW, RequestClass.LOW, 1.7, wait_s=1.504, waits=waits)


def waiting(now: float, name: str, tenant: str, wait_s: float) -> dict[str, Any]:
    known = Receipt(name, RequestClass.NORMAL, tenant, "chat", Outcome.OK, 5.0, wait_s, wait_s)
    fields = full_record(record_fields(known, now - wait_s, {}))
    return fields | {"outcome": None, "waits_for": None, "queued_as": [f"ticket-{name}"]}


class Endpoint:
    """The routes of an operator over the records in a folder."""

    def __init__(self, folder: Path, now: float) -> None:
        self._now = now
        self.cluster = RecordedCluster(folder, waits={"ticket-w1": "slots", "ticket-w2": "guard_slots"})
        self.routes = RecordRoutes(self.cluster, self.ask_routers)

    async def ask_routers(self, method: str, *_: Any) -> RouterAnswers:
        waits = [waiting(self._now, "w1", "product", 2.5), waiting(self._now, "w2", "night", 74.0)]
        return RouterAnswers([("router", 0 if method == "flush_records" else waits)], [])

    def __call__(self, handler: BaseHTTPRequestHandler, _: Any) -> None:
        url = urlsplit(handler.path)
        reply(handler, 200, asyncio.run(self.answer(url.path, url.query.encode())))

    async def answer(self, path: str, query: bytes) -> bytes:
        if path == "/admin/quota":
            return json.dumps(QUOTA).encode()
        if path.startswith("/admin/requests/"):
            found = await recorded_receipt(self.cluster, path.rpartition("/")[2], None)
            return json.dumps(found.receipt).encode()
        _, _, body = await self.routes.answer(resolve("GET", path), OPERATOR, query)
        return body


async def write_requests(folder: Path, now: float) -> None:
    clock = [now]
    log = RequestLog(folder, "router", "n1", lambda: clock[0])
    log.configure(BOUNDS, 20, lambda: 2)
    for at, known in ended(now):
        clock[0] = at
        log.arrived(known.model, known.request_class.label, known.tenant)
        log.ended(known, {})
    await log.close()


def write_events(folder: Path) -> None:
    logger = logging.getLogger("ray.serve")
    before = [*logger.handlers]
    level = logger.level
    logger.setLevel(logging.INFO)  # the level of Serve's own logger in a deployment
    writer = keep_events(folder, "controller")
    assert writer is not None
    try:
        ScalingEvents().on_target(deployment_of("chat"), 1, 3, REASON)
        logger.warning("Replica %s is gone", "x7k2", extra=event(EventKind.HEALTH, "x7k2"))
        writer.flush()
    finally:
        logger.handlers = before
        logger.setLevel(level)


@pytest.fixture
def ask(
    tmp_path: Path,
    run: Callable[..., Result],  # noqa: F811
    serve: Callable[[Endpoint], str],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> Ask:
    """Runs the command of a question as in a pipe."""
    now = time.time()
    folder = tmp_path / "records"
    folder.mkdir()
    monkeypatch.setenv(RECORDS_FOLDER, str(folder))
    asyncio.run(write_requests(folder, now))
    write_events(folder)
    url = serve(Endpoint(folder, now))

    def asked(question: str) -> list[list[str]]:
        command = QUESTIONS[question].replace("ID", SLOW).split()
        done = run(*command, "--url", url, "--key", KEY)
        assert done.exit_code == 0, done.output
        return [line.split("\t") for line in done.stdout.splitlines()]

    return asked


def seconds_of(text: str) -> float:
    return float(text[:-2]) / 1000 if text.endswith("ms") else float(text[:-1])


def exact_p95(values: Sequence[float]) -> float:
    return sorted(values)[math.floor(0.95 * (len(values) - 1))]


def test_who_waits_and_why_is_listed_with_the_longest_wait_first(ask: Ask) -> None:
    lines = ask("who waits and why")
    assert [(line[3], line[7], line[8], line[-1]) for line in lines] == [
        ("night", "guard_slots", "74.0s", "w2"),
        ("product", "slots", "2.5s", "w1"),
    ]


def test_the_tenant_that_uses_most_is_on_top_though_another_sends_more_requests(ask: Ask) -> None:
    first, second = ask("which tenant hogs")
    assert (first[0], first[2], second[2]) == ("history", "night", "product")
    counts = {name.label: len(values) for name, values in FIRST_TOKENS.items()}
    assert int(second[4]) == counts["high"] > int(first[4])
    assert int(first[7]) > 10 * int(second[7])
    assert int(second[7]) == counts["high"] * (TOKENS[RequestClass.HIGH] + 10) + TOKENS[RequestClass.HIGH]


def test_p95_of_the_first_token_is_that_of_the_last_hour_s_requests_in_one_row_a_class(ask: Ask) -> None:
    rows = {line[2]: line for line in ask("p95 of the first token by class in the last hour")}
    assert rows.keys() == {name.label for name in FIRST_TOKENS}
    for request_class, values in FIRST_TOKENS.items():
        own = [*values, 1.7] if request_class is RequestClass.LOW else values
        shown = seconds_of(rows[request_class.label][8])
        assert shown == pytest.approx(exact_p95(own), rel=1.001 * ACCURACY, abs=0.05 if shown > 1 else 0.001)


def test_gpu_memory_is_shown_as_a_whole_by_device_and_with_what_lacks(ask: Ask) -> None:
    lines = ask("what does GPU memory do")
    sizes = ("total", "reserved", "granted", "free")
    assert lines[0] == ["memory", *(f"{QUOTA[f'{name}_bytes'] / GB:.2f} GB" for name in sizes), "0.50"]
    devices = [line for line in lines if line[0] == "device"]
    assert [line[2:] for line in devices] == [["80.00 GB", "2.00 GB", "60.00 GB", "18.00 GB", "77"]] * 2
    (short,) = (line for line in lines if line[0] == "short")
    assert "at least 48.32 GB needed on one device, 29.68 GB free" in short[1]


def test_why_it_scaled_is_the_event_with_its_reason_and_no_other(ask: Ask) -> None:
    (line,) = ask("why did it scale")
    assert (line[0], line[2], line[4]) == ("event", "scaling", "chat")
    assert line[5].endswith(f"changed its target from 1 to 3 replicas: {REASON}")


def test_what_failed_in_the_last_ten_minutes_has_a_request_that_came_before_them_and_failed_in_them(ask: Ask) -> None:
    (line,) = ask("what failed in the last ten minutes")
    assert (line[3], line[6], line[7], line[-1]) == ("night", "engine_failed", "x7k2", FAILED_NOW)


def test_model_or_router_is_answered_by_the_seconds_of_each(ask: Ask) -> None:
    cells = [cell for line in ask("model or router?") for cell in line]
    assert "Waits by reason: 1.2 s slots, 250 ms guard_slots." in " ".join(cells)
    assert cells[-1].strip() == "First token: 1.5 s of waits, 4 ms in the router, 196 ms in the engine."


def documented() -> list[list[str]]:
    """The rows of the page's table, without its head."""
    rows = re.findall(r"^\| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    return [row.split(" | ") for row in rows if row.split(" | ")[0] not in ("question", "---")]


def test_the_page_has_each_question_with_its_command() -> None:
    assert {question: command for question, _, command in documented()} == {
        question: f"`serve-app {command}`" for question, command in QUESTIONS.items()
    }


def test_the_page_s_questions_are_panels_of_the_overview() -> None:
    titles = [panel.title for panel in overview().panels()]
    assert [question for question, *_ in documented() if titles.count(question) != 1] == []


def test_the_page_s_places_are_those_of_the_console_two_clicks_away_at_most() -> None:
    text = "\n".join(file.read_text() for file in CONSOLE.glob("*.js") if "uPlot" not in file.name)
    for question, places, _ in documented():
        for place in re.split(r";|, or", places):
            clicks = re.findall(r"`([^`]+)`", place)
            assert 1 <= len(clicks) <= 2, question
            for click in clicks:
                shown = "By ${name}" if click.startswith("By ") else click
                assert re.search(rf'["`]{re.escape(shown)}["`]', text), f"{click} of {question}"
