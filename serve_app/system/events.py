"""Events: log records that say what has happened to the system, kept on their node as lines of their own.

    logger.warning("Replica %s gets no requests ...", replica, extra=event(EventKind.HEALTH, replica, reason=reason))

`keep_events` gives a process the handler that writes them. An event has the level and the message of its log record.

Events that the disk does not take stay in memory and are written once it does.

Invariant: what writes an event never waits for it, and never fails by it.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import queue
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from serve_app.system.log_format import SERVE_LOGGER
from serve_app.system.record_files import RecordBounds, RecordFile, Sweeper, records_folder

logger = logging.getLogger(SERVE_LOGGER)

EVENTS = "events"  # the kind of their files
EVENT_FIELD = "serve_app_event"  # of a log record
MAX_WAITING = 10_000  # events that a disk has not taken yet
RETRY_S = 2.0  # between two tries of a disk that takes none
MAX_MESSAGE_CHARS = 2_000
BOUNDS = RecordBounds(keep_s=7 * 86_400.0, max_bytes=32 * 2**20)  # some 100,000 events
_LEVELS = {logging.WARNING: "warning", logging.ERROR: "error", logging.CRITICAL: "error"}


class EventKind(enum.StrEnum):
    """What an event is about."""

    SCALING = "scaling"  # a decision about the number of replicas
    HEALTH = "health"  # of replicas, engines, routers, the quota actor, the store; drains
    SNAPSHOT = "snapshot"  # what a deployment had, each minute in which that has changed


def event(kind: EventKind, subject: str, **details: Any) -> dict[str, Any]:
    """The `extra` that makes a log record an event. `subject`: a model, replica, router or part of the system."""
    return {EVENT_FIELD: (kind.value, subject, details)}


class EventWriter:
    """Writes events, or records of another kind, to the files of this process, in a thread that ends with it."""

    def __init__(self, folder: Path, source: str, kind: str = EVENTS, bounds: RecordBounds = BOUNDS) -> None:
        self._file = RecordFile(folder, kind, source, bounds)
        self._sweeper = Sweeper(folder, {(kind,): bounds})
        self._waiting: queue.Queue[dict[str, Any]] = queue.Queue(MAX_WAITING)
        self._held: list[Mapping[str, Any]] = []  # taken from there and not written yet
        self._is_failing = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.source = source
        self.lost = 0

    def write(self, fields: Mapping[str, Any]) -> None:
        """Write an event, soon."""
        try:
            self._waiting.put_nowait({**fields, "source": self.source})
        except queue.Full:
            self.lost += 1
            return
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="events", daemon=True)
                self._thread.start()

    def flush(self) -> None:
        """Wait until all is written, or was tried."""
        self._waiting.join()

    def _run(self) -> None:
        while True:
            is_new = self._take()
            try:
                self._write_held()
                self._sweeper.sweep()
            finally:
                if is_new:
                    self._waiting.task_done()

    def _take(self) -> bool:
        """Take the next event; False: there is none, and it is time to try the disk again."""
        try:
            fields = self._waiting.get(timeout=RETRY_S if self._held else None)
        except queue.Empty:
            return False
        if len(self._held) < MAX_WAITING:
            self._held.append(fields)
        else:
            self.lost += 1
        return True

    def _write_held(self) -> None:
        try:
            self._file.append([msgspec.json.encode(fields, enc_hook=str) for fields in self._held])
        except OSError as error:
            if not self._is_failing:
                logger.warning(
                    "File of %s cannot be written, and they wait in memory until it can: %s", self._file.kind, error
                )
            self._is_failing = True
            return
        self._is_failing = False
        self._held = []


class EventHandler(logging.Handler):
    """Writes the log records that are events."""

    def __init__(self, writer: EventWriter) -> None:
        super().__init__(logging.INFO)
        self.writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        found = getattr(record, EVENT_FIELD, None)
        if found is None:
            return
        kind, subject, details = found
        with contextlib.suppress(TypeError, ValueError):  # arguments that do not fit: the log's own handler reports it
            message = record.getMessage()[:MAX_MESSAGE_CHARS]
            level = _LEVELS.get(record.levelno, "info")
            fields = {"at": record.created, "kind": kind, "subject": subject, "level": level, "message": message}
            self.writer.write(fields | {"details": details})


def keep_events(ray_session: Path | None, source: str) -> EventWriter | None:
    """Keep the events of this process from now on.

    Args:
        ray_session: the folder of Ray's session; None: this process has no node, and keeps none.
        source: its name, which no other process of the node has.
    """
    if ray_session is None:
        return None
    for handler in logger.handlers:
        if isinstance(handler, EventHandler):
            return handler.writer
    writer = EventWriter(records_folder(ray_session), source)
    logger.addHandler(EventHandler(writer))
    return writer
