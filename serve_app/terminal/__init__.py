"""What a person at a terminal sees: starting, watching, asking and ending an instance (serve_app/cli.py)."""
