"""What the quota actor stores: every value comes back as it was, also past a release with other fields."""

from __future__ import annotations

import dataclasses
import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.memory import (
    Device,
    EngineReport,
    EntryKind,
    Hold,
    Rank,
    Reservation,
    SessionEntry,
    SessionRequest,
    StartReport,
)
from serve_app.quota.kv_store import EPOCH, INVENTORY, NODE, Unreadable, checkpoint_entries, decode, encode
from serve_app.settings import QuotaSettings
from serve_app.types import RequestClass

NAMES = st.text(min_size=1)
BYTES = st.integers(0, 2**50)
HOLDS = st.builds(Hold, NAMES, BYTES)
REPORTS = st.builds(
    EngineReport,
    owner=NAMES,
    model=NAMES,
    ranks=st.lists(st.builds(Rank, NAMES, st.none() | st.integers(0, 7)), min_size=1).map(tuple),
    wanted_bytes=st.integers(2**40, 2**50),
    least_bytes=st.integers(1, 2**40),
    holds=st.lists(HOLDS).map(tuple),
    measured_bytes=st.lists(st.none() | BYTES).map(tuple),
    processes=st.lists(st.tuples(NAMES, st.lists(st.tuples(BYTES, BYTES)).map(tuple))).map(tuple),
    kv_tokens=BYTES,
    loading=st.booleans(),
    failed=st.text(),
)
REQUESTS = st.builds(
    SessionRequest,
    session_id=NAMES,
    model=NAMES,
    tokens=st.integers(1, 2**40),
    ttl_s=st.floats(0.1, 1e9),
    wait_until=st.none() | st.floats(0, 1e9),
    request_class=st.sampled_from(RequestClass),
)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    EPOCH: st.integers(0),
    INVENTORY: st.builds(QuotaSettings, reserved_gb=st.floats(0, 100)),
    f"{NODE}n": st.lists(st.builds(Device, NAMES, st.integers(0, 7), st.integers(2**30, 2**40), st.integers(0, 2**30))),
    f"{EntryKind.ENGINE}:e": REPORTS,
    f"{EntryKind.ROUTER}:r": st.frozensets(NAMES),
    f"{EntryKind.SESSION}:s": st.builds(SessionEntry, REQUESTS, NAMES, NAMES, st.booleans()),
    f"{EntryKind.RESERVATION}:b": st.builds(Reservation, NAMES, NAMES, HOLDS, st.text(), st.text()),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back_as_it_was_stored(name: str) -> None:
    @given(VALUES[name])
    def check(value: Any) -> None:
        assert decode(name, encode(name, value)) == value

    check()


def test_every_kind_of_entry_is_drawn() -> None:
    assert {name.partition(":")[0] for name in VALUES} == {EPOCH, INVENTORY, NODE.rstrip(":"), *EntryKind}


@given(REPORTS)
def test_a_field_of_a_later_release_is_ignored_and_one_that_an_earlier_did_not_have_has_its_default(
    report: EngineReport,
) -> None:
    name = f"{EntryKind.ENGINE}:e"
    stored = json.loads(encode(name, report))
    later = decode(name, json.dumps({**stored, "unheard_of": [1, {"a": None}]}).encode())
    assert later == report
    del stored["failed"]
    earlier = decode(name, json.dumps(stored).encode())
    assert (earlier.failed, earlier.holds) == ("", report.holds)


@pytest.mark.parametrize(
    "report",
    [EngineReport("e", "m", (Rank("n"),), 2, 1, kv_tokens=7), StartReport("loading", 1.0, 0.5)],
    ids=lambda report: type(report).__name__,
)
def test_a_report_sent_by_a_release_with_fewer_or_more_fields_is_read(report: Any) -> None:
    _, _, state = report.__reduce_ex__(2)[:3]
    names = [field.name for field in dataclasses.fields(report)]
    for sent in (state[:-1], [*state, "of a later one"]):
        read = type(report).__new__(type(report))
        read.__setstate__(sent)
        assert read == report
        assert [getattr(read, name) for name in names] == [getattr(report, name) for name in names]
    assert pickle.loads(pickle.dumps(report)) == report


@pytest.mark.parametrize("stored", [b"", b"null", b"3", b"\x80\x05N.", b'{"owner": "e"}', b"[1, 2", b'"text"'])
def test_what_cannot_be_read_is_unreadable_with_its_reason_and_of_an_engine_it_is_known_that_it_was(
    stored: bytes,
) -> None:
    engine = f"{EntryKind.ENGINE}:e"
    session = f"{EntryKind.SESSION}:s"
    found = {name: decode(name, stored) for name in (engine, session)}
    assert all(isinstance(value, Unreadable) and value.why for value in found.values())
    assert dict(checkpoint_entries(found)) == {(EntryKind.ENGINE, "e"): None}


def test_a_report_that_its_own_class_refuses_is_unreadable() -> None:
    report = json.loads(encode(f"{EntryKind.ENGINE}:e", EngineReport("e", "m", (Rank("n"),), 2, 1)))
    found = decode(f"{EntryKind.ENGINE}:e", json.dumps({**report, "ranks": []}).encode())
    assert isinstance(found, Unreadable)
    assert "0 ranks" in found.why
