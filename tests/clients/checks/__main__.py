"""Run the checks of Python clients, all or those named: `python -m tests.clients.checks [CLIENT ...]`.

Reads OPENAI_BASE_URL, OPENAI_API_KEY and CLIENTS_LOW_KEY, and prints a JSON object for each check.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import traceback

from tests.clients.checks import agents, frameworks, openai_sdk, wrappers


def main(wanted: list[str]) -> None:
    for client, checks in (openai_sdk.CHECKS | frameworks.CHECKS | wrappers.CHECKS | agents.CHECKS).items():
        if wanted and client not in wanted:
            continue
        version = importlib.metadata.version(client)
        for check, run in checks.items():
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
