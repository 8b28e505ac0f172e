"""`python -m tests.first_hour`: walks, prints a table of the steps and, as its last line, one JSON object.

Exit status 1 if a step failed; the command of that step and what it printed are shown.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from benchmarks.common.output import write_json
from tests.first_hour.first_hour import FirstHour
from tests.first_hour.newcomer import Newcomer
from tests.first_hour.walk import summary, table, walk

# Ray's sockets lie in it, and a unix socket's path has 107 bytes at most
SHORT = "/tmp"


def main() -> int:
    """Returns the exit status."""
    console = Console()
    home = Path(tempfile.mkdtemp(prefix="fh-", dir=SHORT))
    newcomer = Newcomer(home)
    try:
        done = walk(FirstHour(newcomer).steps(), newcomer.begin, console)
        console.print(table(done), soft_wrap=True)
        write_json(summary(done))
    finally:
        newcomer.end()
        shutil.rmtree(home, ignore_errors=True)
    return 1 if any(one.failed for one in done) else 0


sys.exit(main())
