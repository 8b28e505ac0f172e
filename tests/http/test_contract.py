"""The client's contract: what is consumed, what goes on to vLLM, what is refused, and how big a request is."""

from __future__ import annotations

import ast
import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.errors import BadRequest, Forbidden
from serve_app.http.contract import CONSUMED, FORWARDED, REFUSED, STRIPPED, split
from serve_app.settings import HttpSettings
from serve_app.types import Contract, Identity, Operation, RequestClass

BOUNDS = HttpSettings()
NORMAL = RequestClass.NORMAL
LOW = RequestClass.LOW
HIGH = RequestClass.HIGH
CRITICAL = RequestClass.CRITICAL
ANYONE = Identity(tenant="t", max_class=CRITICAL, default_class=NORMAL)
BATCH_ONLY = Identity(tenant="t", max_class=LOW, default_class=LOW)
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}

# Where vLLM keeps its request models, and the classes (with what they inherit) that our routes are parsed into.
VLLM_MODELS = {
    "openai/chat_completion/protocol.py": {"ChatCompletionRequest"},
    "openai/completion/protocol.py": {"CompletionRequest"},
    "openai/responses/protocol.py": {"ResponsesRequest"},
    "pooling/base/protocol.py": {
        "PoolingBasicRequestMixin",
        "CompletionRequestMixin",
        "ChatRequestOptionsMixin",
        "ChatRequestMixin",
        "EncodingRequestMixin",
        "EmbedRequestMixin",
        "ClassifyRequestMixin",
    },
    "pooling/classify/protocol.py": {"ClassificationCompletionRequest", "ClassificationChatRequest"},
    "pooling/embed/protocol.py": {"EmbeddingBatchChatRequest", "EmbeddingChatInputRequest", "CohereEmbedRequest"},
    "pooling/pooling/protocol.py": {"PoolingCompletionRequest", "PoolingChatRequest", "IOProcessorRequest"},
    "pooling/scoring/protocol.py": {
        "ScoringRequestMixin",
        "ScoreDataRequest",
        "ScoreQueriesDocumentsRequest",
        "ScoreQueriesItemsRequest",
        "ScoreTextRequest",
        "RerankRequest",
    },
    "speech_to_text/transcription/protocol.py": {"TranscriptionRequest"},
    "speech_to_text/translation/protocol.py": {"TranslationRequest"},
    "serve/tokenize/protocol.py": {"TokenizeCompletionRequest", "TokenizeChatRequest", "DetokenizeRequest"},
}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
messages = st.lists(
    st.fixed_dictionaries(
        {}, optional={"role": json_values, "content": json_values, "tool_calls": json_values, "text": json_values}
    ),
    max_size=3,
)
field_names = st.sampled_from(sorted(FORWARDED | CONSUMED | set(STRIPPED) | set(REFUSED)))
bodies = st.dictionaries(field_names | st.text(max_size=4), json_values | messages, max_size=6)
operations = st.sampled_from(list(Operation))


def contract_of(
    body: dict[str, Any] | None = None,
    identity: Identity = ANYONE,
    operation: Operation = Operation.CHAT,
    **headers: str,
) -> Contract:
    sent = {name.replace("_", "-").encode(): value.encode("latin-1") for name, value in headers.items()}
    return split(operation, {**BODY, **(body or {})}, sent, identity, BOUNDS)[1]


def clean(
    body: dict[str, Any], operation: Operation = Operation.CHAT, bounds: HttpSettings = BOUNDS, **more: Any
) -> dict[str, Any]:
    return split(operation, body, {}, ANYONE, bounds, **more)[0]


def refused(field: str, body: dict[str, Any], operation: Operation = Operation.CHAT, **more: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        clean(body, operation, **more)
    assert caught.value.param == field
    assert caught.value.status == 400
    return caught.value


# --- fields


def vllm_fields(file: str) -> set[str]:
    spec = importlib.util.find_spec("vllm")  # read, not imported: importing it takes seconds and a gigabyte
    assert spec is not None
    assert spec.submodule_search_locations
    source = Path(spec.submodule_search_locations[0]) / "entrypoints" / file
    classes = {node.name: node for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef)}
    assert VLLM_MODELS[file] <= classes.keys()
    return {
        line.target.id
        for name in VLLM_MODELS[file]
        for line in classes[name].body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and not line.target.id.startswith("_")
    }


@pytest.mark.parametrize("file", VLLM_MODELS)
def test_every_field_of_the_installed_vllm_has_a_decision(file: str) -> None:
    fields = vllm_fields(file)
    assert fields or file == "pooling/classify/protocol.py"  # whose models have those of the base alone
    assert fields - FORWARDED - CONSUMED - STRIPPED.keys() - REFUSED.keys() == set()


@pytest.mark.parametrize("field", [*sorted(STRIPPED), "made_up_by_the_client", "metadata", "n", "logprobs"])
def test_what_could_steer_the_engine_is_no_part_of_a_message(field: str) -> None:
    asked = {**BODY, "max_tokens": 5}
    assert clean({**asked, field: "high"}, Operation.MESSAGES) == asked


def test_a_class_above_the_key_s_is_refused_in_a_message_too() -> None:
    asked = {**BODY, "max_tokens": 5, "priority": "high"}
    with pytest.raises(Forbidden):
        split(Operation.MESSAGES, asked, {}, BATCH_ONLY, BOUNDS)


def test_every_field_has_exactly_one_decision() -> None:
    groups = [FORWARDED, CONSUMED, set(STRIPPED), set(REFUSED)]
    assert len(frozenset().union(*groups)) == sum(map(len, groups))


def test_every_forwarded_field_is_one_vllm_reads() -> None:
    known = set().union(*map(vllm_fields, VLLM_MODELS))
    assert FORWARDED - known == {
        "normalize",  # removed there; vLLM refuses it by name
    }


@pytest.mark.parametrize("field", [*sorted(STRIPPED), *sorted(CONSUMED), "made_up_by_the_client", "metrics"])
def test_what_could_steer_the_engine_is_not_forwarded(field: str) -> None:
    assert clean({**BODY, field: "high"}) == BODY


@pytest.mark.parametrize("field", sorted(FORWARDED - {"encoding_format"}))
def test_what_the_client_asks_for_is_forwarded_as_it_is(field: str) -> None:
    value: object = 3 if field.startswith("max_") else [{"x": 1}] if field == "messages" else {"x": [1]}
    assert clean({**BODY, field: value})[field] == value


def test_what_is_empty_asks_for_nothing() -> None:
    assert clean({**BODY, "tools": [], "suffix": "", "structured_outputs": {}}) == BODY


@pytest.mark.parametrize("field", sorted(REFUSED))
@pytest.mark.parametrize("operation", [Operation.CHAT, Operation.RESPONSES])
def test_what_would_change_the_answer_unseen_is_refused_by_name(field: str, operation: Operation) -> None:
    assert f"`{field}`" in refused(field, {"model": "tiny", field: 5}, operation).message
    for nothing in (None, False, "", [], {}):
        assert clean({"model": "tiny", field: nothing}, operation) == {"model": "tiny"}


def test_best_of_one_asks_for_nothing() -> None:
    assert clean({**BODY, "best_of": 1}) == BODY
    refused("best_of", {**BODY, "best_of": True})


@pytest.mark.parametrize(
    ("body", "tier"),
    [
        ({}, None),
        ({"priority": "high"}, None),
        ({"service_tier": "auto"}, "default"),
        ({"service_tier": "low"}, "flex"),
        ({"service_tier": "flex", "priority": "high"}, "priority"),
    ],
)
def test_a_tier_that_was_named_is_returned_in_openai_s_word_for_the_class(
    body: dict[str, Any], tier: str | None
) -> None:
    assert contract_of(body).service_tier == tier


@pytest.mark.parametrize("value", [True, None, False])
def test_store_is_taken_as_false_without_a_word(value: bool | None) -> None:
    assert clean({"input": "hi", "store": value}, Operation.RESPONSES) == {"input": "hi"}


def test_a_template_inside_the_template_arguments_is_refused_and_other_arguments_pass() -> None:
    name = "chat_template_kwargs.chat_template"
    refused(name, {**BODY, "chat_template_kwargs": {"chat_template": "{{ x }}"}})
    body = {**BODY, "chat_template_kwargs": {"enable_thinking": False, "chat_template": None}}
    assert clean(body) == body


def test_a_stored_prompt_is_refused_for_responses_and_a_prompt_is_not_for_completions() -> None:
    refused("prompt", {"prompt": {"id": "p"}}, Operation.RESPONSES)
    assert clean({"prompt": "x"}, Operation.COMPLETION) == {"prompt": "x"}


@pytest.mark.parametrize(
    ("value", "passes"), [("float", True), ("base64", True), (None, True), ("bytes", False), (1, False)]
)
def test_embeddings_come_as_json_only(value: Any, passes: bool) -> None:
    body = {"input": "x", "encoding_format": value}
    if passes:
        assert clean(body, Operation.EMBEDDING) == body
    else:
        refused("encoding_format", body, Operation.EMBEDDING)


@given(operations, bodies, st.dictionaries(st.sampled_from(["x-session-id", "x-deadline-ms"]), st.binary(max_size=12)))
def test_any_body_is_forwarded_clean_or_refused_and_is_never_changed(
    operation: Operation, body: dict[str, Any], headers: dict[str, bytes]
) -> None:
    before = copy.deepcopy(body)
    try:
        forwarded, found, _ = split(operation, body, {k.encode(): v for k, v in headers.items()}, BATCH_ONLY, BOUNDS)
    except (BadRequest, Forbidden) as error:
        assert error.param  # noqa: PT017
    else:
        assert forwarded.keys() <= FORWARDED
        assert all(forwarded[name] is body[name] for name in forwarded)
        assert found.request_class is LOW
    assert repr(body) == repr(before)


# --- class


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, NORMAL),
        ({"priority": None, "service_tier": None}, NORMAL),
        ({"priority": 0}, LOW),
        ({"priority": 3}, CRITICAL),
        ({"priority": "high"}, HIGH),
        ({"priority": "realtime"}, CRITICAL),
        ({"priority": "batch"}, LOW),
        ({"service_tier": "auto"}, NORMAL),
        ({"service_tier": "default"}, NORMAL),
        ({"service_tier": "flex"}, LOW),
        ({"service_tier": "priority"}, HIGH),
        ({"priority": "low", "service_tier": "priority"}, LOW),
        ({"priority": 2, "service_tier": "auto"}, HIGH),
    ],
)
def test_priority_or_service_tier_gives_the_class_and_priority_wins(
    asked: dict[str, Any], expected: RequestClass
) -> None:
    assert contract_of(asked).request_class is expected


@pytest.mark.parametrize("value", [True, False, 1.0, 4, -1, 10**30, "", "HIGH", "3", "urgent", [], ["high"], {}])
def test_a_priority_that_is_none_is_refused_with_what_there_is(value: Any) -> None:
    error = refused("priority", {**BODY, "priority": value})
    assert "critical" in error.message
    assert "0 to 3" in error.message


@pytest.mark.parametrize("value", [2, True, "scale", "", ["flex"]])
def test_a_service_tier_that_is_none_is_refused_even_beside_a_priority(value: Any) -> None:
    refused("service_tier", {**BODY, "service_tier": value})
    refused("service_tier", {**BODY, "service_tier": value, "priority": 0})


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"priority": 1}, "priority"),
        ({"priority": "critical"}, "priority"),
        ({"service_tier": "default"}, "service_tier"),
    ],
)
def test_a_class_above_the_keys_bound_is_forbidden_by_name(asked: dict[str, Any], field: str) -> None:
    with pytest.raises(Forbidden) as caught:
        contract_of(asked, BATCH_ONLY)
    assert caught.value.param == field
    assert caught.value.status == 403
    assert "'low' at most" in caught.value.message


def test_auto_means_the_keys_own_default() -> None:
    assert contract_of({"service_tier": "auto"}, BATCH_ONLY).request_class is LOW
    assert contract_of({"priority": "auto"}, BATCH_ONLY).request_class is LOW


# --- headers


def test_headers_of_the_contract_are_read_and_all_others_ignored() -> None:
    found = contract_of(
        x_session_id="s-1", x_deadline_ms="1500", idempotency_key="abc", x_vllm_priority="-9", x_data_parallel_rank="1"
    )
    assert found == Contract(NORMAL, "s-1", 1.5, "abc")
    assert contract_of() == Contract(NORMAL, None, None, None)


def test_only_a_stream_is_informed_of_the_queue_and_only_if_it_asks() -> None:
    for operation in (Operation.CHAT, Operation.COMPLETION, Operation.RESPONSES):
        assert contract_of({"stream": True}, operation=operation, x_queue_status="1").queue_status
        assert not contract_of({"stream": True}, operation=operation, x_queue_status="0").queue_status
        assert not contract_of({"stream": True}, operation=operation).queue_status
        assert not contract_of(operation=operation, x_queue_status="1").queue_status
    assert not contract_of({"stream": True}, operation=Operation.EMBEDDING, x_queue_status="1").queue_status


@pytest.mark.parametrize("value", ["", "2", "true", "01", "1, 1"])
def test_a_queue_status_that_is_neither_yes_nor_no_is_refused(value: str) -> None:
    with pytest.raises(BadRequest) as caught:
        contract_of({"stream": True}, x_queue_status=value)
    assert caught.value.param == "X-Queue-Status"


@pytest.mark.parametrize(
    ("name", "shown", "bound"), [("x_session_id", "X-Session-Id", 128), ("idempotency_key", "Idempotency-Key", 255)]
)
def test_labels_are_bounded_and_visible(name: str, shown: str, bound: int) -> None:
    assert "x" * bound in repr(contract_of(**{name: "x" * bound}))
    for value in ("", "x" * (bound + 1), "a b", "a\tb", "é", "a\x00", "a\n"):
        with pytest.raises(BadRequest) as caught:
            contract_of(**{name: value})
        assert caught.value.param == shown


@pytest.mark.parametrize(
    "value", ["", "0", "-1", "+5", "1.5", "1e3", " 5", "5 ", "abc", "86400001", "1764000000000", "9" * 5000, "²"]
)
def test_a_deadline_is_a_bounded_positive_whole_number(value: str) -> None:
    with pytest.raises(BadRequest) as caught:
        contract_of(x_deadline_ms=value)
    assert caught.value.param == "X-Deadline-Ms"
    assert contract_of(x_deadline_ms="86400000").deadline_s == 86_400
    assert contract_of(x_deadline_ms="001").deadline_s == 0.001


def test_a_replay_alone_is_asked_for_by_a_one() -> None:
    assert contract_of(x_replay_only="1").replay_only
    assert not contract_of(x_replay_only="0").replay_only
    with pytest.raises(BadRequest) as caught:
        contract_of(x_replay_only="yes")
    assert caught.value.param == "X-Replay-Only"


@pytest.mark.parametrize("value", ["", "-1", "+5", "1.5", "1e3", " 5", "abc", "30001", "9" * 5000, "²"])
def test_a_grace_after_a_disconnect_is_a_bounded_whole_number(value: str) -> None:
    with pytest.raises(BadRequest) as caught:
        contract_of(x_disconnect_grace_ms=value)
    assert caught.value.param == "X-Disconnect-Grace-Ms"
    assert contract_of().grace_s is None
    assert contract_of(x_disconnect_grace_ms="0").grace_s == 0.0
    assert contract_of(x_disconnect_grace_ms="30000").grace_s == 30.0


# --- output bound

CAPPED = HttpSettings(max_output_tokens=100)


@pytest.mark.parametrize(
    ("operation", "field"),
    [
        (Operation.CHAT, "max_tokens"),
        (Operation.CHAT, "max_completion_tokens"),
        (Operation.COMPLETION, "max_tokens"),
        (Operation.RESPONSES, "max_output_tokens"),
    ],
)
def test_more_output_than_allowed_is_refused_and_no_bound_becomes_the_allowed_one(
    operation: Operation, field: str
) -> None:
    assert clean({field: 100}, operation, CAPPED) == {field: 100}
    assert "100 output tokens" in refused(field, {field: 101}, operation, bounds=CAPPED).message
    for wrong in (True, 1.0, "5", []):
        refused(field, {field: wrong}, operation)
    assert 100 in clean({field: None}, operation, CAPPED).values()
    assert 64 in clean({field: None}, operation, CAPPED, max_model_len=64).values()
    assert clean({field: 10**9}, operation) == {field: 10**9}


def test_both_chat_bounds_are_checked_and_a_small_one_is_not_widened() -> None:
    refused("max_tokens", {"max_completion_tokens": 5, "max_tokens": 101}, bounds=CAPPED)
    body = {"max_completion_tokens": None, "max_tokens": 5}
    assert clean(body, bounds=CAPPED) == body


def test_a_silent_completion_keeps_openais_default_of_sixteen_tokens() -> None:
    assert clean({"prompt": "x"}, Operation.COMPLETION, CAPPED)["max_tokens"] == 16
    assert clean({"prompt": "x"}, Operation.COMPLETION, HttpSettings(max_output_tokens=4))["max_tokens"] == 4
    assert clean({"prompt": "x"}, Operation.COMPLETION) == {"prompt": "x"}


@pytest.mark.parametrize(
    ("operation", "body"),
    [
        (Operation.EMBEDDING, {"input": "x"}),
        (Operation.SCORE, {"queries": "x", "documents": ["y"]}),
        (Operation.RERANK, {"query": "x", "documents": ["y"], "top_n": 0}),
    ],
)
def test_pooling_gets_no_output_bound(operation: Operation, body: dict[str, Any]) -> None:
    assert clean(body, operation, CAPPED) == body


@pytest.mark.parametrize(
    ("cap", "given", "expected"),
    [(None, {}, 50), (20, {}, 20), (None, {"max_tokens": 7}, 7), (None, {"max_tokens": None}, 50)],
)
def test_a_request_that_names_no_bound_gets_the_default(cap: int | None, given: dict[str, Any], expected: int) -> None:
    bounds = HttpSettings(default_output_tokens=50, max_output_tokens=cap)
    assert clean({"prompt": "x", **given}, Operation.COMPLETION, bounds)["max_tokens"] == expected
    assert clean({"input": "x"}, Operation.RESPONSES, bounds, max_model_len=16)["max_output_tokens"] == 16
