"""Request traces: each kind is read, and a wrong file is refused with the line and the field."""

from __future__ import annotations

import json

import pytest

from autoscaling.simulator import SimulatedRequest, read_trace
from serve_app.core.receipts import Receipt
from serve_app.core.records import full_record, record_fields
from serve_app.errors import BadRequest
from serve_app.types import Outcome, RequestClass

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def read(text: str) -> list[SimulatedRequest]:
    return read_trace(text.splitlines(keepends=True), "m")


def test_azures_csv_is_read_in_the_order_of_its_moments() -> None:
    found = read(f"{AZURE}2023-11-16 18:15:50.9951690,396,109\n2023-11-16 18:15:46.6805900,374,0\n")
    assert [request.at_s for request in found] == pytest.approx([0.0, 4.314579], abs=1e-6)
    assert [(request.prompt_tokens, request.output_tokens) for request in found] == [(374, 1), (396, 109)]
    assert {(request.tenant, request.model, request.request_class) for request in found} == {
        ("azure", "m", RequestClass.NORMAL)
    }


def test_the_moments_of_azures_later_trace_have_a_zone() -> None:
    found = read(f"{AZURE}2024-05-10 23:59:59.5+00:00,1,1\n2024-05-11 00:00:00.25+00:00,1,1\n")
    assert found[1].at_s == pytest.approx(0.75)


def test_mooncakes_lines_have_the_blocks_of_their_prompts() -> None:
    found = read(
        '{"timestamp": 1500, "input_length": 600, "output_length": 5, "hash_ids": [0, 7]}\n'
        '{"timestamp": 3000, "input_length": 10, "output_length": 2, "hash_ids": []}\n'
    )
    assert [request.at_s for request in found] == [0.0, 1.5]
    assert [request.prefix_blocks for request in found] == [("0", "7"), ()]


def test_the_models_of_burst_gpt_are_its_tenants() -> None:
    found = read(f"{BURST}5,ChatGPT,472,18,490,Conversation log\n45.5,GPT-4,10,0,10,API log\n")
    assert [(request.at_s, request.tenant, request.output_tokens) for request in found] == [
        (0.0, "ChatGPT", 18),
        (40.5, "GPT-4", 1),
    ]


def test_our_own_export_keeps_classes_sessions_and_blocks_and_what_was_refused() -> None:
    """Newest first, as `serve-app requests --export` writes them."""
    answered = Receipt(
        *("b", RequestClass.HIGH, "acme", "chat", Outcome.OK, 5.0, 0.25, 2.5),
        prompt_tokens=3,
        output_tokens=4,
        session_id="s",
    )
    refused = Receipt("a", RequestClass.LOW, "acme", "chat", Outcome.REFUSED, 1.0, 0.0, 0.1)
    wrong = Receipt("c", RequestClass.LOW, "acme", "chat", Outcome.BAD_REQUEST, 1.0, 0.0, 0.1)
    records = [
        full_record(record_fields(answered, 1_000.5, {"prefix_blocks": ["x", "y"]})) | {"slots": 1},
        full_record(record_fields(refused, 1_000.0, {})) | {"slots": 1, "estimated_prompt": 30, "estimated_output": 40},
        full_record(record_fields(wrong, 999.0, {})) | {"slots": 1},
    ]
    found = read("".join(json.dumps(record) + "\n" for record in records))
    assert found == [
        SimulatedRequest(0.0, "acme", RequestClass.LOW, "chat", 30, 40),
        SimulatedRequest(0.5, "acme", RequestClass.HIGH, "chat", 3, 4, "s", ("x", "y")),
    ]


@pytest.mark.parametrize(
    ("text", "param", "words"),
    [
        (f"{AZURE}2023-11-16 18:15:46.68,374,44\n2023-11-16 18:15:47,x,1\n", "ContextTokens", "line 3"),
        (f"{AZURE}2023-13-16 18:15:46,1,1\n", "TIMESTAMP", "line 2"),
        (f"{AZURE}yesterday,1,1\n", "TIMESTAMP", "line 2"),
        (f"{AZURE}2023-11-16 18:15:46,-1,1\n", "ContextTokens", "at least 0"),
        (f"{AZURE}2023-11-16 18:15:46,1.5,1\n", "ContextTokens", "whole number"),
        (f"{AZURE}2023-11-16 18:15:46,1\n", "GeneratedTokens", "missing"),
        ("TIMESTAMP,ContextTokens\n", "GeneratedTokens", "line 1"),
        (AZURE, "trace", "no request"),
        (f"{BURST}5,ChatGPT,nan,18,490,API log\n", "Request tokens", "line 2"),
        ('{"timestamp": 1, "input_length": 6}\n', "output_length", "line 1"),
        ('{"timestamp": 1, "input_length": 6, "output_length": 2}\n{"timestamp": 1,\n', "trace", "line 2"),
        ('{"timestamp": true, "input_length": 6, "output_length": 2}\n', "timestamp", "line 1"),
        ('{"timestamp": 1, "input_length": 6, "output_length": 2, "hash_ids": 3}\n', "hash_ids", "not a list"),
        ("hello\n", "trace", "line 1"),
        ("", "trace", "line 1"),
    ],
)
def test_a_wrong_file_is_refused_by_place_and_field(text: str, param: str, words: str) -> None:
    with pytest.raises(BadRequest, match=words) as refused:
        read(text)
    assert refused.value.param == param
