"""What a driver adds to the audit record, and what it says if the store does not take it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from autoscaling.rollout.audit import AuditWriter, store_url
from serve_app.names import RELEASE
from serve_app.settings import application, parse
from serve_app.store import AuditAction, AuditEntry
from tests.fakes.stores import FakeStore

URL = "postgresql://serve@db/$serve"
BOUND_S = 30.0  # of a thread that takes milliseconds


def declared(**config: Any) -> dict[str, Any]:
    return application(parse(config).with_key("sk-ops-0123456789").without_secrets())


@pytest.fixture
def store(tmp_path: Path) -> FakeStore:
    return FakeStore(tmp_path)


def entries(store: FakeStore) -> list[AuditEntry]:
    return asyncio.run(store.audit(0.0, 0, 9))


def test_a_deployment_has_the_digests_of_both_configurations(store: FakeStore) -> None:
    writer = AuditWriter(lambda _: store, lambda: 5.0)
    first = declared()
    second = declared(admission={"max_queued": 7})
    for before, after in ((None, first), (first, second), (second, first)):
        assert writer.deployed(AuditAction.DEPLOY, before, after).result(BOUND_S) == ""
    made, changed, back = entries(store)
    assert (made.digest_before, back.digest_after) == (None, made.digest_after)
    assert (changed.digest_before, changed.digest_after) == (made.digest_after, back.digest_before)
    assert made.digest_after != changed.digest_after
    assert (made.author.key_id, made.target, made.at) == ("machine", "serve_app", 5.0)
    assert made.details["release"] == RELEASE
    assert made.details["user"]
    assert made.details["host"]


def test_a_drain_has_its_target_and_its_bound(store: FakeStore) -> None:
    writer = AuditWriter(lambda _: store)
    assert writer.changed(AuditAction.DRAIN, "replica-1", declared(), within_s=30.0).result(BOUND_S) == ""
    (found,) = entries(store)
    assert (found.action, found.target, found.details["within_s"]) == ("drain", "replica-1", 30.0)
    assert (found.digest_before, found.digest_after) == (None, None)


def test_what_the_store_does_not_take_is_reported_and_stops_nothing(store: FakeStore) -> None:
    store.away = True
    writer = AuditWriter(lambda _: store)
    reason = writer.changed(AuditAction.DRAIN, "replica-1", None).result(BOUND_S)
    assert "lacks this drain" in reason
    assert "the store is away" in reason

    def broken(_: str | None) -> Any:
        raise AttributeError("an actor of another release")

    assert "another release" in AuditWriter(broken).changed(AuditAction.DEFRAG, "a", None).result(BOUND_S)


def test_the_record_is_in_the_store_of_the_application() -> None:
    asked: list[str | None] = []

    def refuse(url: str | None) -> Any:
        asked.append(url)
        raise ValueError("enough")

    writer = AuditWriter(refuse)
    writer.deployed(AuditAction.DEPLOY, declared(), declared(store={"url": URL})).result(BOUND_S)
    assert asked == [URL]
    assert store_url(None) is None
    assert store_url({"args": {"store": "unreadable"}}) is None
