"""The machine: its packages, processes, log files, the environment of Ray's processes, HAProxy.

Decides: whether the machine can run the project, and the environment of Ray's and HAProxy's processes.
In: /proc, PATH, sysfs, Serve's HAProxy configuration. Out: processes, environments, a corrected configuration.
Never: imports Ray; `preflight` is a script for any Python 3 and imports only the standard library.
"""

from serve_app.system import doctor, environment
from serve_app.system.doctor import Check
from serve_app.system.events import EVENTS, EventKind, EventWriter, event, keep_events
from serve_app.system.gpus import gpus
from serve_app.system.haproxy import FallbackHaproxy
from serve_app.system.haproxy_exporter import exposition_here
from serve_app.system.log_format import (
    begin_log,
    enter_request,
    same_request,
    set_up_child_log,
    set_up_log,
    writes_json,
)
from serve_app.system.logs import LOG_SOURCES, PROMPT_MARK, LogFilter, LogPart, LogReader, mark_log
from serve_app.system.processes import (
    Listener,
    ask_to_end,
    await_start,
    descendants,
    end_marked,
    holder_of,
    is_transient,
    listening_ports,
    marked,
    may_start_again,
    spawn,
    start_ticks,
    this_process,
)
from serve_app.system.record_files import (
    SUFFIX,
    RecordBounds,
    RecordFile,
    Sweeper,
    newest_lines,
    records_folder,
    segments,
)
from serve_app.system.sketch import DurationSketch
from serve_app.system.tls import TLS_VARIABLES, Certificate, Tls
from serve_app.system.trace_id import TRACE_ID

__all__ = [
    "EVENTS",
    "LOG_SOURCES",
    "PROMPT_MARK",
    "SUFFIX",
    "TLS_VARIABLES",
    "TRACE_ID",
    "Certificate",
    "Check",
    "DurationSketch",
    "EventKind",
    "EventWriter",
    "FallbackHaproxy",
    "Listener",
    "LogFilter",
    "LogPart",
    "LogReader",
    "RecordBounds",
    "RecordFile",
    "Sweeper",
    "Tls",
    "ask_to_end",
    "await_start",
    "begin_log",
    "descendants",
    "doctor",
    "end_marked",
    "enter_request",
    "environment",
    "event",
    "exposition_here",
    "gpus",
    "holder_of",
    "is_transient",
    "keep_events",
    "listening_ports",
    "mark_log",
    "marked",
    "may_start_again",
    "newest_lines",
    "records_folder",
    "same_request",
    "segments",
    "set_up_child_log",
    "set_up_log",
    "spawn",
    "start_ticks",
    "this_process",
    "writes_json",
]
