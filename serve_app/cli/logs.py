"""`serve-app logs`: the log lines of replicas, Serve's controller, HAProxy's manager and the quota actor.

An instance of this machine is read from its files, also after its end; of a cluster, a process on each node reads.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from serve_app.cli.deploy import Target
from serve_app.cli.layout import say
from serve_app.cluster.local import InstanceState, answers
from serve_app.core.receipts import OBJECT_PREFIXES
from serve_app.errors import BadRequest, Unavailable
from serve_app.names import deployment_of
from serve_app.system import LOG_SOURCES, LogFilter, LogPart, LogReader, marked

FOLLOW_PERIOD_S = 0.5
ANSWER_S = 60.0  # of a cluster: Ray starts a process on each node first
Batch = list[LogPart]


def wanted_lines(source: str, replica: str, request: str) -> LogFilter:
    """The filter for a model's name or one of `LOG_SOURCES`, the beginning of a replica's id, and any id of a request.

    Raises:
        BadRequest: a request's id that is too short to name one.
    """
    for prefix in OBJECT_PREFIXES:
        request = request.removeprefix(prefix)
    if request and len(request) < 8:
        raise BadRequest(f"--request {request}: give the whole id", param="request")
    known = not source or source in LOG_SOURCES
    return LogFilter(source if known else deployment_of(source), replica, request)


def of_instance(state: InstanceState, wanted: LogFilter, lines: int, *, follow: bool) -> Iterator[Batch]:
    """The last lines of the instance's files, then with `follow` what is written until the instance ends.

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


def of_cluster(target: Target, wanted: LogFilter, lines: int, *, follow: bool) -> Iterator[Batch]:
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


def show(batches: Iterable[Batch], console: Console) -> bool:
    """Print the lines: below a heading for each file on a terminal, after source and replica in a pipe. Returns
    whether there were any."""
    shown = ""
    for batch in batches:
        for part in batch:
            if console.is_terminal and part.path != shown:
                heading = " ".join(filter(None, (part.source, part.replica, part.path)))
                say(console, f"==> {heading} <==", "bold")
            shown = part.path
            before = "" if console.is_terminal else f"{part.source}\t{part.replica or '-'}\t"
            console.file.writelines(f"{before}{line}\n" for line in part.lines)
        console.file.flush()
    return bool(shown)
