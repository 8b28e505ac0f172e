"""`serve-app logs`: the log lines of replicas, Serve's controller, HAProxy's manager and the quota actor, in order of
time.

An instance of this machine is read from its files, also after its end; of an application elsewhere, its routers ask a
process on each node, and so does a driver.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

from rich.console import Console

from autoscaling.operations import LogLine, in_order
from serve_app.cli.deploy import Target
from serve_app.cli.endpoint import Endpoint
from serve_app.cli.key_commands import DURATION, seconds
from serve_app.cli.layout import NOTHING
from serve_app.cli.operators import fetch_soon
from serve_app.cluster.local import InstanceState, answers
from serve_app.errors import BadRequest, Unavailable
from serve_app.system import LogFilter, LogPart, LogReader, marked

FOLLOW_PERIOD_S = 0.5
HTTP_PERIOD_S = 2.0
ANSWER_S = 60.0  # of a cluster: Ray starts a process on each node first
OVERLAP_S = 5.0  # how late a line may come into its file, after its time, to be found by HTTP
PATH = "/admin/logs"
Batch = list[LogLine]


def of_instance(state: InstanceState, wanted: LogFilter, lines: int, *, follow: bool) -> Iterator[Batch]:
    """The last lines of the instance's files, then with `follow` what is written until the instance ends. Raises as
    `parts_of_instance`."""
    return _ordered(parts_of_instance(state, wanted, lines, follow=follow), lines)


def of_cluster(target: Target, wanted: LogFilter, lines: int, *, follow: bool) -> Iterator[Batch]:
    """The same of every node of a cluster. Raises as `parts_of_cluster`."""
    return _ordered(parts_of_cluster(target, wanted, lines, follow=follow), lines)


def _ordered(found: Iterator[list[LogPart]], lines: int) -> Iterator[Batch]:
    """The lines of all files by their time: of the first parts the last `lines`, then all."""
    last: int | None = lines
    for parts in found:
        yield in_order(parts, last)
        last = None


def parts_of_instance(
    state: InstanceState, wanted: LogFilter, lines: int, *, follow: bool = False
) -> Iterator[list[LogPart]]:
    """The last lines of each file of the instance, then with `follow` what is written until the instance ends.

    Raises:
        Unavailable: it has no logs.
    """
    instance = state.read()
    folder = state.logs / "ray" if instance is None else Path(instance.run_dir) / "ray/session_latest/logs"
    if not folder.is_dir():
        raise Unavailable(f"{state.name}: there are no logs in {folder}", code="not_running")
    reader = LogReader(str(folder.resolve()), wanted)
    yield reader.last(lines)
    while follow and instance is not None and folder.is_dir() and marked(instance.mark):
        time.sleep(FOLLOW_PERIOD_S)  # bound: until Ctrl-C or the end of the instance, between two looks at its files
        yield reader.new()


def parts_of_cluster(target: Target, wanted: LogFilter, lines: int, *, follow: bool = False) -> Iterator[list[LogPart]]:
    """The same of every node of a cluster.

    Raises:
        Unavailable: the cluster cannot be reached.
    """
    order: dict[str, Any] = {"do": "logs", "environment": target.environment, "lines": lines, "follow": follow}
    try:
        for answer in answers(order | {"wanted": dataclasses.asdict(wanted)}, ANSWER_S):
            yield [LogPart(**part) for part in answer["parts"]]
    except Unavailable as error:
        raise Unavailable(f"the cluster's logs cannot be read: {error.message}", code=error.code) from None


def of_endpoint(endpoint: Endpoint, query: Mapping[str, Any], lines: int, *, follow: bool) -> Iterator[Batch]:
    """The same of every node, through the endpoint. Any router answers: what is new is found by its time, and what was
    shown of the last seconds is known here.

    Args:
        query: the parameters of GET /admin/logs.

    Raises:
        ServeAppError: the endpoint does not answer, or refuses the key.
    """
    found = _fetch(endpoint, query, lines)
    yield found
    newest = max((line.time for line in found if line.time is not None), default=time.time())
    shown = Counter(found)
    while follow:
        time.sleep(HTTP_PERIOD_S)  # bound: until Ctrl-C
        since = iso(newest - OVERLAP_S)
        try:
            found = [line for line in _fetch(endpoint, {**query, "since": since}, lines) if line.time is not None]
        except Unavailable:  # the next router answers
            continue
        counts = Counter(found)
        yield _beyond(found, shown)
        newest = max([newest, *(line.time for line in found if line.time is not None)])
        shown = counts


def _fetch(endpoint: Endpoint, query: Mapping[str, Any], lines: int) -> Batch:
    given = {name: value for name, value in query.items() if value}
    found = fetch_soon(endpoint, "GET", PATH, params={**given, "lines": lines})
    names = [one.name for one in dataclasses.fields(LogLine)]
    times = [None if one["time"] is None else datetime.fromisoformat(one["time"]).timestamp() for one in found["data"]]
    return [
        LogLine(**{name: one[name] for name in names} | {"time": at})
        for one, at in zip(found["data"], times, strict=True)
    ]


def _beyond(found: Batch, shown: Counter[LogLine]) -> Batch:
    """The lines that were not shown; of one that is there several times, those beyond the shown ones."""
    left = Counter(shown)
    new = []
    for line in found:
        if left[line]:
            left[line] -= 1
        else:
            new.append(line)
    return new


def since_of(text: str, now: datetime, zone: tzinfo | None = None) -> float:
    """Seconds since 1970 of a duration before now (10m, 2h), a date or a time, which is of this zone if it names none.
    `zone`: None: this machine's. Raises BadRequest."""
    if DURATION.fullmatch(text):
        return (now - timedelta(seconds=seconds(text, "--since"))).timestamp()
    try:
        time = datetime.fromisoformat(text)
        return (time if time.tzinfo else time.replace(tzinfo=zone)).timestamp()
    except (ValueError, OverflowError):
        text = f"--since {text}: a date (2027-01-31), a time (2027-01-31T22:00), or 10m, 2h"
        raise BadRequest(text, param="--since") from None


def iso(at: float) -> str:
    """A time in ISO 8601 with milliseconds, in UTC."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")


def here(at: float | None) -> str:
    """A time in ISO 8601 with milliseconds and the offset of this machine's zone."""
    return NOTHING if at is None else datetime.fromtimestamp(at).astimezone().isoformat(timespec="milliseconds")


def show(batches: Iterable[Batch], console: Console, *, as_json: bool = False) -> bool:
    """Print the lines: each after its time, its source and its replica. Returns whether there were any."""
    any_shown = False
    for batch in batches:
        for line in batch:
            any_shown = True
            fields = (line.source, line.replica or NOTHING, here(line.time))
            if as_json:
                console.file.write(json.dumps(dataclasses.asdict(line) | {"time": line.time and fields[2]}) + "\n")
            elif console.is_terminal:
                console.file.write(f"{fields[2]} {line.source} {line.replica}  {line.line}\n")
            else:
                console.file.write("\t".join([*fields, line.line]) + "\n")
        console.file.flush()
    return any_shown
