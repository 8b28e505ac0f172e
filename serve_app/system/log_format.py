"""The form of log records: text, as each library has it, or JSON (`logs.format`).

The variable `LOG_FORMAT` decides for a process and for all that it starts. `serve-app up` sets it from the settings; on
a cluster the environment of each machine has it. `begin_log` begins the log of a process of ours, `set_up_log` changes
the log of a process that Ray has started.

Invariant: with `json` each record is one line that is a JSON object, also a record with line breaks, with characters
that are no text, with arguments that do not fit its message, or of any length. A request is named in the records of the
task that runs it.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from serve_app.names import LOG_FORMAT, LOG_ORIGIN
from serve_app.system.trace_id import TRACE_ID

MAX_MESSAGE_CHARS = 8_000  # above any line of ours; collectors cut lines at 16 KiB, in the middle of the JSON
MAX_EXCEPTION_CHARS = 32_000  # a traceback through Ray, Serve and vLLM takes 10,000
CUT = " ... [cut] ... "
TEXT_FORMAT = "%(asctime)s %(levelname)s {process}: %(message)s"  # of a process of ours
LIBRARIES = ("ray", "vllm")  # loggers with handlers of their own; Serve's is below Ray's and keeps its file
SERVE_LOGGER = "ray.serve"
STAMP = "serve_app_request"  # of a record: the ids of its request and its trace

_request_id: ContextVar[str] = ContextVar("request_id", default="")


def enter_request(request_id: str, trace_id: str = "") -> None:
    """Name the request, and its trace, in the log records of this task and of the tasks that it starts."""
    _request_id.set(request_id)
    TRACE_ID.set(trace_id)


def same_request() -> Callable[[], None]:
    """What names the request of this task in a task that does not belong to it, once that calls it."""
    named = {variable: variable.get() for variable in (_request_id, TRACE_ID)}

    def enter() -> None:
        for variable, value in named.items():
            variable.set(value)

    return enter


def writes_json() -> bool:
    """Whether this process and those that it starts write JSON."""
    return os.environ.get(LOG_FORMAT) == "json"


def begin_log(process: str) -> None:
    """Begin the log of a process that nobody has given one, on its standard error. `process`: its role."""
    logging.basicConfig(format=TEXT_FORMAT.format(process=process), level=logging.INFO)
    set_up_log(process)


def set_up_log(process: str, *, model: str = "", replica: str = "") -> None:
    """Give the log of this process its form; nothing changes where that is text. All records then go to where Serve's
    go: its file, else standard error.

    Args:
        process: its role, such as `router`.
        model, replica: whose it is.
    """
    if not writes_json():
        return
    origin = {"process": process, "model": model, "replica": replica}
    os.environ[LOG_ORIGIN] = json.dumps(origin)  # for the processes that it starts
    formatter = JsonFormatter({name: value for name, value in origin.items() if value})
    handlers = [*logging.getLogger(SERVE_LOGGER).handlers] or [logging.StreamHandler(sys.__stderr__)]
    for handler in handlers:
        getattr(handler, "target", handler).setFormatter(formatter)  # Serve's handler hands over to one with its file
        handler.addFilter(stamp)
    for name in LIBRARIES:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    logging.getLogger().handlers[:] = handlers
    logging.captureWarnings(True)


def set_up_child_log(process: str) -> None:
    """The same in a process that one with `set_up_log` has started: of the same model and replica."""
    origin = json.loads(os.environ.get(LOG_ORIGIN, "{}"))
    set_up_log(process, model=origin.get("model", ""), replica=origin.get("replica", ""))


def stamp(record: logging.LogRecord) -> bool:
    """A filter that names the request in the record; a handler that keeps records writes them in another task."""
    vars(record).setdefault(STAMP, (_request_id.get(), TRACE_ID.get()))
    return True


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object in one line.

    Args:
        origin: fields of every record: `process`, `model`, `replica`.
    """

    def __init__(self, origin: dict[str, str]) -> None:
        super().__init__()
        self._origin = origin

    def format(self, record: logging.LogRecord) -> str:
        stamp(record)
        request_id, trace_id = vars(record)[STAMP]
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": _bounded(_message(record), MAX_MESSAGE_CHARS),
            **self._origin,
            "pid": record.process,
        }
        named = {"request_id": request_id, "trace_id": trace_id, "exception": self._exception(record)}
        fields |= {name: value for name, value in named.items() if value}
        return json.dumps(fields)

    def _exception(self, record: logging.LogRecord) -> str:
        """The traceback, or the stack that was asked for; empty: none."""
        text = record.exc_text or ""
        if record.exc_info and record.exc_info[0] is not None:
            text = self.formatException(record.exc_info)
        return _bounded(text or record.stack_info or "", MAX_EXCEPTION_CHARS)


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception as error:  # noqa: BLE001 - whatever an argument raises: the record is not lost
        text = record.msg if isinstance(record.msg, str) else type(record.msg).__name__
        return f"{text} [its arguments cannot be shown: {type(error).__name__}]"


def _bounded(text: str, chars: int) -> str:
    """The text without its middle, if it is too long; of what is no text, an escape."""
    if len(text) > chars:
        half = (chars - len(CUT)) // 2
        text = text[:half] + CUT + text[-half:]
    return text.encode("utf-8", "backslashreplace").decode()
