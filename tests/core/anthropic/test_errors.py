"""Errors as Anthropic's clients read them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serve_app import errors
from serve_app.core.anthropic import error_event, error_of, status_of
from serve_app.core.body_bounds import TOO_LONG
from serve_app.core.limits import LimitReason


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (errors.BadRequest("no", param="stream"), 400, "invalid_request_error"),
        (errors.BodyTooLarge("no"), 413, "request_too_large"),
        (errors.UnsupportedContent("no"), 415, "invalid_request_error"),
        (errors.Unauthorized("no"), 401, "authentication_error"),
        (errors.Forbidden("no"), 403, "permission_error"),
        (errors.NotFound("no", code="model_not_found"), 404, "not_found_error"),
        *((errors.RateLimited("no", code=reason), 429, "rate_limit_error") for reason in LimitReason),
        (errors.Overloaded("no"), 529, "overloaded_error"),
        (errors.Overloaded("no", code="deadline"), 529, "overloaded_error"),
        (errors.InsufficientMemory("no"), 529, "overloaded_error"),
        (errors.Unavailable("no"), 529, "overloaded_error"),
        (errors.EngineFailed("no"), 502, "api_error"),
        (errors.RequestFailed("no"), 500, "api_error"),
    ],
)
def test_each_error_has_anthropic_s_status_and_type(error: errors.ServeAppError, status: int, kind: str) -> None:
    found = error_of(error.status, error.body(), "r1")
    assert status_of(error.status, error.body()) == status
    details = {"type": kind, "message": "no", "code": error.code, "param": error.param}
    assert found == {"type": "error", "error": details, "request_id": "r1"}
    assert error_of(status, found) == found  # it has the form already
    assert status_of(status, found) == status


def test_a_prompt_that_is_too_long_is_refused_in_the_words_that_agents_look_for() -> None:
    error = errors.BadRequest("This model's maximum context length is 8 tokens.", code=TOO_LONG)
    found: Any = error_of(400, error.body())["error"]
    assert found["type"] == "invalid_request_error"
    assert found["message"] == "prompt is too long: This model's maximum context length is 8 tokens."


def test_an_error_in_a_stream_is_an_event_of_one_line_of_ascii() -> None:
    event = error_event(502, errors.EngineFailed("the replica\ndied: é").body())
    name, data, *nothing = event.split(b"\n")
    assert (name, nothing) == (b"event: error", [b"", b""])
    assert data.isascii()
    assert json.loads(data.removeprefix(b"data: "))["error"]["message"] == "the replica\ndied: é"
