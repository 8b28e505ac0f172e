"""Why an engine did not start, or died later: the error that vLLM's own process logged, where, and what to do about it.

vLLM's EngineCore fails in a process of its own, and its client only says that it failed. The cause is in the file with
this process's standard error, which EngineCore shares.

Invariant: a cause is one line of at most `CAUSE_LENGTH` characters, and some words.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterable
from pathlib import Path

import pydantic

from serve_app.errors import EngineFailed, ServeAppError

TAIL_BYTES = 256 * 1024  # of the log: a traceback of each rank, and what was logged after them
CAUSE_LENGTH = 400  # vLLM puts whole lists of tensors into some messages
NO_CAUSE = "Engine core initialization failed"  # of vLLM's client
# What EngineCore logs first when it ends later, with its error after it; and what it logs of a worker process before
# that. Errors of requests, which it survives, stand in the same file.
FATAL = "EngineCore encountered a fatal error"
_WORKER_DIED = re.compile(r"\[\w+\.py:\d+\] (.+ died unexpectedly.*)")
_ERROR = re.compile(r"(?:^|\s)((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit)(?:: .+)?)$")

# Part of the error, in lower case -> what helps; the first one that is there.
REMEDIES: tuple[tuple[str, str], ...] = (
    ("gated repo", "accept the model's licence at the hub, and set HF_TOKEN to a token of that account"),
    ("401 client error", "set HF_TOKEN to a token that may read the model"),
    ("is not a local folder and is not a valid model", "check models[].path: an id at the hub or a folder"),
    ("repository not found", "check models[].path, or set HF_TOKEN for a private model"),
    ("outgoing traffic has been disabled", "HF_HUB_OFFLINE is set: download the model before, or unset it"),
    ("couldn't connect", "the hub cannot be reached: download the model before, or set models[].path to a folder"),
    ("connectionerror", "the hub cannot be reached: download the model before, or set models[].path to a folder"),
    ("no space left", "free space, or set HF_HOME to a larger disk; `serve-app doctor` shows both"),
    ("trust_remote_code", "the model brings code of its own, which is not run here; use one that vLLM knows"),
    ("kv cache is needed", "raise kv_cache_gb, or lower max_model_len"),
    ("no available memory for the cache blocks", "raise gpu_memory_utilization or memory_gb, or take a smaller model"),
    ("less than desired gpu memory utilization", "another process has memory of the GPU: nvidia-smi; end it"),
    ("out of memory", "lower kv_cache_gb, max_num_seqs or max_model_len, or use more devices"),
    ("unrecognized arguments", "check models[].extra_engine_args"),
    ("unexpected keyword argument", "check models[].extra_engine_args"),
    ("max_model_len", "lower max_model_len to what the model was made for"),
)


def start_failure(model: str, error: Exception, log: Path | None = None) -> ServeAppError:
    """The error of an engine that did not start, in one line: cause, remedy, and the log with the whole of it.

    Args:
        error: what starting it raised; one that is ours already says what is wrong.
        log: by default the file that has this process's standard error.
    """
    if isinstance(error, ServeAppError):
        return error
    log = log or _own_log()
    cause = f"{type(error).__name__}: {_first_line(error)}"
    if NO_CAUSE in cause and log is not None:
        cause = logged_cause(_tail(log)) or cause
    return EngineFailed(_with_remedy(f"{model} did not start: {cause}", log))


def death(error: ServeAppError, log: Path | None = None) -> str:
    """Why an engine that had started has ended, as `start_failure` says it.

    Args:
        error: how its end was seen.
        log: by default the file that has this process's standard error.
    """
    log = log or _own_log()
    cause = "" if log is None else logged_death(_tail(log))
    return _with_remedy(f"the engine died: {cause}" if cause else error.message, log)


def how_ended(exit_codes: Iterable[int]) -> str:
    """How processes of an engine were ended from outside; empty: they were not."""
    signals = dict.fromkeys(signal.Signals(-code).name for code in exit_codes if code < 0)
    if not signals:
        return ""
    why = ", which the kernel sends where memory is short" if signal.SIGKILL.name in signals else ""
    return f"its process was ended by {' and '.join(signals)}{why}"


def _with_remedy(cause: str, log: Path | None) -> str:
    """An end in one line: its cause, what helps, and the log."""
    cause = cause if len(cause) <= CAUSE_LENGTH else f"{cause[:CAUSE_LENGTH]} ..."
    return "; ".join(filter(None, [cause, remedy(cause), "" if log is None else f"log: {log}"]))


def _own_log() -> Path | None:
    """The file that has this process's standard error."""
    with contextlib.suppress(OSError):
        return Path(os.readlink("/proc/self/fd/2"))
    return None


def _first_line(error: Exception) -> str:
    """What an error says in one line: of one by pydantic what is wrong, which its first line does not say."""
    if isinstance(error, pydantic.ValidationError):
        return "; ".join(one["msg"].removeprefix("Value error, ") for one in error.errors(include_input=False))
    return next(iter(str(error).strip().splitlines()), "")


def logged_cause(text: str) -> str:
    """The last error of a log that is a cause and no consequence; empty if there is none."""
    found = [match[1] for line in text.splitlines() if (match := _ERROR.search(line.rstrip()))]
    causes = [one for one in found if NO_CAUSE not in one and ": " in one]
    return causes[-1] if causes else ""


def logged_death(text: str) -> str:
    """What EngineCore has logged of its end; empty: nothing, it was killed."""
    before, is_there, after = text.rpartition(FATAL)
    workers = _WORKER_DIED.findall(before)
    if workers:
        return str(workers[-1])
    return logged_cause(after) if is_there else ""


def remedy(cause: str) -> str:
    """What helps against an error; empty if that is not known."""
    low = cause.lower()
    return next((text for part, text in REMEDIES if part in low), "")


def _tail(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:  # a terminal or a pipe
        return ""
