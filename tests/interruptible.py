"""Commands that a test ends as Ctrl-C does.

A shell starts what is in the background of a script (`make test &`) with SIGINT ignored, and every process below
inherits that, Python programs too: they then install no handler of their own. What a test sends SIGINT to is therefore
started by `interruptible`, whoever started the tests.
"""

from __future__ import annotations

from collections.abc import Sequence


def interruptible(command: Sequence[str]) -> list[str]:
    """The command with SIGINT's default action, in the process that is started for it (coreutils 8.31 or later)."""
    return ["env", "--default-signal=INT", *command]
