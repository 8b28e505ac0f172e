"""The machine: its packages, processes, log files, the environment of Ray's processes, HAProxy.

Decides: whether the machine can run the project, and the environment of Ray's and HAProxy's processes.
In: /proc, PATH, sysfs, Serve's HAProxy configuration. Out: processes, environments, a corrected configuration.
Never: imports Ray; `preflight` is a script for any Python 3 and imports only the standard library.
"""

from serve_app.system import doctor, environment
from serve_app.system.doctor import Check
from serve_app.system.gpus import gpus
from serve_app.system.haproxy import FallbackHaproxy
from serve_app.system.log_format import (
    begin_log,
    enter_request,
    same_request,
    set_up_child_log,
    set_up_log,
    writes_json,
)
from serve_app.system.logs import LOG_SOURCES, LogFilter, LogPart, LogReader, mark_log
from serve_app.system.processes import (
    Listener,
    ask_to_end,
    await_start,
    descendants,
    end_marked,
    holder_of,
    listening_ports,
    marked,
    spawn,
    start_ticks,
    this_process,
)
from serve_app.system.tls import TLS_VARIABLES, Certificate, Tls
from serve_app.system.trace_id import TRACE_ID

__all__ = [
    "LOG_SOURCES",
    "TLS_VARIABLES",
    "TRACE_ID",
    "Certificate",
    "Check",
    "FallbackHaproxy",
    "Listener",
    "LogFilter",
    "LogPart",
    "LogReader",
    "Tls",
    "ask_to_end",
    "await_start",
    "begin_log",
    "descendants",
    "doctor",
    "end_marked",
    "enter_request",
    "environment",
    "gpus",
    "holder_of",
    "listening_ports",
    "mark_log",
    "marked",
    "same_request",
    "set_up_child_log",
    "set_up_log",
    "spawn",
    "start_ticks",
    "this_process",
    "writes_json",
]
