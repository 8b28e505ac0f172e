"""The command line: `python -m serve_app.cli`, the same as `serve-app`."""

from serve_app.cli.commands import main

main()
