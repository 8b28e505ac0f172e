"""Steps one after the other, each with its time and result; one that fails is shown, and the next one is taken."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from serve_app.cli.progress import Progress

FIRST_ANSWER = "first answer"
NOT_RUN = "not run"


class StepFailedError(Exception):
    """A step did not do what it should. The message names the command and has what it printed."""


@dataclass(frozen=True, slots=True)
class Step:
    """`act` returns the result in a few words; `limit_s` bounds it. `vital`: without it nothing else can be done."""

    name: str
    limit_s: float
    act: Callable[[], str]
    vital: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a step ended. `took_s` is None: it was not begun."""

    name: str
    result: str
    took_s: float | None = None
    failed: bool = False


def walk(steps: Sequence[Step], begin: Callable[[float], None], console: Console) -> list[Outcome]:
    """Take the steps, with a line of progress each.

    Args:
        begin: is told the limit of each step before it.
    """
    done: list[Outcome] = []
    for number, step in enumerate(steps, start=1):
        began = time.monotonic()
        try:
            with Progress(console) as progress:
                progress.begin(f"{number}/{len(steps)} {step.name}")
                begin(step.limit_s)
                result = step.act()
        except Exception as error:  # noqa: BLE001 - whatever it is, the step has failed
            console.print(
                f"{type(error).__name__}: {error}", style="red", markup=False, highlight=False, soft_wrap=True
            )
            done.append(Outcome(step.name, "failed", time.monotonic() - began, failed=True))
            if step.vital:
                break
            continue
        done.append(Outcome(step.name, result, time.monotonic() - began))
    return [*done, *(Outcome(step.name, NOT_RUN) for step in steps[len(done) :])]


def table(done: Sequence[Outcome]) -> Table:
    """Of all steps, in Markdown."""
    made = Table("step", "seconds", "result", box=box.MARKDOWN)
    for step in done:
        seconds = "-" if step.took_s is None else f"{step.took_s:.1f}"
        made.add_row(step.name, seconds, step.result)
    return made


def summary(done: Sequence[Outcome]) -> dict[str, Any]:
    """What became of it, as JSON values. `first_answer_s`: all seconds to the end of the first answer."""
    seconds = [one.took_s or 0.0 for one in done]
    answered = next((number for number, one in enumerate(done, start=1) if one.name == FIRST_ANSWER), 0)
    return {
        "steps": len(done),
        "failed": sum(one.failed for one in done),
        "not_run": sum(one.took_s is None for one in done),
        "first_answer_s": round(sum(seconds[:answered]), 1),
        "seconds": round(sum(seconds), 1),
    }
