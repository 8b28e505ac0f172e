"""Parameters whose work no token of the budget stands for are bounded, each at the bound and one above it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serve_app.errors import BadRequest
from serve_app.http.contract import check_values
from serve_app.http.parameter_bounds import LIST_BOUNDS, MAX_REPETITION_WORK
from serve_app.types import Operation

OBJECTS = ("logit_bias", "metadata")
GENERATING = (Operation.CHAT, Operation.COMPLETION, Operation.RESPONSES)


def refused(body: dict[str, Any], operation: Operation = Operation.CHAT) -> tuple[str | None, str]:
    """The field and the message of the 400."""
    with pytest.raises(BadRequest) as caught:
        check_values(operation, body)
    assert caught.value.status == 400
    return caught.value.param, caught.value.message


def entries(field: str, count: int) -> Any:
    if field in OBJECTS:
        return {str(n): 1 for n in range(count)}
    return [n if field.endswith("token_ids") else str(n) for n in range(count)]


@pytest.mark.parametrize("operation", GENERATING)
@pytest.mark.parametrize("field", sorted(set(LIST_BOUNDS) - {"user"}))
def test_a_list_longer_than_its_bound_is_refused_by_name(field: str, operation: Operation) -> None:
    most = LIST_BOUNDS[field].entries
    check_values(operation, {field: entries(field, most)})
    param, message = refused({field: entries(field, most + 1)}, operation)
    assert param == field
    assert message == f"`{field}` may have {most} entries, it has {most + 1}"


@pytest.mark.parametrize("field", [name for name, bounds in LIST_BOUNDS.items() if bounds.entry_bytes is not None])
def test_an_entry_longer_than_its_bound_is_refused_by_its_path(field: str) -> None:
    most = LIST_BOUNDS[field].entry_bytes
    assert most is not None

    def value(size: int) -> Any:
        text = "é" * ((size - 1) // 2) + "x" * (1 + (size - 1) % 2)
        assert len(text.encode()) == size
        return text if field == "user" else {text: 1} if field in OBJECTS else ["a", "b", text]

    check_values(Operation.CHAT, {field: value(most)})
    param, message = refused({field: value(most + 1)})
    assert param == (field if field == "user" or field in OBJECTS else f"{field}.2")
    assert message == f"`{param}` may have {most} bytes, it has {most + 1}"


@pytest.mark.parametrize("field", [name for name, bounds in LIST_BOUNDS.items() if bounds.bytes is not None])
def test_entries_that_are_longer_in_all_than_the_bound_are_refused_by_name(field: str) -> None:
    bounds = LIST_BOUNDS[field]
    assert bounds.bytes is not None
    assert bounds.entry_bytes is not None
    count = bounds.bytes // bounds.entry_bytes

    def value(more: int) -> Any:
        texts = [f"{n:0{bounds.entry_bytes}}" for n in range(count)] + ["x"] * more
        return dict.fromkeys(texts) if field in OBJECTS else texts

    check_values(Operation.CHAT, {field: value(0)})
    param, message = refused({field: value(1)})
    assert param == field
    assert message == f"`{field}` may have {bounds.bytes} bytes in all, it has {bounds.bytes + 1}"


def test_ten_bad_words_of_800_kb_are_refused() -> None:
    assert refused({"bad_words": ["w" * 800_000] * 10})[0] == "bad_words.0"


def test_a_single_stop_string_has_the_bound_of_one_in_a_list() -> None:
    check_values(Operation.COMPLETION, {"stop": "s" * 1024})
    assert refused({"stop": "s" * 1025}, Operation.COMPLETION)[0] == "stop"


@pytest.mark.parametrize(
    ("size", "count"), [(20, 100), (64, 16), (128, 4), (181, 2), (1, MAX_REPETITION_WORK), (10**9, 0), (0, 10**9)]
)
def test_repetition_detection_that_costs_little_is_taken(size: int, count: int) -> None:
    check_values(Operation.CHAT, {"repetition_detection": {"max_pattern_size": size, "min_count": count}})


@pytest.mark.parametrize(("size", "count"), [(10**9, 2), (182, 2), (129, 4), (65, 16), (1, MAX_REPETITION_WORK + 1)])
def test_repetition_detection_that_costs_every_step_much_is_refused(size: int, count: int) -> None:
    repetition = {"max_pattern_size": size, "min_pattern_size": 1, "min_count": count}
    param, message = refused({"repetition_detection": repetition})
    assert param == "repetition_detection.max_pattern_size"
    assert f"with `min_count` {count}, it is {size}" in message


@pytest.mark.parametrize("name", ["max_pattern_size", "min_pattern_size", "min_count"])
@pytest.mark.parametrize("value", ["1000000000", 1e9, True, None, [5]])
def test_numbers_of_repetition_detection_are_integers(name: str, value: Any) -> None:
    """vLLM reads "1000000000" and 1e9 as a number, too."""
    assert refused({"repetition_detection": {name: value}})[0] == f"repetition_detection.{name}"


@pytest.mark.parametrize("field", [*LIST_BOUNDS, "repetition_detection"])
@pytest.mark.parametrize("value", [None, 5, 0.5, True, [], {}, [None], [5], [["x"]], [{"a": "b"}], {"a": [1]}])
def test_values_of_types_that_vllm_refuses_are_left_to_vllm(field: str, value: Any) -> None:
    check_values(Operation.CHAT, {field: value})


def test_lone_surrogates_are_counted_and_break_nothing() -> None:
    body = json.loads('{"bad_words": ["\\ud800"], "stop": "\\udfff"}')
    check_values(Operation.CHAT, body)
