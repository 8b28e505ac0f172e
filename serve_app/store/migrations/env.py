"""What alembic runs for each command: the migrations on the connection that `serve_app.store.schema` gives it."""

from __future__ import annotations

from alembic import context

context.configure(connection=context.config.attributes["connection"])
context.run_migrations()
