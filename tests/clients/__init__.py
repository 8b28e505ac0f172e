"""Real clients against a running stack, for the list in docs/reference/clients.md: `python -m tests.clients.run`.

The clients are no dependencies of the project: `python_clients.py` runs with the interpreter of a virtual environment
that has them, `node_clients.mjs` beside their `node_modules`. Each prints one JSON object a check.
"""
