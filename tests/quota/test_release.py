"""Which release the quota actor runs: it ends its process for another release, and Ray starts it in a new one."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from serve_app.names import RELEASE
from serve_app.quota import actor as quotas
from serve_app.quota.actor import GpuMemoryQuota

OTHER = "9.9.9"


class Killed(BaseException):
    """In place of the signal, which nothing survives."""


@pytest.fixture(autouse=True)
def kills(monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(pid: int, number: int) -> None:
        assert (pid, number) == (os.getpid(), signal.SIGKILL)
        raise Killed

    monkeypatch.setattr(quotas.os, "kill", kill)


@pytest.mark.parametrize(
    ("wanted", "installed", "ends"),
    [(OTHER, OTHER, True), (OTHER, RELEASE, False), (RELEASE, RELEASE, False), (RELEASE, OTHER, False)],
    ids=["upgraded", "elsewhere", "same", "older"],
)
def test_the_actor_restarts_as_the_release_of_a_replica_where_that_is_installed(
    monkeypatch: pytest.MonkeyPatch, wanted: str, installed: str, ends: bool
) -> None:
    monkeypatch.setattr(quotas.importlib.metadata, "version", lambda _: installed)
    actor = GpuMemoryQuota.__new__(GpuMemoryQuota)
    if not ends:
        asyncio.run(actor.upgrade(wanted))
        return
    with pytest.raises(Killed):
        asyncio.run(actor.upgrade(wanted))
