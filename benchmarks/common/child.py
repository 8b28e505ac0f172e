"""Processes that end with the one that started them, and run as another user where that is wanted (Linux).

What they become is done by a small Python before the command, not by a function between fork and exec: in a process
that has used Ray, gRPC's threads make its handlers of fork abort the child now and then. Without such a function (and
without `user=`) `subprocess` calls vfork, and no handler runs.
"""

from __future__ import annotations

import os
import signal
import sys

# What it imports is read before the user changes: another one may not see our Python.
_PROGRAM = """
import ctypes, os, pwd, sys
libc = ctypes.CDLL(None)
number, parent, user, *command = sys.argv[1:]
if user:
    entry = pwd.getpwnam(user)
    os.setgroups([])
    os.setgid(entry.pw_gid)
    os.setuid(entry.pw_uid)
libc.prctl(1, int(number))
if os.getppid() != int(parent):  # it has ended already
    os.kill(os.getpid(), int(number))
os.execvp(command[0], command)
"""  # 1: PR_SET_PDEATHSIG of linux/prctl.h, which a change of the user undoes


def ends_with_us(end: signal.Signals = signal.SIGKILL, *, user: str = "") -> list[str]:
    """What stands before a command so that its process, which keeps its id, gets `end` when the thread that started it
    ends. `user`: whose process it is; ours without a name, which needs root."""
    return [sys.executable, "-Ic", _PROGRAM, str(int(end)), str(os.getpid()), user]
