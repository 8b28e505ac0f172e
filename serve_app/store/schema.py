"""Brings the tables of a database to what this release needs.

Invariant: of several processes that start at once, one migrates, and the others wait for it; a migration that fails
changes nothing.
"""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, Engine, text

MIGRATIONS = Path(__file__).parent / "migrations"
ADVISORY_LOCK = 7_236_114_025  # of PostgreSQL: any number that no other program of the database takes


def upgrade(engine: Engine) -> None:
    """Run the migrations that are missing."""
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": ADVISORY_LOCK})
        command.upgrade(_config(connection), "head")


def _config(connection: Connection) -> Config:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config
