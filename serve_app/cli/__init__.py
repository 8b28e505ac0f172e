"""The command line `serve-app`.

Decides: what the user sees: progress, tables, exit statuses, one line for each error.
In: arguments and configuration files. Out: text, or JSON with `--json`.
Never: imports Ray; a driver process does (`cluster.local`).
"""

from serve_app.cli.commands import main

__all__ = ["main"]
