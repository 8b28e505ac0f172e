"""The actor that owns SQLite files: which file it opens."""

from __future__ import annotations

import pytest

from serve_app.names import STORE_FILE
from serve_app.store import owner
from serve_app.store.owner import StoreOwner
from tests.store.records import key


def test_without_a_url_the_file_is_the_one_that_the_environment_names(
    monkeypatch: pytest.MonkeyPatch, sqlite_url: str
) -> None:
    monkeypatch.setenv(STORE_FILE, sqlite_url.removeprefix("sqlite:///"))
    actor = StoreOwner()
    made = actor.run(None, "create_key", (key(),), {})
    assert actor.run(sqlite_url, "keys", (), {}) == [made]
    monkeypatch.delenv(STORE_FILE)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert owner.default_url() == "sqlite:////home/somebody/.local/state/serve-app/store.sqlite"
