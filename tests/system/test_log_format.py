"""Log records as JSON: one line each, whatever is in them, with the request that they are about."""

from __future__ import annotations

import asyncio
import contextvars
import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.names import LOG_FORMAT
from serve_app.system import enter_request, same_request
from serve_app.system.log_format import MAX_EXCEPTION_CHARS, MAX_MESSAGE_CHARS, JsonFormatter, stamp

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
ORIGIN = {"process": "engine", "model": "org/m", "replica": "x1"}
ANY_TEXT = st.text(st.characters(), max_size=200)  # with characters that no encoding has
CHILD_S = 60.0  # of a process that takes half a second


def record(message: Any = "Engine %s is ready", *arguments: Any, **fields: Any) -> logging.LogRecord:
    given: dict[str, Any] = {"exc_info": None, "level": logging.INFO, "name": "ray.serve"} | fields
    return logging.LogRecord(given["name"], given["level"], "f.py", 1, message, arguments, given["exc_info"])


def shown(found: logging.LogRecord) -> dict[str, Any]:
    """The fields of a record's line."""
    text = JsonFormatter(ORIGIN).format(found)
    assert text.isascii()
    assert "\n" not in text
    assert "\r" not in text
    return dict(json.loads(text))


def in_own_context(call: Callable[[], Any]) -> Any:
    """The result, in a context in which no request is known."""
    return contextvars.Context().run(call)


def test_a_record_has_its_time_with_zone_level_logger_and_origin() -> None:
    found = shown(record("Engine %s is ready", "x1", level=logging.WARNING))
    assert datetime.fromisoformat(found.pop("time")).utcoffset() is not None
    assert found.pop("pid") > 0
    assert found == {"level": "WARNING", "logger": "ray.serve", "message": "Engine x1 is ready", **ORIGIN}


@given(ANY_TEXT, ANY_TEXT, ANY_TEXT)
def test_any_text_is_one_line_of_json_that_every_parser_takes(message: str, name: str, why: str) -> None:
    try:
        raise ValueError(why)
    except ValueError:
        found = shown(record("%s", message, name=name, exc_info=sys.exc_info()))
    found["message"].encode()  # a lone surrogate has no encoding, and parsers refuse its escape
    found["exception"].encode()
    assert found["message"] == message.encode("utf-8", "backslashreplace").decode()
    assert "ValueError" in found["exception"]


@pytest.mark.parametrize("arguments", [(), ("a", "b"), ({"a": 1},)])
def test_arguments_that_do_not_fit_lose_no_record(arguments: tuple[Any, ...]) -> None:
    found = shown(record("Engine %d has %s and %s", *arguments))
    assert found["message"].startswith("Engine %d has %s and %s")


def test_an_argument_without_a_text_loses_no_record() -> None:
    class Broken:
        def __str__(self) -> str:
            raise RuntimeError("no text")

    assert "RuntimeError" in shown(record("Engine %s", Broken()))["message"]
    assert "Broken" in shown(record(Broken()))["message"]


def test_huge_texts_are_cut_in_their_middle() -> None:
    try:
        raise ValueError("y" * 10**6)
    except ValueError:
        found = shown(record("a" + "x" * 10**6 + "z", exc_info=sys.exc_info()))
    assert len(found["message"]) <= MAX_MESSAGE_CHARS
    assert (found["message"][0], found["message"][-1]) == ("a", "z")
    assert "[cut]" in found["message"]
    assert len(found["exception"]) <= MAX_EXCEPTION_CHARS
    assert found["exception"].startswith("Traceback")


def test_a_request_is_named_in_the_records_of_its_task_and_of_those_it_starts() -> None:
    async def task(request_id: str) -> list[dict[str, Any]]:
        enter_request(request_id, TRACE)
        await asyncio.sleep(0)

        async def inner() -> dict[str, Any]:
            return shown(record())

        return [shown(record()), await asyncio.create_task(inner())]

    async def scenario() -> list[list[dict[str, Any]]]:
        tasks = [asyncio.create_task(task(name)) for name in ("one", "two")]
        return [await one for one in tasks]

    found = in_own_context(lambda: asyncio.run(scenario()))
    assert [[line["request_id"] for line in lines] for lines in found] == [["one", "one"], ["two", "two"]]
    assert found[0][0]["trace_id"] == TRACE
    assert "request_id" not in in_own_context(lambda: shown(record()))


def test_a_record_that_is_written_later_names_the_request_of_its_making() -> None:
    kept = record()

    def make() -> None:
        enter_request("one")
        stamp(kept)

    in_own_context(make)
    assert shown(kept)["request_id"] == "one"


def test_a_task_of_its_own_can_name_the_same_request() -> None:
    def enter() -> Callable[[], None]:
        enter_request("one", TRACE)
        return same_request()

    name_in_log = in_own_context(enter)

    def elsewhere() -> dict[str, Any]:
        name_in_log()
        return shown(record())

    found = in_own_context(elsewhere)
    assert (found["request_id"], found["trace_id"]) == ("one", TRACE)


SERVES = """
import logging, logging.handlers, sys, warnings
from serve_app.system import set_up_log, set_up_child_log
serve = logging.getLogger("ray.serve")
serve.propagate = False
serve.setLevel(logging.INFO)
handler = logging.StreamHandler(sys.stdout)
handler.setFormatter(logging.Formatter("TEXT %(message)s"))
serve.addHandler(logging.handlers.MemoryHandler(1, target=handler, flushLevel=logging.ERROR))
ray = logging.getLogger("ray")
ray.propagate = False
ray.addHandler(logging.StreamHandler())
set_up_log("router", replica="r1")
serve.info("Router %s starts", "r1")
ray.warning("Ray says")
logging.getLogger("vllm.core").warning("vLLM says")
logging.getLogger("another").warning("a library says\\nmore")
warnings.warn("deprecated")
serve.handlers.clear()
logging.getLogger().handlers.clear()
set_up_child_log("vLLM")
logging.getLogger("vllm.core").error("from a child")
"""


def run(code: str, form: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, LOG_FORMAT: form},
        capture_output=True,
        text=True,
        timeout=CHILD_S,
        check=True,
    )


def test_all_libraries_of_a_process_write_json_to_serve_s_handler() -> None:
    done = run(SERVES, "json")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["message"] for line in lines[:4]] == [
        "Router r1 starts",
        "Ray says",
        "vLLM says",
        "a library says\nmore",
    ]
    assert "deprecated" in lines[4]["message"]
    assert {(line["process"], line["replica"]) for line in lines} == {("router", "r1")}
    (child,) = (json.loads(line) for line in done.stderr.splitlines())
    assert (child["process"], child["replica"], child["message"]) == ("vLLM", "r1", "from a child")


def test_without_the_setting_nothing_changes() -> None:
    done = run(SERVES, "text")
    assert done.stdout == "TEXT Router r1 starts\n"
    assert "Ray says\n" in done.stderr


SUPERVISES = """
import logging
from serve_app.system import begin_log
begin_log("supervisor")
logging.getLogger("serve_app").info("Node is up with %s", "raylet")
"""


def test_a_process_of_ours_begins_its_log_in_either_form() -> None:
    text = run(SUPERVISES, "text").stderr
    assert text.endswith("INFO supervisor: Node is up with raylet\n")
    found = json.loads(run(SUPERVISES, "json").stderr)
    assert (found["process"], found["level"], found["message"]) == ("supervisor", "INFO", "Node is up with raylet")


def test_a_handler_writes_a_record_with_a_traceback_as_one_line() -> None:
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(JsonFormatter(ORIGIN))
    logger = logging.Logger("one", logging.INFO)
    logger.addHandler(handler)
    try:
        raise RuntimeError("first\nsecond")
    except RuntimeError:
        logger.exception("Request %s failed", "a\nb")
    (line,) = out.getvalue().splitlines()
    assert json.loads(line)["message"] == "Request a\nb failed"
