"""A child process that answers questions: what it is asked again when it ends, and what its caller is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from serve_app.engine.helper_process import RETRY_AFTER_S, HelperProcess
from serve_app.errors import Unavailable

# It notes each question in a file, and ends at "end".
CHILD = """
import sys
from serve_app.engine.helper_process import frame, read_message
noted = read_message(sys.stdin.buffer).decode()
while (question := read_message(sys.stdin.buffer)) is not None:
    with open(noted, "ab") as file:
        file.write(question + b"\\n")
    if question == b"end":
        break
    sys.stdout.buffer.write(frame(question.upper()))
    sys.stdout.buffer.flush()
"""


@pytest.fixture(params=[1, 2])
def asked(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[int, HelperProcess, Path]]:
    """The tries of a question, the process and the questions that its children were asked."""
    noted = tmp_path / "questions"
    helper = HelperProcess("answers", ["-c", CHILD], str(noted).encode(), tries=request.param)
    yield request.param, helper, noted
    helper.end()


def test_a_question_at_which_the_child_ends_is_asked_as_often_as_given(asked: tuple[int, HelperProcess, Path]) -> None:
    tries, helper, noted = asked
    assert helper.ask(b"one") == b"ONE"
    with pytest.raises(Unavailable) as caught:
        helper.ask(b"end")
    assert caught.value.retry_after_s == RETRY_AFTER_S
    assert helper.ask(b"two") == b"TWO"
    assert noted.read_text().split() == ["one", *["end"] * tries, "two"]
