"""What `serve-app batch submit` does with a file: each line is checked, and it is sent piece by piece."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from serve_app.cli.batch_upload import CHUNK_BYTES, CheckedFile, FormUpload, checked
from serve_app.cli.progress import ByteProgress
from serve_app.core.batches.rows import MAX_LINE_BYTES
from serve_app.errors import BadRequest
from tests.cli.test_batch import CHAT, DOCUMENT, row
from tests.requires import requires

requires("linux")


def test_a_line_without_end_is_refused_and_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    with path.open("wb") as hole:
        hole.truncate(100 * MAX_LINE_BYTES)  # a hole: it takes no disk, and reading it all would take long
    out = io.StringIO()
    with pytest.raises(BadRequest, match="line 1: The line is longer than"):
        checked(path, None, Console(file=out))
    assert out.getvalue() == ""


def test_a_last_line_needs_no_end_and_empty_ones_are_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_bytes(b"\n" + row(1) + b"\r\n\n" + row(2))
    assert checked(path, None, Console()) == CheckedFile(path.stat().st_size, 2, CHAT)


def test_an_upload_is_read_piece_by_piece_and_as_long_as_it_says(tmp_path: Path) -> None:
    path = tmp_path / "large.jsonl"
    path.write_bytes(b"x" * (5 * CHUNK_BYTES + 17))
    sent: list[int] = []
    form = FormUpload(path, path.stat().st_size, {"purpose": "batch"}, sent.append)
    pieces = list(map(len, form))
    assert sum(pieces) == len(form) == sum(sent) == form.sent
    assert max(pieces) == CHUNK_BYTES


def test_a_file_that_becomes_shorter_ends_the_upload(tmp_path: Path) -> None:
    path = tmp_path / "cut.jsonl"
    path.write_bytes(b"x")
    form = FormUpload(path, 2, {}, lambda count: None)
    with pytest.raises(BadRequest, match="has become shorter"):
        list(form)


def test_progress_of_bytes_is_shown_where_it_takes_longer(tmp_path: Path) -> None:
    now = [0.0]
    out = io.StringIO()
    with ByteProgress(Console(file=out, width=80), "uploading a.jsonl", 40_000_000, lambda: now[0]) as progress:
        for second in range(33):
            now[0] = float(second)
            progress.advance(1_000_000)
    assert out.getvalue().splitlines() == [
        "uploading a.jsonl: 3.0 of 40.0 MB",
        "uploading a.jsonl: 18.0 of 40.0 MB",
        "uploading a.jsonl: 33.0 of 40.0 MB",
    ]


def test_a_terminal_gets_a_bar_of_bytes_that_is_gone_at_the_end() -> None:
    now = [0.0]
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True, color_system=None)
    with ByteProgress(console, "checking [b]a[/b].jsonl", None, lambda: now[0]) as progress:
        progress.expect(4_000_000)
        progress.advance(1)
        assert out.getvalue() == ""
        now[0] = 2.0
        progress.advance(1_000_000)
    assert "checking [b]a[/b].jsonl" in out.getvalue()
    assert "1.0/4.0 MB" in out.getvalue()
    assert out.getvalue().endswith("\x1b[2K")


def test_the_documented_row_is_one(tmp_path: Path) -> None:
    first, *_ = re.findall(r"^```json\n(.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    path = tmp_path / "documented.jsonl"
    path.write_text(first)
    assert checked(path, None, Console()).rows == 2
