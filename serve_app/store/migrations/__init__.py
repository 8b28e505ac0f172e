"""Alembic's environment of the store, and in `versions` one module for each change of its tables."""
