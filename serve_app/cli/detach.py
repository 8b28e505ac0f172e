"""`serve-app up --detach`: the same command in the background, in a session of its own, until it serves.

What it prints is in `up.log` of the instance's state folder, and is shown here until then.

Invariant: when this returns 0 the instance serves; otherwise the command in the background has ended, as after Ctrl-C.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import TextIO

import typer
from rich.console import Console

from serve_app.cli.command_line import EXIT_FAILED, EXIT_INTERRUPTED
from serve_app.cli.layout import say
from serve_app.cli.up import LAST_LINE, interruptible
from serve_app.cluster.local import InstanceState

LOG = "up.log"
POLL_S = 0.1  # between two looks at the log
END_S = 90.0  # for `up` to end in order; above all its waits


def same_command(context: typer.Context, without: str) -> list[str]:
    """The command line that this context was made from, as a process of its own, without one option."""
    command = [sys.executable, "-P", "-m", "serve_app.cli", str(context.info_name)]
    for parameter in context.command.params:
        value = context.params.get(str(parameter.name))
        if parameter.name == without or value is None or value == parameter.default:
            continue
        if isinstance(value, bool):
            command.append((parameter.opts if value else parameter.secondary_opts)[0])
        else:
            command += [parameter.opts[0], str(value)]
    return command


def detach(command: Sequence[str], state: InstanceState, console: Console) -> int:
    """Start the command, and return 0 once it serves, or else its exit status.

    Raises:
        Unavailable: the instance runs already. ConfigError: its folder cannot be written.
    """
    state.require_unowned()
    state.create()
    log = state.folder / LOG
    with os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    with log.open(errors="replace") as log_text, interruptible():
        try:
            code = _follow(process, log_text, console)
        except KeyboardInterrupt:
            return _end(process, log_text, console)
    if code is None:
        say(console, f"It goes on in the background; `serve-app down` ends it. Its log: {log}")
        return 0
    return code or EXIT_FAILED


def _follow(process: subprocess.Popen[bytes], log_text: TextIO, console: Console) -> int | None:
    """Show what it says until it serves (None), or has ended (its exit status)."""
    while True:
        code = process.poll()  # before its last lines are read
        for line in log_text.read().splitlines():
            if line == LAST_LINE:
                return None
            say(console, line)
        if code is not None:
            return code
        time.sleep(POLL_S)


def _end(process: subprocess.Popen[bytes], log_text: TextIO, console: Console) -> int:
    """End it as Ctrl-C does there; another Ctrl-C forces it."""
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline:
        try:
            process.send_signal(signal.SIGTERM)
            process.wait(END_S)
            break
        except KeyboardInterrupt:
            continue
        except subprocess.TimeoutExpired:
            process.kill()
    for line in log_text.read().splitlines():
        say(console, line)
    return EXIT_INTERRUPTED
