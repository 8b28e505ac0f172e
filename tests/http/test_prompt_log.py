"""Prompts are in logs only where the settings ask for them, in lines that a support bundle knows."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from serve_app.http.prompt_log import CUT, MAX_CHARS, prompt_text
from serve_app.system import PROMPT_MARK
from tests.fakes.asgi_client import ask, started
from tests.fakes.engines import FakeCluster, run

PROMPT = "heron-in-the-reeds-4711"


def logged(caplog: pytest.LogCaptureFixture, **settings: Any) -> list[logging.LogRecord]:
    """The records of a request with the prompt."""
    caplog.set_level(logging.DEBUG)

    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        changed = client.edge.settings.model_dump() | settings
        client.edge.configure(client.edge.settings.model_validate(changed))
        assert (await client.post(ask(PROMPT), headers={"Idempotency-Key": "once"})).status == 200
        assert (await client.post(ask(PROMPT, model="gone"))).status == 404

    run(scenario)
    return caplog.records


def test_no_log_line_has_a_prompt_by_default(caplog: pytest.LogCaptureFixture) -> None:
    texts = [record.getMessage() for record in logged(caplog)]
    assert texts, "this test reads nothing"
    assert [text for text in texts if PROMPT in text or PROMPT_MARK in text] == []


def test_with_the_setting_each_prompt_is_one_line_with_the_mark_and_the_start_warns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    records = logged(caplog, logs={"prompts": True})
    lines = [record.getMessage() for record in records if PROMPT in record.getMessage()]
    assert len(lines) == 1, "a body that is refused is no request"
    assert all(PROMPT_MARK in line and "\n" not in line for line in lines)
    assert " of tenant 'people' " in lines[0]
    warned = [record for record in records if "writes prompts of all tenants" in record.getMessage()]
    assert {record.levelname for record in warned} == {"WARNING"}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"messages": [{"content": "a\nb"}], "model": "m"}, '{"messages":[{"content":"a\\nb"}]}'),
        ({"prompt": "é\u2028", "user": "x"}, '{"prompt":"\\xe9\\u2028"}'),
        ({"model": "m"}, "{}"),
    ],
)
def test_a_prompt_is_one_line_of_ascii(body: dict[str, Any], text: str) -> None:
    assert prompt_text(body) == text


def test_a_long_prompt_is_cut_in_its_middle() -> None:
    text = prompt_text({"prompt": "a" * 100_000 + "b"})
    assert len(text) <= MAX_CHARS
    assert CUT in text
    assert text.endswith('b"}')
