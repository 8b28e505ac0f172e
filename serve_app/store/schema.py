"""Brings the tables of a database to what this release needs.

Invariant: of several processes that start at once, one migrates, and the others wait for it; a migration that fails
changes nothing. Migrations only add, so that the release before goes on with tables of a newer one.
"""

from __future__ import annotations

import functools
import logging
import threading
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, text

logger = logging.getLogger("ray.serve")

MIGRATIONS = Path(__file__).parent / "migrations"
ADVISORY_LOCK = 7_236_114_025  # of PostgreSQL: any number that no other program of the database takes

ALEMBIC = threading.Lock()  # its context of a migration is a global of its module


def upgrade(engine: Engine, revision: str = "head") -> None:
    """Run the migrations that are missing, up to a revision."""
    with ALEMBIC, engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": ADVISORY_LOCK})
        found = MigrationContext.configure(connection).get_current_revision()
        newest, *older = _revisions()
        if found == newest:
            return
        if found is None or found in older:
            command.upgrade(_config(connection), revision)
        else:
            logger.info("Store has tables of a newer release (revision %s), which are used as they are", found)


@functools.cache
def _revisions() -> tuple[str, ...]:
    """Of this release, the newest first."""
    return tuple(script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions())


def _config(connection: Connection | None = None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config
