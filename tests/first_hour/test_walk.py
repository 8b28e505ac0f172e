"""How steps are taken and reported, and what the documents promise is found in them."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console

from tests.first_hour import documents
from tests.first_hour.walk import FIRST_ANSWER, Outcome, Step, StepFailedError, summary, table, walk


def steps(*results: str | Exception, ran: list[str] | None = None) -> list[Step]:
    """Named a, b, ...; an exception is raised."""

    def acting(name: str, result: str | Exception) -> Callable[[], str]:
        def act() -> str:
            if ran is not None:
                ran.append(name)
            if isinstance(result, Exception):
                raise result
            return result

        return act

    return [Step(name, 7.0, acting(name, result)) for name, result in zip("abcdef", results, strict=False)]


def test_each_step_gets_its_limit_and_is_reported() -> None:
    limits: list[float] = []
    shown = io.StringIO()
    done = walk(steps("one", "two"), limits.append, Console(file=shown))
    assert limits == [7.0, 7.0]
    assert [(one.name, one.result, one.failed) for one in done] == [("a", "one", False), ("b", "two", False)]
    assert [line.split("  ")[0] for line in shown.getvalue().splitlines()] == [
        "1/2 a ...", "✓ 1/2 a", "2/2 b ...", "✓ 2/2 b",
    ]  # fmt: skip


@pytest.mark.parametrize("error", [StepFailedError("its output"), KeyError("its output")], ids=["said", "other"])
def test_a_step_that_fails_is_shown_and_the_next_one_is_taken(error: Exception) -> None:
    shown = io.StringIO()
    done = walk(steps("one", error, "three"), lambda limit_s: None, Console(file=shown))
    assert [(one.result, one.failed) for one in done] == [("one", False), ("failed", True), ("three", False)]
    assert "✗ 2/3 b" in shown.getvalue()
    assert "its output" in shown.getvalue()
    assert summary(done) | {"seconds": 0} == {"steps": 3, "failed": 1, "not_run": 0, "first_answer_s": 0, "seconds": 0}


def test_without_a_vital_step_there_is_nothing_to_go_on_with() -> None:
    ran: list[str] = []
    taken = steps(KeyError("x"), "two", ran=ran)
    done = walk([replace(taken[0], vital=True), taken[1]], lambda limit_s: None, Console(file=io.StringIO()))
    assert ran == ["a"]
    assert [(one.result, one.failed) for one in done] == [("failed", True), ("not run", False)]
    assert summary(done)["not_run"] == 1


DONE = [Outcome("a", "one", 1.5), Outcome(FIRST_ANSWER, "two", 2.25), Outcome("c", "three", 4.0)]


def test_the_time_to_the_first_answer_is_that_of_all_steps_before_it() -> None:
    assert summary(DONE) == {"steps": 3, "failed": 0, "not_run": 0, "first_answer_s": 3.8, "seconds": 7.8}


def test_the_table_can_be_put_into_a_document() -> None:
    shown = io.StringIO()
    Console(file=shown, width=100).print(table([*DONE, Outcome("d", "not run")]))
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown.getvalue().strip().splitlines()]
    assert cells[0] == ["step", "seconds", "result"]
    assert cells[2:] == [
        ["a", "1.5", "one"],
        [FIRST_ANSWER, "2.2", "two"],
        ["c", "4.0", "three"],
        ["d", "-", "not run"],
    ]


def test_the_teams_of_the_documents_are_three_with_an_operator_and_a_scraper() -> None:
    keys = documents.three_teams()["auth"]["keys"]
    assert sum(not (key.get("admin") or key.get("metrics")) for key in keys) == 3
    assert sum(bool(key.get("admin")) for key in keys) == sum(bool(key.get("metrics")) for key in keys) == 1


def test_a_heading_that_is_gone_is_seen() -> None:
    with pytest.raises(ValueError, match="no heading"):
        documents.section(documents.ERRORS, "## Gone")
