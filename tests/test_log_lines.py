"""Every log line says subject, verb, object and consequence; an ERROR says what to do (`tests/log_lines.py`)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.log_lines import SUBJECTS, VERBS, complaints, log_calls

ROOT = Path(__file__).parents[1]
SOURCES = {
    path.relative_to(ROOT): source
    for room in ("serve_app", "autoscaling")
    for path in sorted((ROOT / room).rglob("*.py"))
    if "import logging" in (source := path.read_text())
}
FEWEST = 130  # lines of these rooms: fewer are found if loggers have another form than the rules know


def text_of(call: ast.Call) -> str:
    return str(ast.literal_eval(call.args[0]))


def test_every_log_line_has_its_form() -> None:
    found = [f"{path}:{fault}" for path, source in SOURCES.items() for fault in complaints(source)]
    assert not found, "\n".join(found)


def test_the_rules_see_the_log_lines() -> None:
    assert sum(len(list(log_calls(source))) for source in SOURCES.values()) >= FEWEST


def test_the_rules_know_no_subject_and_no_verb_that_no_line_has() -> None:
    """A list that only grows would let everything pass one day."""
    texts = [text_of(call) for source in SOURCES.values() for call in log_calls(source)]
    words = {word.strip(",;:.") for text in texts for word in text.split()}
    assert [one for one in sorted(SUBJECTS) if not any(text.startswith(f"{one} ") for text in texts)] == []
    assert sorted(VERBS - words) == []


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('logger.warning(f"Engine {name} of model m is away")', "no f-string"),
        ('logger.warning("Engine %s is away" % name)', "no expression"),
        ("logger.warning(reason)", "no expression"),
        ('logger.warning("Engine %s of model %s is away", name)', "2 placeholders, 1 arguments"),
        ('logger.warning("engine %s is away for %d s", name, wait_s)', "none of the subjects"),
        ('logger.warning("%s: no replica runs", model)', "none of the subjects"),
        ('logger.warning("It is away for %d s", wait_s)', "none of the subjects"),
        ('logger.warning("Engine is away for %d s", wait_s)', "does not name its engine"),
        ('logger.warning("Engines %s are away", names)', "none of the subjects"),
        ('logger.info("Store of keys again")', "no sentence with a verb"),
        ('logger.info("Engine %s ready", name)', "no sentence with a verb"),
        ('logger.info("Request %s is told to stop", request_id)', "the word 'told'"),
        ('logger.info("Request %s is first in its line", request_id)', "the word 'line'"),
        ('logger.info("Request %s has ended in order.", request_id)', "full stop"),
        ('logger.error("Engine %s has died of %s", name, error)', "names no action"),
        ('logger.exception("Request %s failed inside the router", request_id)', "names no action"),
        ('logger.critical("Store is away. Check the database")', "is no level here"),
        (f'logger.info("Store is {"far " * 60}away")', "columns"),
        ('logging.getLogger("x").error("Engine %s has died", name)', "names no action"),
        ('self._logger.error("Engine %s has died", name)', "names no action"),
        ('logging.warning("it went away")', "none of the subjects"),
        ('journal = logging.getLogger("ray.serve")', "a logger is called `logger`"),
    ],
)
def test_a_line_without_the_form_is_found(line: str, fault: str) -> None:
    assert fault in "\n".join(complaints(line))


@pytest.mark.parametrize(
    "line",
    [
        'logger.info("Engine %s of model %s is ready after %.1f s", name, model, start_s)',
        'logger.warning("vLLM has changed and lacks %s", names)',
        'logger.error("Journal %s cannot be written: %s. Free or repair the disk", name, error)',
        'logger.exception("Rows of batch %s cannot be claimed. Report this traceback", batch_id)',
        'logger.error("Engine %s of %s uses %d bytes. Raise memory_gb of the model", *figures)',
        "error = task.exception()",
    ],
)
def test_a_line_with_the_form_passes(line: str) -> None:
    assert complaints(line) == []
