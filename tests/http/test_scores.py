"""Scores and reranks in the router: the fields of their texts, and what they cost and leave behind."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pytest

from serve_app.errors import BadRequest
from serve_app.http import split_body
from serve_app.http.contract import split
from serve_app.http.split_body import BYTES_TOGETHER, INPUTS_TOGETHER
from serve_app.settings import HttpSettings
from serve_app.types import Identity, Operation, Outcome, RequestClass
from tests.fakes.asgi_client import ask, started
from tests.fakes.engines import MODEL, FakeCluster, model, run, until
from tests.fakes.router import SOON_S
from tests.http.test_prompt_list import bodies_of

ANYONE = Identity("t", RequestClass.CRITICAL, RequestClass.NORMAL)


def clean(body: dict[str, Any], operation: Operation) -> dict[str, Any]:
    forwarded, _, size = split(operation, body, {}, ANYONE, HttpSettings())
    return split_body.split_body(operation, forwarded, size, HttpSettings()).body


def refused(field: str, body: dict[str, Any], operation: Operation) -> None:
    with pytest.raises(BadRequest) as caught:
        clean(body, operation)
    assert caught.value.param == field
    assert f"`{field}`" in caught.value.message


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "queries"),
        ({"queries": "a"}, "documents"),
        ({"queries": "a", "documents": None}, "documents"),
        ({"items": ["a"]}, "queries"),
        ({"text_2": "a"}, "text_1"),
        ({"data_1": "a"}, "data_2"),
        ({"queries": "a", "documents": "b", "items": "c"}, "items"),
        ({"documents": "a", "text_1": "b", "text_2": "c"}, "documents"),
        ({"queries": [], "documents": "a"}, "queries"),
        ({"queries": "a", "documents": []}, "documents"),
        ({"queries": "a", "documents": ["b", 5]}, "documents.1"),
        ({"queries": "a", "documents": [["b"]]}, "documents.0"),
        ({"queries": 5, "documents": "a"}, "queries"),
        ({"queries": "a", "documents": [None]}, "documents.0"),
        ({"queries": ["a", "b"], "documents": ["a", "b", "c"]}, "queries"),
        ({"queries": ["a", "b"], "documents": "a"}, "queries"),
    ],
)
def test_a_score_without_two_fields_of_texts_is_refused_by_name(body: dict[str, Any], field: str) -> None:
    refused(field, body, Operation.SCORE)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "query"),
        ({"documents": ["a"]}, "query"),
        ({"query": "a"}, "documents"),
        ({"query": "a", "documents": []}, "documents"),
        ({"query": "a", "documents": [3]}, "documents.0"),
        ({"query": ["a"], "documents": ["a"]}, "query"),
        ({"query": 1, "documents": ["a"]}, "query"),
        ({"queries": "a", "documents": ["a"]}, "query"),
    ],
)
def test_a_rerank_without_a_query_and_documents_is_refused_by_name(body: dict[str, Any], field: str) -> None:
    refused(field, body, Operation.RERANK)


@pytest.mark.parametrize(
    "names", [("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2")]
)
def test_a_score_passes_in_each_form_of_vllm_s(names: tuple[str, str]) -> None:
    for queries, documents in (("a", "b"), ("a", ["b", "c"]), (["a", "d"], ["b", "c"])):
        body = {"model": "e", names[0]: queries, names[1]: documents, "user": "u"}
        assert clean({**body, "cache_salt": "mine", "made_up": 1}, Operation.SCORE) == body


def test_a_score_waits_counts_and_leaves_a_receipt_as_the_embeddings_of_its_texts_do() -> None:
    texts = ["a b", "c d e", "f"]
    same: tuple[tuple[str, dict[str, Any]], ...] = (
        ("/v1/embeddings", {"input": texts}),
        ("/v1/score", {"queries": texts[0], "documents": texts[1:]}),
        ("/v1/rerank", {"query": texts[0], "documents": texts[1:], "top_n": 1}),
    )

    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        for path, body in same:
            reply = await client.post({"model": MODEL, **body}, path=path)
            assert (reply.status, json.loads(reply.body)["usage"]["prompt_tokens"]) == (200, 6)
        left = list(client.edge.parts.receipts.kept.values())
        assert [(one.outcome, one.prompt_tokens, one.output_tokens) for one in left] == [(Outcome.OK, 6, 0)] * 3
        assert len({(one.trace.measure.slots, one.trace.measure.cost.prompt_tokens) for one in left}) == 1
        assert client.figures("serve_app_prompt_tokens_total", "model") == {(MODEL,): 18}
        batch = client.usage_meter.next_batch()
        assert batch is not None
        assert (batch.rows[0].requests, batch.rows[0].prompt_tokens) == (3, 18)
        found = client.edge.parts.receipts.find(f"score-{left[1].request_id}", None)
        assert found is left[1]

    run(scenario, model(task="embed"))


def test_a_score_of_a_generating_model_and_a_chat_of_a_scoring_one_are_refused() -> None:
    score = {"model": MODEL, "queries": "a", "documents": ["b"]}

    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        pools = client.edge.parts.models[MODEL].settings.task == "embed"
        for path, body, is_its in (("/score", score, pools), ("/v1/completions", ask("a"), not pools)):
            assert (await client.post(body, path=path)).status == (200 if is_its else 400)

    run(scenario, model(task="embed"))
    run(scenario, model())


MANY = [f"text {number % 50} of {number}" for number in range(2 * INPUTS_TOGETHER + 5)]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/score", {"queries": "text 7", "documents": MANY}),
        ("/v1/score", {"text_1": ["text 7"], "text_2": MANY}),
        ("/v1/score", {"queries": MANY, "items": MANY[::-1]}),
        ("/v1/score", {"data_1": "text 7", "data_2": MANY[:1]}),
        ("/v1/rerank", {"query": "text 7", "documents": MANY}),
        ("/v1/rerank", {"query": "text 7", "documents": MANY, "top_n": INPUTS_TOGETHER + 3}),
        ("/v1/rerank", {"query": "text 7", "documents": [*MANY[:1] * 40, *MANY], "top_n": 40}),
    ],
)
def test_many_documents_are_answered_as_by_one_engine(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1", "r2")
        answers = []
        for most in (INPUTS_TOGETHER, sys.maxsize):
            monkeypatch.setattr(split_body, "INPUTS_TOGETHER", most)
            reply = await client.post({"model": MODEL, **body}, path=path)
            assert reply.status == 200, reply.body
            answers.append(json.loads(reply.body))
        in_parts, whole = answers
        request_id = in_parts.pop("id")
        assert (request_id.startswith("score-"), whole.pop("id") != request_id) == (True, True)
        assert in_parts.pop("created", 0) <= whole.pop("created", 0) + 1
        assert in_parts == whole
        left = list(client.edge.parts.receipts.kept.values())
        assert [one.outcome for one in left] == [Outcome.OK] * 2
        assert len({one.prompt_tokens for one in left}) == 1, "limits and prices count the query once, too"
        await until(client.at_rest, SOON_S, "all given back")

    run(scenario, model(slots=8, task="embed"))


@pytest.mark.parametrize(
    ("operation", "body"),
    [
        (Operation.RERANK, {"query": "q", "documents": ["a", "b"] * 5, "top_n": "many"}),
        (Operation.RERANK, {"query": "q", "documents": ["a", "b"] * 5, "top_n": -1}),
        (Operation.SCORE, {"queries": "q", "documents": ["a", {"content": []}] * 5}),
    ],
)
def test_what_an_engine_refuses_of_a_part_ends_the_whole(
    operation: Operation, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split_body, "INPUTS_TOGETHER", 2)

    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        reply = await client.post({"model": MODEL, **body}, path=f"/v1/{operation.value}")
        assert reply.status == 400
        await until(client.at_rest, SOON_S, "all given back")

    run(scenario, model(slots=8, task="embed"))


def test_many_documents_of_one_hold_no_replica_until_they_are_scored() -> None:
    body = {"model": MODEL, "query": "a", "documents": ["b"] * 40 * INPUTS_TOGETHER}

    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        many = asyncio.create_task(client.post(body, path="/v1/rerank"))
        await until(lambda: not client.at_rest(), SOON_S, "the list has begun")
        reply = await client.post({**body, "documents": ["b"]}, path="/v1/rerank")
        assert (reply.status, many.done()) == (200, False)
        assert (await many).status == 200

    run(scenario, model(slots=INPUTS_TOGETHER, task="embed"))


def test_documents_are_scored_together_up_to_a_number_and_to_the_bytes_of_their_pairs() -> None:
    short = "a"
    long = "b" * (BYTES_TOGETHER // 2)
    query = "q" * (BYTES_TOGETHER // 4)
    bodies = bodies_of(Operation.RERANK, {"query": "q", "documents": [short] * (INPUTS_TOGETHER + 1) + [long, long]})
    assert [one["documents"] for one in bodies] == [[short] * INPUTS_TOGETHER, [short, long], [long]]
    bodies = bodies_of(Operation.SCORE, {"queries": [query], "items": [short] * 7, "user": "u"})
    assert [one["items"] for one in bodies] == [[short] * 3, [short] * 3, [short]]
    assert all((one["queries"], one["user"]) == ([query], "u") for one in bodies)
    pairs = {"text_1": [query, short, query], "text_2": [long, short, long]}
    assert [(one["text_1"], one["text_2"]) for one in bodies_of(Operation.SCORE, pairs)] == [
        ([query, short], [long, short]),
        ([query], [long]),
    ]
