"""Times and levels of log lines, in the forms of those who write them."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from serve_app.system import log_times, logs
from serve_app.system.log_times import CONTINUED_LINES, NO_HEAD, LogHead, head_of, records_of
from serve_app.system.logs import LogFilter, LogReader

NOW = datetime(2026, 11, 25, 12)
AT = datetime(2026, 11, 25, 1, 27, 37).timestamp()


@pytest.mark.parametrize(
    ("line", "head"),
    [
        ("ERROR 2026-11-25 01:27:37,655 serve_app_Router r1 -- failed", LogHead(AT + 0.655, "ERROR")),
        ("2026-11-25 01:27:37,655\tINFO actor.py:1 -- started", LogHead(AT + 0.655, "INFO")),
        ("2026-11-25 01:27:37 WARNING router: late", LogHead(AT, "WARNING")),
        ("[2026-11-25 01:27:37,655 W 12 34] core_worker.cc:1: late", LogHead(AT + 0.655, "WARNING")),
        ("INFO 11-25 01:27:37 [core.py:58] Initializing", LogHead(AT, "INFO")),
        ("(EngineCore_DP0 pid=7) INFO 11-25 01:27:37 [core.py:58] x", LogHead(AT, "INFO")),
        ('{"time": "2026-11-25T01:27:37.655", "level": "error", "message": "x"}', LogHead(AT + 0.655, "ERROR")),
        ('{"asctime": "2026-11-25 01:27:37,655", "levelname": "INFO"}', LogHead(AT + 0.655, "INFO")),
        ("INFO one", LogHead(None, "INFO")),
        ("INFO 02-30 01:27:37 [core.py:58] x", LogHead(None, "INFO")),
        ("INFORMATION", None),
        ("Traceback (most recent call last):", None),
        ("  File x", None),
        ('{"id": 1}', None),
        ('{"broken', None),
        ("", None),
    ],
)
def test_a_head_is_known_by_its_form(line: str, head: LogHead | None) -> None:
    found = head_of(line, NOW)
    assert found == (head if head is None else head._replace(time=pytest.approx(head.time)))


def test_a_day_without_a_year_is_the_last_one() -> None:
    january = datetime(2027, 1, 2)
    found = head_of("INFO 12-31 23:00:00 [core.py:58] x", january)
    assert found is not None
    assert found.time == datetime(2026, 12, 31, 23).timestamp()


def test_lines_below_a_head_are_of_its_record_up_to_a_bound() -> None:
    lines = ["boom", "INFO one", *["  File x"] * (CONTINUED_LINES + 2), "ERROR two"]
    found = list(records_of(lines, NOW))
    assert [(one.head.level, len(one.lines)) for one in found] == [
        *(("", 1), ("INFO", 1 + CONTINUED_LINES)),
        *(("", 1), ("", 1), ("ERROR", 1)),
    ]
    assert found[0].head == NO_HEAD


def test_a_record_without_a_time_has_that_of_the_one_before() -> None:
    found = list(records_of(["INFO 2026-11-25 01:27:37,000 x", "WARNING y", "z"], NOW))
    assert [(one.head.time, one.head.level) for one in found] == [(AT, "INFO"), (AT, "WARNING")]


def test_of_a_large_file_no_more_is_read_than_a_time_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "FIRST_BYTES", 120)
    file = tmp_path / "serve/replica_serve_app_Router_r1.log"
    file.parent.mkdir()
    file.write_text("".join(f"INFO 2026-11-25 01:00:{second:02},000 x -- {second}\n" for second in range(60)))

    def found(since: int) -> list[str]:
        at = datetime(2026, 11, 25, 1, 0, since).timestamp()
        (part,) = LogReader(str(tmp_path), LogFilter(since=at)).last(100)
        return [line.split()[-1] for line in part.lines]

    parsed: list[int] = []
    records = log_times.records_of
    monkeypatch.setattr(logs, "records_of", lambda lines, now: parsed.append(len(lines)) or records(lines, now))
    assert found(58) == ["58", "59"]
    assert parsed[0] < 10
    assert found(1) == [str(second) for second in range(1, 60)]
