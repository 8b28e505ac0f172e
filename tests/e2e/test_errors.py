"""Refusals: the right status, OpenAI's error format, and the exception class the official SDK makes of it."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
import requests

from tests.e2e import prompts
from tests.e2e.grammar_attack import words
from tests.e2e.stack import BATCH_KEY, REQUEST_TIMEOUT_S, SIMULATED, TINY, Stack
from tests.waiting import patient

MAX_BODY_BYTES = 8 * 2**20  # the default of the settings, which our stack leaves as it is
JSON = {"content-type": "application/json"}


def check_format(response: requests.Response, status: int, code: str | None = None) -> dict[str, Any]:
    """The error object of a refusal, checked to be in OpenAI's format."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"].startswith("application/json")
    assert set(response.json()) == {"error"}
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    assert error["param"] is None or isinstance(error["param"], str)
    assert error["code"] is None or isinstance(error["code"], str)
    if code is not None:
        assert error["code"] == code
    return error


@pytest.mark.parametrize(
    "data", ["{x", "", "[1, 2", '{"model": NaN}', b'{"model": "\xff"}', "[]", "3", '"tiny"', "null"]
)
def test_a_body_that_is_no_json_object_is_a_400(stack: Stack, data: str | bytes) -> None:
    error = check_format(stack.post("/v1/chat/completions", data=data, headers=JSON), 400, "invalid_json")

    assert error["type"] == "invalid_request_error"


def test_a_body_nested_too_deep_is_a_400(stack: Stack) -> None:
    for depth in (100, 100_000):
        body = '{"model": "tiny", "messages": ' + "[" * depth + "]" * depth + "}"
        error = check_format(stack.post("/v1/chat/completions", data=body, headers=JSON), 400)
        assert "nested" in error["message"] or "holds more" in error["message"]


def test_a_body_that_is_too_large_is_a_413(stack: Stack) -> None:
    error = check_format(
        stack.post("/v1/completions", data=b" " * (MAX_BODY_BYTES + 1), headers=JSON), 413, "body_too_large"
    )

    assert str(MAX_BODY_BYTES) in error["message"]


def test_a_body_of_untold_length_is_bounded_too(stack: Stack) -> None:
    pieces = (b" " * 2**20 for _ in range(9))
    check_format(stack.post("/v1/completions", data=pieces, headers=JSON), 413, "body_too_large")


def test_a_large_body_within_the_bound_is_read(stack: Stack) -> None:
    body = json.dumps({"model": TINY, "prompt": "a", "max_tokens": 1}).encode()
    response = stack.post("/v1/completions", data=body + b" " * (MAX_BODY_BYTES - len(body)), headers=JSON)

    assert response.status_code == 200


def test_another_content_type_is_a_415(stack: Stack) -> None:
    response = stack.post("/v1/completions", data=b"model=tiny", headers={"content-type": "text/plain"})
    check_format(response, 415, "unsupported_content_type")


@pytest.mark.parametrize("path", ["/v1/nothing", "/", "/v1", "/v1/chat", "/docs", "/v1/load_lora_adapter", "/sleep"])
def test_an_unknown_route_is_a_404(stack: Stack, path: str) -> None:
    check_format(stack.get(path), 404, "unknown_url")
    check_format(stack.post(path, {}), 404, "unknown_url")


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v1/chat/completions", {"POST"}),
        ("PUT", "/v1/completions", {"POST"}),
        ("DELETE", "/v1/responses", {"POST"}),
        ("POST", "/v1/models", {"GET", "HEAD"}),
        ("DELETE", "/v1/models/tiny", {"GET", "HEAD"}),
        ("POST", "/health", {"GET", "HEAD"}),
        ("OPTIONS", "/v1/chat/completions", {"POST"}),
    ],
)
def test_a_wrong_method_is_a_405_that_names_the_right_ones(
    stack: Stack, method: str, path: str, allow: set[str]
) -> None:
    response = requests.request(method, f"{stack.base_url}{path}", headers=stack.headers(), timeout=REQUEST_TIMEOUT_S)
    check_format(response, 405, "method_not_allowed")

    assert {name.strip() for name in response.headers["allow"].split(",")} == allow


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer sk-this-is-nobody-s-key"},
        {"Authorization": "Bearer"},
        {"Authorization": "Basic c2s6c2s="},
        {"x-api-key": "sk-this-is-nobody-s-key"},
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/health", "/metrics", "/v1/nothing"])
def test_nothing_answers_without_a_valid_key(stack: Stack, headers: dict[str, str], path: str) -> None:
    response = requests.get(f"{stack.base_url}{path}", headers=headers, timeout=REQUEST_TIMEOUT_S)
    check_format(response, 401, "invalid_api_key")

    assert response.headers["www-authenticate"] == "Bearer"
    assert "nobody" not in response.text


def test_a_wrong_key_raises_the_sdk_s_authentication_error(stack: Stack) -> None:
    with stack.client("sk-this-is-nobody-s-key") as client, pytest.raises(openai.AuthenticationError):
        client.chat.completions.create(model=TINY, messages=prompts.chat(1))


def test_an_api_key_header_is_as_good_as_a_bearer(stack: Stack) -> None:
    response = requests.get(
        f"{stack.base_url}/v1/models", headers={"x-api-key": stack.api_key}, timeout=REQUEST_TIMEOUT_S
    )

    assert response.status_code == 200


def test_an_unknown_model_is_a_404_that_names_those_there_are(client: openai.OpenAI) -> None:
    for call in (client.completions.create, client.embeddings.create, client.responses.create):
        given: dict[str, Any] = {"prompt": "a"} if call == client.completions.create else {"input": "a"}
        with pytest.raises(openai.NotFoundError, match=TINY) as caught:
            call(model="unknown", **given)
        assert caught.value.code == "model_not_found"
        assert caught.value.param == "model"


@pytest.mark.parametrize("stream", [False, True])
def test_an_over_long_prompt_is_a_400_that_names_the_limit(client: openai.OpenAI, stream: bool) -> None:
    long = "river " * 3000
    with pytest.raises(openai.BadRequestError, match="2048") as caught:
        client.completions.create(model=TINY, prompt=long, max_tokens=1, stream=stream)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="2048"):
        client.chat.completions.create(
            model=TINY, messages=[{"role": "user", "content": long}], max_tokens=1, stream=stream
        )


WRONG_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": "Hello"}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 7}, "top_p"),
    ({"max_tokens": "ten"}, "max_tokens"),
    ({"max_tokens": -3}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"n": 1000}, "n"),
    ({"n": "two"}, "n"),
    ({"stream": "maybe"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream"),
    ({"stop": {"a": 1}}, "stop"),
    ({"logprobs": True, "top_logprobs": 1000}, "logprobs"),
    ({"response_format": {"type": "poem"}}, "response_format"),
    ({"tools": "hammer"}, "tools"),
    ({"seed": "x"}, "seed"),
    ({"priority": 9}, "priority"),
    ({"priority": "urgent"}, "priority"),
    ({"service_tier": 1}, "service_tier"),
    ({"best_of": 4}, "best_of"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
]


@pytest.mark.parametrize(("wrong", "named"), WRONG_CHATS, ids=[json.dumps(wrong) for wrong, _ in WRONG_CHATS])
def test_a_wrong_field_is_a_400_that_names_it(stack: Stack, wrong: dict[str, Any], named: str) -> None:
    body = {"model": TINY, "messages": [{"role": "user", "content": "a"}], "max_tokens": 1} | wrong
    error = check_format(stack.post("/v1/chat/completions", body), 400)

    assert error["type"] == "invalid_request_error"
    assert named in f"{error['param']} {error['message']}"


ANSWER_S = 20.0  # what would harm an engine is refused within seconds
SLOW = "a schema whose grammar takes minutes"  # its time is spent before it is given up: half a minute of CPU
HARMFUL: dict[str, dict[str, Any]] = {
    "an integer no engine message can carry": {"top_k": 2**70},
    "the same where it is nested": {"logit_bias": {"5": 2**70}},
    SLOW: {"structured_outputs": {"json": {"enum": words(15_000, 5)}}},
    "a shape vLLM does not look at": {"structured_outputs": "x"},
    "a list where it looks for an object": {"structured_outputs": [1]},
    "a schema that refers to itself alone": {"structured_outputs": {"json": {"$ref": "#"}}},
    "a grammar without an end": {"structured_outputs": {"grammar": "root ::= "}},
    "a grammar that recurses to the left": {"structured_outputs": {"grammar": 'root ::= root "a"'}},
    "template arguments of another type": {"chat_template_kwargs": {"tools": 5}},
}


@pytest.mark.parametrize(
    "harm", [pytest.param(name, marks=pytest.mark.long) if name == SLOW else name for name in HARMFUL]
)
def test_what_would_harm_a_shared_engine_is_the_client_s_error(stack: Stack, harm: str) -> None:
    """Each of these was answered with a 500 or worse once; the model goes on serving others."""
    body = {"model": TINY, "messages": [{"role": "user", "content": "a"}], "max_tokens": 2} | HARMFUL[harm]
    check_format(stack.post("/v1/chat/completions", body, timeout=patient(ANSWER_S)), 400)

    after = stack.post("/v1/completions", {"model": TINY, "prompt": "a", "max_tokens": 2}, timeout=patient(ANSWER_S))
    assert after.status_code == 200


@pytest.mark.parametrize("model", [None, 3, ["tiny"], {}])
def test_a_model_that_is_no_name_is_a_400(stack: Stack, model: object) -> None:
    error = check_format(stack.post("/v1/completions", {"model": model, "prompt": "a"}), 400)

    assert error["param"] == "model"


@pytest.mark.parametrize("value", ["soon", "-5", "0", "1e3", "99999999999999"])
def test_a_deadline_that_is_no_number_of_milliseconds_is_a_400(stack: Stack, value: str) -> None:
    response = stack.post("/v1/completions", {"model": TINY, "prompt": "a"}, headers={"X-Deadline-Ms": value})

    assert check_format(response, 400)["param"] == "X-Deadline-Ms"


@pytest.mark.parametrize(("field", "value"), [("priority", "high"), ("priority", 1), ("service_tier", "default")])
def test_a_class_above_the_key_s_is_a_403(batch_client: openai.OpenAI, field: str, value: object) -> None:
    with pytest.raises(openai.PermissionDeniedError, match="low") as caught:
        batch_client.completions.create(model=TINY, prompt="a", max_tokens=1, extra_body={field: value})

    assert caught.value.param == field
    assert caught.value.code == "permission_denied"


def test_no_class_above_high_for_the_normal_key(client: openai.OpenAI) -> None:
    for field in ({"priority": "critical"}, {"priority": 3}, {"service_tier": "realtime"}):
        with pytest.raises(openai.PermissionDeniedError):
            client.completions.create(model=TINY, prompt="a", max_tokens=1, extra_body=field)
    answer = client.completions.create(model=TINY, prompt="a", max_tokens=1, extra_body={"priority": "high"})
    assert answer.choices


def test_the_simulated_engine_refuses_in_the_same_form(stack: Stack, simulated: str) -> None:
    body = {"model": simulated, "prompt": "river " * 9000, "max_tokens": 1}
    error = check_format(stack.post("/v1/completions", body), 400, "context_length_exceeded")

    assert "8191" in error["message"] or "8192" in error["message"]
    assert simulated == SIMULATED


def _raw(stack: Stack, send: Callable[[http.client.HTTPConnection], None]) -> tuple[int, bytes]:
    parts = urlsplit(stack.base_url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=REQUEST_TIMEOUT_S)
    try:
        send(connection)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


DEEP: Any = "x"
for _ in range(100):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("path", "body", "raised", "status"),
    [
        ("/nothing", {}, openai.NotFoundError, 404),
        ("/models", {}, openai.APIStatusError, 405),
        ("/completions", {"model": TINY, "prompt": "x" * (MAX_BODY_BYTES + 1)}, openai.APIStatusError, 413),
        ("/completions", {"model": TINY, "prompt": "a", "user": DEEP}, openai.BadRequestError, 400),
        ("/completions", {"model": TINY, "prompt": "a", "temperature": "hot"}, openai.BadRequestError, 400),
        ("/completions", {"model": "x", "prompt": "a"}, openai.NotFoundError, 404),
        ("/completions", {"model": TINY, "prompt": "a", "priority": 3}, openai.PermissionDeniedError, 403),
        ("/embeddings", {"model": TINY, "input": "a"}, openai.BadRequestError, 400),
        ("/responses", {"model": TINY, "input": "a", "conversation": "conv_1"}, openai.BadRequestError, 400),
    ],
)
def test_the_sdk_raises_its_own_class_for_each(
    client: openai.OpenAI, path: str, body: dict[str, Any], raised: type[openai.APIStatusError], status: int
) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.post(path, body=body, cast_to=object)

    assert type(caught.value) is raised
    assert caught.value.status_code == status
    assert caught.value.message
    assert isinstance(caught.value.code, str | None)


@pytest.mark.parametrize("key", [True, False])
@pytest.mark.parametrize("name", ["X-Session-Id", "X-Request-Id", "Idempotency-Key", "X-Deadline-Ms"])
def test_a_header_that_is_not_utf8_is_a_400_to_those_with_a_key(stack: Stack, name: str, key: bool) -> None:
    def send(connection: http.client.HTTPConnection) -> None:
        connection.putrequest("GET", "/v1/models")
        for own, value in stack.headers().items() if key else ():
            connection.putheader(own, value)
        connection.putheader(name, b"a\xffb")
        connection.endheaders()

    status, body = _raw(stack, send)
    assert (status, json.loads(body)["error"]["param"]) == ((400, name.lower()) if key else (401, None))


def test_the_metrics_are_not_for_every_key(stack: Stack) -> None:
    check_format(stack.get("/metrics", headers=stack.headers(BATCH_KEY)), 403, "not_admin")


def test_a_refused_request_leaves_its_connection_usable(stack: Stack) -> None:
    """A client with kept connections does not lose one to each mistake."""
    with requests.Session() as session:
        session.headers.update(stack.headers())
        for _ in range(3):
            assert (
                session.post(
                    f"{stack.base_url}/v1/completions", json={"model": "x"}, timeout=REQUEST_TIMEOUT_S
                ).status_code
                == 404
            )
            assert session.get(f"{stack.base_url}/v1/models", timeout=REQUEST_TIMEOUT_S).status_code == 200


def test_head_answers_like_get_without_a_body(stack: Stack) -> None:
    def send(connection: http.client.HTTPConnection) -> None:
        connection.request("HEAD", "/v1/models", headers=stack.headers())

    assert _raw(stack, send) == (200, b"")


def test_a_stream_that_is_refused_is_a_status_and_no_stream(stack: Stack) -> None:
    body = {"model": TINY, "prompt": "a", "stream": True, "n": 0}
    response = stack.post("/v1/completions", body, stream=True)

    check_format(response, 400)
