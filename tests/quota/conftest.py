"""The quota actor's world, for each test a new one."""

from __future__ import annotations

import pytest

from serve_app.quota import actor as quotas
from tests.quota.actor_world import World, WorldInventory


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(quotas, "GcsStore", lambda: made)
    monkeypatch.setattr(quotas, "Inventory", lambda settings, before: WorldInventory(made, before))
    for name, span_s in (("ACTOR_TICK_S", 0.02), ("NODE_LOOK_S", 0.02), ("WATCH_S", 0.2)):
        monkeypatch.setattr(quotas, name, span_s)
    return made
