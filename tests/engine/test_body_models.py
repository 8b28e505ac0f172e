"""A body with many wrong entries costs what one with a few costs, and is told as vLLM's own models tell it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from tests.requires import requires

requires("vllm")

from serve_app.engine.vllm_adapter import serving  # noqa: E402
from serve_app.engine.vllm_adapter.body_models import MODELS, SCORE_FORMS, validated  # noqa: E402
from serve_app.transport import Submit  # noqa: E402
from serve_app.types import Operation  # noqa: E402

FEW = 2
MANY = 200
USER = {"role": "user", "content": "a"}
PART = {"type": "text", "text": "a"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
WRONG: list[Any] = ["", None, {}, [], 5, {"type": "none"}, {"role": "nobody"}, {"type": "message", "content": [{}]}]
MODEL_OF: list[tuple[Operation, Any]] = [
    *MODELS.items(),
    *((Operation.SCORE, model) for model in SCORE_FORMS.values()),
]
OWN: dict[str, TypeAdapter[Any]] = {name: TypeAdapter(model) for name, model in (MODELS | SCORE_FORMS).items()}


def score_form(body: dict[str, Any]) -> str:
    """The field that says which of vLLM's models of a score a body is."""
    return next((field for field in ("items", "text_2", "data_2") if body.get(field) is not None), "documents")


def fields(model: Any) -> list[str]:
    """The fields of a model, or of all models of a union."""
    if isinstance(model, type) and issubclass(model, BaseModel):
        return list(model.model_fields)
    return sorted({name for one in get_args(model) for name in fields(one)})


def wrong_bodies(model: Any, count: int) -> Iterator[dict[str, Any]]:
    """Wrong entries in each field, and where a field holds lists: in an entry, and in an object."""
    for field in fields(model):
        for wrong in WRONG:
            many = [wrong] * count
            within = [many, {f"n{number}": wrong for number in range(count)}, {"effort": many}, {"function": many}]
            within += [[{**USER, "content": many}], [{"role": "assistant", "tool_calls": many}], [many]]
            for value in within:
                yield {"model": "m", "request_id": "r", field: value}


BRANCH = re.compile(r"^function-before\[.*, (\w+)\]$")  # the name of a union's branch that is read without nulls


def outcome(validate: Any, body: dict[str, Any]) -> tuple[Any, int]:
    """The values of a valid body, or the first error and the number of errors."""
    try:
        made = validate(body)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        place = tuple(BRANCH.sub(r"\1", part) if isinstance(part, str) else part for part in found[0]["loc"])
        return (found[0]["type"], place, found[0]["msg"]), error.error_count()
    except Exception as error:  # noqa: BLE001 - vLLM's own checks have errors of any kind
        return (type(error), str(error)), 1
    return (type(made), _dumped(made)), 0


def _dumped(made: BaseModel) -> Any:
    try:
        return json.loads(made.model_dump_json(warnings=False))
    except Exception as error:  # noqa: BLE001 - a lazily validated part is wrong
        return str(error)


@pytest.mark.parametrize(("operation", "model"), MODEL_OF, ids=lambda parameter: getattr(parameter, "__name__", None))
def test_many_wrong_entries_make_as_many_errors_as_a_few(operation: Operation, model: Any) -> None:
    wrong = 0
    for few, many in zip(wrong_bodies(model, FEW), wrong_bodies(model, MANY), strict=True):
        errors = [outcome(lambda body: validated(operation, body), body)[1] for body in (few, many)]
        assert errors[1] < errors[0] + MANY // 2, many  # a few more: of a bound on the length
        wrong += errors[1] > 0
    assert wrong > len(WRONG)


@pytest.mark.parametrize(("operation", "model"), MODEL_OF, ids=lambda parameter: getattr(parameter, "__name__", None))
def test_a_body_is_valid_or_first_wrong_as_vllm_s_own_model_says(operation: Operation, model: Any) -> None:
    for body in wrong_bodies(model, FEW):
        own = OWN[operation] if operation in OWN else OWN[score_form(body)]
        assert outcome(lambda body: validated(operation, body), body)[0] == outcome(own.validate_python, body)[0], body


VALID: list[tuple[Operation, dict[str, Any]]] = [
    (Operation.CHAT, {"messages": [USER, {**USER, "content": [PART, PART]}], "tools": [TOOL], "seed": 5}),
    (
        Operation.CHAT,
        {
            "messages": [USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "1"}],
            "logit_bias": {"5": 1.0},
            "stop": ["a", "b"],
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
        },
    ),
    (Operation.RESPONSES, {"input": [USER, {"type": "reasoning", "id": "r", "summary": []}, USER], "tools": []}),
    (Operation.RESPONSES, {"input": [{**USER, "content": [{"type": "input_text", "text": "a"}]}], "metadata": {}}),
    (Operation.INPUT_TOKENS, {"input": "a", "instructions": "b"}),
    (Operation.COMPLETION, {"prompt": ["a", "b"], "logprobs": 3}),
    (Operation.COMPLETION, {"prompt": [[1, 2], [3]], "logit_bias": {"5": 1}}),
    (Operation.EMBEDDING, {"input": ["a", "b"]}),
    (Operation.EMBEDDING, {"messages": [[USER], [USER, USER]]}),
    (Operation.RERANK, {"query": "a", "documents": ["b", {"content": [PART]}]}),
    (Operation.SCORE, {"text_1": "a", "text_2": ["b", "c"]}),
    (Operation.SCORE, {"queries": ["a"], "documents": ["b"]}),
    (Operation.TOKENIZE, {"messages": [USER], "tools": [TOOL]}),
    (Operation.DETOKENIZE, {"tokens": [1, 2]}),
]


@pytest.mark.parametrize(("operation", "body"), VALID)
def test_a_valid_body_has_the_values_of_vllm_s_own_model(operation: Operation, body: dict[str, Any]) -> None:
    body = {"model": "m", "request_id": "r", **body}
    own = OWN[operation] if operation in OWN else OWN[score_form(body)]
    found, errors = outcome(lambda body: validated(operation, body), body)
    assert (found, errors) == outcome(own.validate_python, body)
    assert errors == 0


@pytest.mark.parametrize(
    ("operation", "body", "param"),
    [
        (Operation.RESPONSES, {"input": [""] * 20_000}, "input.0"),
        (Operation.RESPONSES, {"input": "a", "tools": [""] * 20_000}, "tools.0"),
        (Operation.CHAT, {"messages": [""] * 20_000}, "messages.0"),
        (Operation.CHAT, {"messages": [USER], "documents": [""] * 20_000}, "documents.0"),
        (Operation.EMBEDDING, {"messages": [USER] + [""] * 4_000}, "messages.1"),
    ],
)
def test_the_first_wrong_entry_is_named(operation: Operation, body: dict[str, Any], param: str) -> None:
    submit = Submit(1, "r", operation, {"model": "m", **body})
    with pytest.raises(ValidationError) as caught:
        serving.request_of(submit, False)
    assert serving.validation_error(caught.value, submit).error.param == param
    assert caught.value.error_count() < 300  # to tell the first one, pydantic makes all
