"""Clients come first for as long as they measure, and only where they may."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.common import priority
from benchmarks.common.priority import FIRST, clients_first


def test_the_session_is_first_for_the_block_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    autogroup = tmp_path / "autogroup"
    autogroup.write_text("/autogroup-12 nice 5\n")
    monkeypatch.setattr(priority, "AUTOGROUP", autogroup)
    with clients_first() as is_first:
        assert (is_first, autogroup.read_text()) == (True, str(FIRST))
    assert autogroup.read_text() == "5"


@pytest.mark.parametrize("is_there", [False, True], ids=["no_autogroups", "in_none"])
def test_a_process_in_no_autogroup_is_first_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    reported = list[int]()
    autogroup = tmp_path / "autogroup"
    if is_there:
        autogroup.write_text("")
    monkeypatch.setattr(priority, "AUTOGROUP", autogroup)
    monkeypatch.setattr(os, "setpriority", lambda which, pid, nice: reported.append(nice))
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with clients_first() as is_first:
        assert (is_first, reported) == (True, [FIRST])
    assert reported == [FIRST, before]


def test_who_may_not_measures_nevertheless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(priority, "AUTOGROUP", tmp_path / "absent")
    monkeypatch.setattr(os, "setpriority", refuse)
    with clients_first() as is_first:
        assert not is_first
