"""`serve-app requests`, `history` and `events`: what routers and nodes have recorded, from an endpoint."""

from __future__ import annotations

import enum
import json
import os
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, TextColumn

from serve_app.cli.command_line import EXIT_FAILED, EndpointOptions, JsonOption, print_found
from serve_app.cli.endpoint import Endpoint
from serve_app.cli.key_commands import seconds
from serve_app.cli.layout import NOTHING, Listing, say
from serve_app.cli.logs import here, iso, since_of
from serve_app.cli.operators import fetch_soon
from serve_app.core.records import FAILED
from serve_app.errors import BadRequest, Unavailable

REQUESTS = "/admin/requests"
HISTORY = "/admin/history"
EVENTS = "/admin/events"
PAGE = 1000
WHOLE_TIME = "all"  # in place of a step
LINES = 20
FOLLOW_PERIOD_S = 2.0
OVERLAP_S = 5.0  # how late an event may come into its file, after its time
ROWS = 60  # of a history, at most, where no step is given
STEPS = (60, 300, 900, 3600, 14_400, 86_400)
BAR = 12  # columns
EIGHTHS = " ▏▎▍▌▋▊▉█"
STYLES = {"ok": "green", "engine_failed": "red", "internal_error": "red", "refused": "yellow"}
LEVEL_STYLES = {"warning": "yellow", "error": "red"}
REQUEST_COLUMNS = (
    "time",
    "class",
    "tenant",
    "name",
    "model",
    "outcome",
    "why",
    "wait",
    "first",
    "total",
    "tokens",
    "request",
)
HISTORY_COLUMNS = ("time", "name", "arrived", "ok", "refused", "failed", "tokens", "first p95", "total p95", "wait p95")
SinceOption = Annotated[str | None, typer.Option("--since", help="Such as 10m, 2h, 2027-01-31.")]
TenantOption = Annotated[str | None, typer.Option("--tenant", help="Its tenant.")]
ModelOption = Annotated[str | None, typer.Option("--model", help="Its model.")]
NameOption = Annotated[str | None, typer.Option("--name", help="The name it asked for.")]
ClassOption = Annotated[str | None, typer.Option("--class", help="Its class.")]


class HistoryGroup(enum.StrEnum):
    """What a history has a row for."""

    TOTAL = "total"
    CLASS = "class"
    MODEL = "model"
    TENANT = "tenant"
    NAME = "name"


def list_requests(
    at: EndpointOptions,
    failed: Annotated[bool, typer.Option("--failed", help="What the system failed at.")] = False,
    slow: Annotated[bool, typer.Option("--slow", help="Slowest first.")] = False,
    waiting: Annotated[bool, typer.Option("--waiting", help="Waiting ones.")] = False,
    tenant: TenantOption = None,
    name: NameOption = None,
    model: ModelOption = None,
    request_class: ClassOption = None,
    outcome: Annotated[str | None, typer.Option("--outcome", help="Such as refused.")] = None,
    since: SinceOption = None,
    lines: Annotated[int, typer.Option("--lines", min=1, max=PAGE, help="So many at most.")] = LINES,
    export: Annotated[Path | None, typer.Option("--export", help="Write all as JSON lines.")] = None,
    as_json: JsonOption = False,
) -> int:
    """Show the last requests of all routers: outcome, waits, tokens."""
    query = {
        "failed": int(failed) or None,
        "slow": int(slow) or None,
        "waiting": int(waiting) or None,
        "tenant": tenant,
        "name": name,
        "model": model,
        "class": request_class,
        "outcome": outcome,
        "since": _since(since),
    }
    if export is not None and waiting:
        raise BadRequest("--export and --waiting: give one of them", param="--export")
    if export is not None:
        return _export(at.endpoint(), query, export)
    found = fetch_soon(at.endpoint(), "GET", REQUESTS, params={**query, "limit": PAGE if waiting else lines})
    print_found(_longest_waiting(found, lines) if waiting else found, as_json, show_requests)
    return 0


def history(
    at: EndpointOptions,
    since: SinceOption = "1h",
    by: Annotated[HistoryGroup, typer.Option("--by", help="A row for each.")] = HistoryGroup.TOTAL,
    step: Annotated[str | None, typer.Option("--step", help="Of a row, such as 15m; `all`: of the whole time.")] = None,
    tenant: TenantOption = None,
    name: NameOption = None,
    model: ModelOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show counts and durations of the last day; with --by a row for each, of the whole time."""
    now = datetime.now(UTC)
    begin = since_of(since or "1h", now)
    step_s = _asked_step(step, by, now.timestamp() - begin)
    query = {"since": iso(begin), "step_s": step_s, "by": by.value, "tenant": tenant, "name": name, "model": model}
    print_found(fetch_soon(at.endpoint(), "GET", HISTORY, params=query), as_json, show_history)


def events(
    at: EndpointOptions,
    since: SinceOption = "1d",
    kind: Annotated[str | None, typer.Option("--kind", help="Such as scaling.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines.")] = False,
) -> None:
    """Show scaling decisions, losses and returns."""
    console = Console()
    begin = since_of(since or "1d", datetime.now(UTC))
    for event in _events(at.endpoint(), kind, begin, follow=follow):
        if as_json:
            console.file.write(json.dumps(event) + "\n")
        else:
            _show_event(event, console)
        console.file.flush()


def _longest_waiting(found: Mapping[str, Any], lines: int) -> dict[str, Any]:
    """The requests that have waited longest, and how many more wait."""
    data = sorted(found["data"], key=lambda record: -record["wait_s"])
    return {**found, "data": data[:lines], "left_off": max(0, len(data) - lines)}


def show_requests(found: Mapping[str, Any], console: Console) -> None:
    """Print a row for each request, and what is missing."""
    listing = Listing(console)
    if not found["data"]:
        listing.say("There is no such request.", ())
    rows = [_request_row(record) for record in found["data"]]
    columns: tuple[str, ...] = REQUEST_COLUMNS
    if console.is_terminal and not any(record["asked_model"] for record in found["data"]):  # all asked for their model
        place = columns.index("name")
        columns = columns[:place] + columns[place + 1 :]
        rows = [cells[:place] + cells[place + 1 :] for cells in rows]
    styles = [STYLES.get(record["outcome"] or "", "") for record in found["data"]]
    listing.table("request", columns, rows, styles=styles)
    if left_off := found.get("left_off", 0):
        listing.say(f"{left_off} more wait; show them with --lines", ("left_off", str(left_off)))
    _show_missing(found, listing)


def show_history(found: Mapping[str, Any], console: Console) -> None:
    """Print a row for each step and name, those of the whole time by their tokens; on a terminal with a bar of its
    arrivals."""
    listing = Listing(console)
    data = found["data"]
    if found["step_s"] is None:  # who has used most comes first
        data = sorted(data, key=lambda row: (-_tokens(row), row["name"]))
    if not data:
        listing.say("No request has arrived in this time.", ())
    most = max((row["arrivals"] for row in data), default=0)
    columns: tuple[str, ...] = HISTORY_COLUMNS
    rows: list[tuple[str, ...]] = [_history_row(row) for row in data]
    if console.is_terminal:
        columns = (*columns, "arrivals")
        rows = [(*cells, _bar(row["arrivals"], most)) for cells, row in zip(rows, data, strict=True)]
        if found["by"] == HistoryGroup.TOTAL:
            columns = (columns[0], *columns[2:])
            rows = [(cells[0], *cells[2:]) for cells in rows]
    listing.table("history", columns, rows)
    _show_missing(found, listing)


def _show_event(event: Mapping[str, Any], console: Console) -> None:
    at = here(event["at"])
    kind, level, subject, message = (event[name] for name in ("kind", "level", "subject", "message"))
    if console.is_terminal:
        say(console, f"{at} {kind} {subject}  {message}", LEVEL_STYLES.get(level, ""))
    else:
        console.file.write("\t".join(("event", at, kind, level, subject, message)) + "\n")


def _events(endpoint: Endpoint, kind: str | None, begin: float, *, follow: bool) -> Iterator[dict[str, Any]]:
    """The events in order of time, then with `follow` the new ones as they come. Any router answers: what is new is
    found by its time, and what was shown of the last seconds is known here."""
    shown: set[str] | None = None
    while True:
        query = {"since": iso(begin), "kind": kind, "limit": PAGE}
        try:
            found = fetch_soon(endpoint, "GET", EVENTS, params=query)["data"]
        except Unavailable:
            if shown is None:
                raise
            found = []  # the next router answers
        shown = shown or set()
        new = [(event, text) for event in reversed(found) if (text := json.dumps(event)) not in shown]
        yield from (event for event, _ in new)
        if not follow:
            return
        if found:
            begin = max(begin, found[0]["at"] - OVERLAP_S)
            shown = {json.dumps(event) for event in found if event["at"] >= begin}
        time.sleep(FOLLOW_PERIOD_S)  # bound: until Ctrl-C


def _export(endpoint: Endpoint, query: Mapping[str, Any], path: Path) -> int:
    """Write all requests to a file, which is there whole or not at all. Returns the exit status."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    errors = Console(stderr=True)
    missing = set[str]()
    count = 0
    try:
        with draft.open("w") as file, Progress(TextColumn("{task.description}"), console=errors) as progress:
            task = progress.add_task("exporting")
            for page in pages(endpoint, query):
                missing.update(page["missing"])
                count += len(page["data"])
                file.writelines(json.dumps(record) + "\n" for record in page["data"])
                back_to = f", back to {page['data'][-1]['time']}" if page["data"] else ""
                progress.update(task, description=f"{count} requests{back_to}")
        draft.replace(path)
    except OSError as error:
        raise BadRequest(f"{path}: {error.strerror}", param="--export") from None
    finally:
        draft.unlink(missing_ok=True)
    for name in sorted(missing):
        say(errors, f"{name} did not answer: what it has is missing in {path}", "yellow")
    return EXIT_FAILED if missing else 0


def pages(endpoint: Endpoint, query: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """All requests that were asked for, newest first: `data`, and `missing`, those that did not answer."""
    cursor = None
    while True:
        page = fetch_soon(endpoint, "GET", REQUESTS, params={**query, "limit": PAGE, "cursor": cursor})
        yield page
        cursor = page["next_cursor"]
        if cursor is None:
            return


def _request_row(record: Mapping[str, Any]) -> tuple[str, ...]:
    why = record["refused"] or record.get("waits_for") or _why_failed(record) or _longest_wait(record["waited_for"])
    tokens = "" if record["output_tokens"] is None else f"{record['prompt_tokens'] or 0}+{record['output_tokens']}"
    return (
        here(record["at"])[:19],
        record["request_class"],
        record["tenant"],
        record["asked_model"] or record["model"],
        record["model"],
        record["outcome"] or "waits",
        why,
        *(_duration(record[name]) for name in ("wait_s", "first_token_s", "total_s")),
        tokens,
        record["request_id"],
    )


def _longest_wait(waits: Mapping[str, float]) -> str:
    return max(waits, key=lambda reason: waits[reason], default="")


def _why_failed(record: Mapping[str, Any]) -> str:
    """Of a request that failed: why its stream was not continued, else where it ran; empty: it has not failed."""
    if record["outcome"] not in FAILED:
        return ""
    return str(record["not_continued"] or record["replica_id"] or record["router"])


def _history_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    counts = [str(row[name]) for name in ("arrivals", "ok", "refused", "failed")]
    at = here(datetime.fromisoformat(row["time"]).timestamp())[:16]
    durations = [_duration(row[name]) for name in ("first_token_p95_s", "request_p95_s", "wait_p95_s")]
    return (at, row["name"], *counts, str(_tokens(row)), *durations)


def _tokens(row: Mapping[str, Any]) -> int:
    return int(row["prompt_tokens"] + row["output_tokens"])


def _show_missing(found: Mapping[str, Any], listing: Listing) -> None:
    for name in found["missing"]:
        listing.say(f"Missing: {name}", ("missing", name), style="yellow")


def _duration(seconds_s: float | None) -> str:
    if seconds_s is None:
        return NOTHING
    return f"{1000 * seconds_s:.0f}ms" if seconds_s < 1.0 else f"{seconds_s:.1f}s"


def _bar(count: int, most: int) -> str:
    eighths = round(8 * BAR * count / most) if most else 0
    return EIGHTHS[8] * (eighths // 8) + (EIGHTHS[eighths % 8] if eighths % 8 else "")


def _since(text: str | None) -> str | None:
    return None if text is None else iso(since_of(text, datetime.now(UTC)))


def _asked_step(step: str | None, by: HistoryGroup, span_s: float) -> int | str:
    """The parameter of the route."""
    if step is None:
        return _step_s(span_s) if by is HistoryGroup.TOTAL else WHOLE_TIME
    return WHOLE_TIME if step == WHOLE_TIME else round(seconds(step, "--step"))


def _step_s(span_s: float) -> int:
    """The smallest step with which a history has at most `ROWS` rows of one name."""
    return next((step for step in STEPS if span_s / step <= ROWS), STEPS[-1])
