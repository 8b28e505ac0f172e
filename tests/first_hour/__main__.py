"""`python -m tests.first_hour`: walks, prints a table of the steps and, as its last line, one JSON object.

Exit status 1 if a step failed; the command of that step and what it printed are shown.
"""

from __future__ import annotations

import secrets
import shutil
import sys
from pathlib import Path

from rich.console import Console

from benchmarks.common.output import write_json
from tests.first_hour.first_hour import FirstHour
from tests.first_hour.newcomer import Newcomer
from tests.first_hour.walk import summary, table, walk

SHORT = Path("/tmp")  # temporary files lie in it: where TMPDIR has a longer path, `serve-app up` takes /tmp instead
PIPE_WIDTH = 200  # no row is broken where the table is read by programs, or goes into a document
EXIT_INTERRUPTED = 130  # the shells' convention: 128 + SIGINT


def main() -> int:
    """Returns the exit status."""
    terminal = Console()
    console = terminal if terminal.is_terminal else Console(width=PIPE_WIDTH)
    home = SHORT / f"fh-{secrets.token_hex(2)}"
    home.mkdir(mode=0o700)
    newcomer = Newcomer(home)
    try:
        done = walk(FirstHour(newcomer).steps(), newcomer.begin, console)
        console.print(table(done))
        write_json(summary(done))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED  # its line of progress has said so
    finally:
        newcomer.end()
        shutil.rmtree(home, ignore_errors=True)
    return 1 if any(one.failed for one in done) else 0


sys.exit(main())
