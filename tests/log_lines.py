"""The form of log lines: a function from a module's source to complaints, so that a test can show that each rule bites.

    Engine %s of model %s waits to load: %s
    subject, name         verb  object  cause

A line begins with its subject, one of `SUBJECTS`. The cause, an error's text, comes last, after a colon. A line has no
full stop at its end: what stands there is often copied (a path, a command, an error).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.syntax import nodes, parsed

LEVELS = frozenset({"debug", "info", "warning", "error", "exception", "critical", "log", "warn", "fatal"})
ERRORS = frozenset({"error", "exception"})  # somebody must act
NAMED_LEVELS = ERRORS | {"warning"}  # something was lost, or will be
MIN_WORDS = 4
MAX_COLUMNS = 200  # with `NAME_COLUMNS` for each text and without the cause; Serve puts some 80 columns before it
NAME_COLUMNS = 12

# There is one of each in an application, a node or a process: the line need not name it.
_SINGLE = """
Application, Batch worker, Console, File storage, HAProxy, JWKS, Map, NVML, Quota actor, Ray, Routers, Scrape, Serve,
Store, Store keys, Supervisor, vLLM
"""
# There are several of each: a WARNING and an ERROR name the one that they are about.
_SEVERAL = """
Actor, Batch, Call, Certificate, Channel, Deployment, Engine, Entry, File, Journal, Key, Model, Node, Process,
Processes, Receipt, Replica, Request, Response, Router, Row, Rows, Run, Session, Stream, Upload
"""
SINGLE = frozenset(subject.strip() for subject in _SINGLE.split(","))
SUBJECTS = SINGLE | {subject.strip() for subject in _SEVERAL.split(",")}
_VERBS = """
answers are broke cannot changed could deploys did does drains dropped ended ends failed found gave gets got has is
keeps left listed lost needs reads refused reports restarts runs started stays succeeded takes uses waits was
were
"""
VERBS = frozenset(_VERBS.split())
_ACTIONS = "Check Correct Free Install Mend Raise Report Run Set Start"
ACTIONS = frozenset(_ACTIONS.split())  # what an ERROR asks for, at the beginning of its last sentence
# HOUSE.md, 'Words'. `line` is a queue there, and `lane` was the batch worker.
GONE = re.compile(
    r"\b(lines?|lanes?|berths?|rosters?|shel(f|ves)|desks?|told|tells?|said|says?|heard|wires?|outbox|trickles?|headroom"
    r"|lifts?|quotas)\b",
    re.IGNORECASE,
)
_PLACEHOLDER = re.compile(r"%[-#0 +]*[\d.]*([a-zA-Z%])")
_CAUSE = re.compile(r": %[sr]$")
_SUBJECT = re.compile(rf"({'|'.join(sorted(SUBJECTS, key=len, reverse=True))})\b")
_NAMED = re.compile(r"( to| of)?( [a-z]+){0,2} %[sdr]")  # 'Engine %s', 'Rows of batch %s', 'Channel to replica %s'


def log_calls(source: str) -> Iterator[ast.Call]:
    """The logging calls of a module: methods of `logger`, of `logging` and of a logger that is got for one call."""
    for node in nodes(parsed(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LEVELS:
            owner = ast.unparse(node.func.value)
            if owner.rpartition(".")[2].lower().strip("_") in ("logger", "logging", "log") or "getLogger(" in owner:
                yield node


def complaints(source: str) -> list[str]:
    """What is wrong with the log lines of a module, each with its line number."""
    found = [f"{call.lineno}: {fault}" for call in log_calls(source) for fault in _faults(call)]
    return found + [f"{number}: a logger is called `logger`" for number in _other_loggers(source)]


def _other_loggers(source: str) -> Iterator[int]:
    """Loggers under names by which `log_calls` would not know their calls."""
    for node in nodes(parsed(source)):
        if (
            isinstance(node, ast.Assign)
            and ast.unparse(node.value).startswith("logging.getLogger(")
            and [ast.unparse(target) for target in node.targets] != ["logger"]
        ):
            yield node.lineno


def _faults(call: ast.Call) -> Iterator[str]:
    assert isinstance(call.func, ast.Attribute)
    level = call.func.attr
    if level not in NAMED_LEVELS | {"debug", "info"}:
        yield f"`{level}` is no level here: use debug, info, warning, error or exception"
        return
    text = call.args[0] if call.args else None
    if not isinstance(text, ast.Constant) or not isinstance(text.value, str):
        yield "the first argument is a literal with %s, no f-string and no expression"
        return
    yield from text_faults(text.value, level)
    placeholders = [kind for kind in _PLACEHOLDER.findall(text.value) if kind != "%"]
    if not any(isinstance(one, ast.Starred) for one in call.args) and len(placeholders) != len(call.args) - 1:
        yield f"{len(placeholders)} placeholders, {len(call.args) - 1} arguments"


def text_faults(text: str, level: str) -> Iterator[str]:
    """What is wrong with the text of a line of this level (a method of a logger)."""
    subject = _SUBJECT.match(text)
    if subject is None:
        yield f"begins with none of the subjects: {text!r}"
    elif level in NAMED_LEVELS and subject[0] not in SINGLE and _NAMED.match(text, subject.end()) is None:
        yield f"does not name its {subject[0].lower()} with a placeholder: {text!r}"
    words = re.findall(r"[A-Za-z']+|%[\w.]+", text)
    if len(words) < MIN_WORDS or VERBS.isdisjoint(words):
        yield f"is no sentence with a verb: {text!r}"
    if gone := GONE.search(text):
        yield f"has the word {gone[0]!r}: {text!r}"
    if text.endswith((".", "!", " ")) or "\n" in text or "  " in text:
        yield f"is not one line without a full stop at its end: {text!r}"
    if level in ERRORS and text.rpartition(". ")[2].split(" ")[0] not in ACTIONS:
        yield f"is an ERROR whose last sentence names no action: {text!r}"
    columns = len(_PLACEHOLDER.sub(_sample, _CAUSE.sub("", text)))
    if columns > MAX_COLUMNS:
        yield f"takes {columns} columns, above {MAX_COLUMNS}: {text!r}"


def _sample(placeholder: re.Match[str]) -> str:
    return "%" if placeholder[1] == "%" else "x" * (NAME_COLUMNS if placeholder[1] in "sr" else 5)
