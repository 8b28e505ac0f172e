"""Run the checks of Python clients, all or those named: `python -m tests.clients.checks [CLIENT ...]`.

Reads OPENAI_BASE_URL, OPENAI_API_KEY, CLIENTS_LOW_KEY and CLIENTS_CHECKS (the checks to run, separated by `;`; all
without it), and prints a JSON object for each check.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import traceback

from tests.clients.checks import agents, frameworks, openai_sdk, wrappers
from tests.clients.checks.common import COLUMNS


def main(wanted: list[str]) -> None:
    chosen = os.environ.get("CLIENTS_CHECKS", ";".join(COLUMNS)).split(";")
    for client, checks in (openai_sdk.CHECKS | frameworks.CHECKS | wrappers.CHECKS | agents.CHECKS).items():
        if wanted and client not in wanted:
            continue
        version = importlib.metadata.version(client)
        for check, run in checks.items():
            if check not in chosen:
                continue
            note = error = None
            try:
                note = run()
            except Exception as failure:  # noqa: BLE001 - any failure is a cell of the table
                error = f"{type(failure).__name__}: {failure}"[:600]
                traceback.print_exc()
            found = {"client": client, "version": version, "check": check, "note": note, "error": error}
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
