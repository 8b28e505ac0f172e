"""What the simulated engine answers: OpenAI-shaped bytes, lengths, stops, refusals, tokens and embeddings."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from serve_app.engine.simulated import SimulatedEngine
from serve_app.engine.simulated.requests import QUIET
from serve_app.engine.simulated.text import TOKEN_CHARS, WordTokenizer, count_tokens, first_stop, text_key, text_of
from serve_app.http.contract import FORWARDED
from serve_app.transport import EngineInfo, TokenUsage
from serve_app.types import Operation
from tests.effort import examples
from tests.engine.simulated_engine import CREATED, HELLO, MadeUpTime, document, events, pieces, run, submit


def test_streamed_chat_is_what_the_openai_sdk_expects() -> None:
    body = HELLO | {"stream": True, "max_tokens": 5, "stream_options": {"include_usage": True}}
    reported = pieces(Operation.CHAT, body)
    chunks = [ChatCompletionChunk.model_validate(event, strict=True) for event in events(reported)]
    assert {(c.id, c.model, c.created, c.object) for c in chunks} == {("id-0", "sim", CREATED, "chat.completion.chunk")}
    *spoken, last = chunks
    assert spoken[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in spoken] == [None] * 6 + ["length"]
    contents = [chunk.choices[0].delta.content or "" for chunk in spoken]
    assert [bool(content) for content in contents] == [False] + [True] * 5 + [False]  # an event for every token
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.total_tokens) == (3, 5, 8)
    assert reported[-1].usage == TokenUsage(3, 5, 0, "length")


def test_token_groups_are_the_tokens_of_the_text() -> None:
    reported = pieces(Operation.CHAT, HELLO | {"stream": True, "max_tokens": 9})
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events(reported))
    groups = [group for piece in reported for group in piece.groups]
    assert all(len(piece.groups) == 1 for piece in reported)  # so that pieces can be counted when groups are replayed
    assert [token for choice, *tokens in groups for token in tokens] == WordTokenizer().encode(text)
    assert "usage" not in events(reported)[-1]  # nobody asked for it


@pytest.mark.parametrize("more", [{}, {"n": 3}, {"stop": ["ba", "ko", "ri"]}], ids=["plain", "n", "stop"])
def test_streamed_and_whole_chat_say_the_same(more: dict[str, Any]) -> None:
    body = HELLO | {"max_tokens": 40} | more
    whole = ChatCompletion.model_validate(document(Operation.CHAT, body), strict=True)
    streamed = [""] * len(whole.choices)
    reasons: list[Any] = [None] * len(whole.choices)
    for event in events(pieces(Operation.CHAT, body | {"stream": True})):
        choice = event["choices"][0]
        streamed[choice["index"]] += choice["delta"].get("content", "")
        reasons[choice["index"]] = choice["finish_reason"]
    assert streamed == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert len(set(streamed)) == more.get("n", 1)
    assert [choice.index for choice in whole.choices] == list(range(len(streamed)))


def test_completion_takes_every_form_of_prompt() -> None:
    whole = Completion.model_validate(document(Operation.COMPLETION, {"prompt": ["a b", "c"], "n": 2}), strict=True)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert [count_tokens(choice.text) for choice in whole.choices] == [16] * 4  # OpenAI's default length
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (3, 64)
    alone = document(Operation.COMPLETION, {"prompt": "c"})
    assert alone["choices"][0]["text"] == whole.choices[2].text  # whatever stands beside it
    ids = document(Operation.COMPLETION, {"prompt": [5, 6, 7], "max_tokens": 2})
    assert ids["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    streamed = events(pieces(Operation.COMPLETION, {"prompt": "c", "stream": True}))
    assert Completion.model_validate(streamed[-1], strict=True).choices[0].finish_reason == "length"
    assert "".join(event["choices"][0]["text"] for event in streamed) == alone["choices"][0]["text"]


def test_chat_without_a_limit_runs_to_the_models_length() -> None:
    usage = document(Operation.CHAT, HELLO, max_model_len=100)["usage"]
    assert usage == {"prompt_tokens": 3, "completion_tokens": 97, "total_tokens": 100}
    newer = document(Operation.CHAT, HELLO | {"max_tokens": 9, "max_completion_tokens": 7})
    assert newer["usage"]["completion_tokens"] == 7


@pytest.mark.parametrize(
    ("operation", "body", "param"),
    [
        (Operation.CHAT, {}, "messages"),
        (Operation.CHAT, {"messages": []}, "messages"),
        (Operation.CHAT, {"messages": ["hi"]}, "messages.0"),
        (Operation.CHAT, {"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
        (Operation.CHAT, {"messages": [{"role": None, "content": "a"}]}, "messages.0.role"),
        (
            Operation.CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content.0.text",
        ),
        (Operation.CHAT, HELLO | {"max_tokens": 0}, "max_tokens"),
        (Operation.CHAT, HELLO | {"max_completion_tokens": "9"}, "max_completion_tokens"),
        (Operation.CHAT, HELLO | {"n": True}, "n"),
        (Operation.CHAT, HELLO | {"n": 10**9}, "n"),
        (Operation.CHAT, HELLO | {"stream": "yes"}, "stream"),
        (Operation.CHAT, HELLO | {"stop": [""]}, "stop"),
        (Operation.CHAT, HELLO | {"stop": 3}, "stop"),
        (Operation.CHAT, HELLO | {"stream_options": {"include_usage": True}}, "stream_options"),
        (Operation.COMPLETION, {"prompt": ""}, "prompt"),
        (Operation.COMPLETION, {"prompt": ["a", 3]}, "prompt.1"),
        (Operation.COMPLETION, {"prompt": [[1], "a"]}, "prompt.1"),
        (Operation.COMPLETION, {"prompt": ["a", ""]}, "prompt.1"),
        (Operation.COMPLETION, {"prompt": []}, "prompt"),
        (Operation.TOKENIZE, {}, "prompt"),
        (Operation.DETOKENIZE, {"tokens": ["a"]}, "tokens"),
        (Operation.EMBEDDING, {"input": "a"}, "model"),
        (Operation.SCORE, {"queries": "a", "documents": "b"}, "model"),
        (Operation.RESPONSES, {"input": [5]}, "messages.0"),
    ],
)
def test_a_wrong_field_is_named_in_openais_error_format(operation: Operation, body: dict[str, Any], param: str) -> None:
    (piece,) = pieces(operation, body)
    assert (piece.status, piece.media, piece.usage) == (400, "json", TokenUsage())
    error = json.loads(piece.body)["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
IGNORED: dict[str, Any] = {
    "tools": [TOOL],
    "tool_choice": "required",
    "response_format": {"type": "json_object"},
    "structured_outputs": {"json": {}},
    "logprobs": True,
    "top_logprobs": 2,
    "prompt_logprobs": 0,
    "logit_bias": {"5": 1},
    "echo": True,
    "reasoning_effort": "high",
    "a_field_of_a_later_release": 1,
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("field", IGNORED)
def test_a_field_that_is_ignored_is_named_in_the_answer(field: str, stream: bool) -> None:
    body = HELLO | {"max_tokens": 3, "stream": stream, field: IGNORED[field]}
    reported = events(pieces(Operation.CHAT, body)) if stream else [document(Operation.CHAT, body)]
    assert [one["warnings"] for one in reported if "warnings" in one] == [[f"the simulated engine ignores {field}"]]
    assert reported[-1]["choices"][0]["finish_reason"] == "length"


def test_what_asks_for_nothing_or_has_its_effect_is_no_warning() -> None:
    nothing = dict.fromkeys(IGNORED) | {"tools": [], "tool_choice": "auto", "logprobs": False}
    quiet = {"temperature": 0, "top_p": 1, "seed": 5, "user": "u", "stop": "zzz", "ignore_eos": True, "n": 2}
    reported = document(
        Operation.CHAT, HELLO | {"max_tokens": 3} | nothing | quiet | {"response_format": {"type": "text"}}
    )
    assert "warnings" not in reported
    assert {"tools", "response_format", "logprobs"} <= FORWARDED - QUIET
    assert QUIET <= FORWARDED, "a name that no client can send"


def test_an_over_long_prompt_is_refused_and_the_longest_is_not() -> None:
    (piece,) = pieces(Operation.COMPLETION, {"prompt": "a " * 20, "stream": True}, max_model_len=20)
    assert piece.status == 400
    assert json.loads(piece.body)["error"]["code"] == "context_length_exceeded"
    assert document(Operation.COMPLETION, {"prompt": "a " * 19}, max_model_len=20)["usage"]["completion_tokens"] == 1


def stop_token_by_token(text: str, stops: list[str]) -> tuple[int, int] | None:
    """The same by the book: look for a stop string after every token."""
    for tokens in range(1, len(text) // TOKEN_CHARS + 1):
        for end in range((tokens - 1) * TOKEN_CHARS + 1, tokens * TOKEN_CHARS + 1):
            begun = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
            if begun:
                return tokens, min(begun)
    return None


@settings(max_examples=examples(300), deadline=None)
@given(seed=st.integers(), data=st.data())
def test_stop_strings_end_the_text_where_a_search_after_every_token_would(seed: int, data: st.DataObject) -> None:
    key = text_key(seed, 0, "prompt")
    text = text_of(key, 0, 30)
    part = st.tuples(st.integers(0, 149), st.integers(1, 12)).map(lambda at: text[at[0] : at[0] + at[1]])
    stops = data.draw(st.lists(st.one_of(part, st.text("bako ", min_size=1, max_size=4)), min_size=1, max_size=4))
    assert first_stop(key, 30, stops) == stop_token_by_token(text, stops)


def test_usage_after_a_stop_counts_the_tokens_made() -> None:
    text = document(Operation.CHAT, HELLO | {"max_tokens": 30})["choices"][0]["message"]["content"]
    stop = text[42:52]  # spans three tokens
    cut = document(Operation.CHAT, HELLO | {"max_tokens": 30, "stop": stop})
    assert cut["choices"][0]["message"]["content"] == text[:42]
    assert cut["choices"][0]["finish_reason"] == "stop"
    assert cut["usage"]["completion_tokens"] == 11


def test_another_seed_says_something_else() -> None:
    first = document(Operation.CHAT, HELLO | {"max_tokens": 9})
    second = document(Operation.CHAT, HELLO | {"max_tokens": 9}, simulated={"seed": 1})
    assert first["choices"][0]["message"] != second["choices"][0]["message"]


@given(text=st.text())
def test_any_text_survives_tokenize_and_detokenize(text: str) -> None:
    tokenizer = WordTokenizer()
    ids = tokenizer.encode(text)
    assert len(ids) == count_tokens(text)
    assert tokenizer.decode(ids) == text


def test_tokenize_and_detokenize_routes() -> None:
    async def there_and_back(engine: SimulatedEngine, time: MadeUpTime, info: EngineInfo) -> None:
        reported = [p async for p in engine.run(submit(Operation.TOKENIZE, {"prompt": "one  two "}))]
        answer = json.loads(reported[0].body)
        assert (answer["count"], answer["max_model_len"]) == (2, info.max_model_len)
        reported = [p async for p in engine.run(submit(Operation.DETOKENIZE, {"tokens": [*answer["tokens"], 1]}))]
        assert json.loads(reported[0].body) == {"prompt": "one  two \N{REPLACEMENT CHARACTER}"}
        assert engine.load().steps == 0
        reported = [p async for p in engine.run(submit(Operation.TOKENIZE, HELLO))]
        assert json.loads(reported[0].body)["count"] == 3  # as many as a chat of it counts

    run(there_and_back)


def test_scores_are_the_cosines_of_embeddings() -> None:
    texts = ["one two", "three", "three"]
    vectors = [row["embedding"] for row in document(Operation.EMBEDDING, {"input": texts}, task="embed")["data"]]
    cosines = [sum(a * b for a, b in zip(vectors[0], vector, strict=True)) for vector in vectors]
    reported = document(Operation.SCORE, {"queries": texts[0], "documents": texts}, task="embed")
    assert [(row["index"], row["object"]) for row in reported["data"]] == [(0, "score"), (1, "score"), (2, "score")]
    assert [row["score"] for row in reported["data"]] == pytest.approx(cosines)
    assert reported["usage"] == {"prompt_tokens": 6, "total_tokens": 6}
    pairs = document(Operation.SCORE, {"text_1": texts[:2], "text_2": texts[1:]}, task="embed")
    assert [row["score"] for row in pairs["data"]] == pytest.approx([cosines[1], 1.0])


@pytest.mark.parametrize(("top_n", "count"), [(0, 3), (2, 2), (9, 3)])
def test_a_rerank_gives_the_best_documents_the_best_first(top_n: int, count: int) -> None:
    body = {"query": "one", "documents": ["two", "one", "three"], "top_n": top_n}
    reported = document(Operation.RERANK, body, task="embed")
    scores = [row["relevance_score"] for row in reported["results"]]
    assert scores == sorted(scores, reverse=True)
    assert len(scores) == count
    first = {"index": 1, "document": {"text": "one", "multi_modal": None}, "relevance_score": pytest.approx(1.0)}
    assert reported["results"][0] == first
    assert reported["usage"] == {"prompt_tokens": 4, "total_tokens": 4}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ({"query": "a", "documents": ["b"], "top_n": None}, "top_n"),
        ({"query": "a", "documents": ["b"], "top_n": True}, "top_n"),
        ({"query": "", "documents": ["b"]}, "query"),
        ({"query": "a", "documents": ["b " * 21]}, "documents.0"),
        ({"query": "a", "documents": ["b", {"content": []}]}, "documents.1"),
        ({"query": "a"}, "documents"),
    ],
)
def test_a_rerank_that_cannot_be_answered_names_its_field(body: dict[str, Any], param: str) -> None:
    (piece,) = pieces(Operation.RERANK, body, task="embed", max_model_len=20)
    assert piece.status == 400
    assert json.loads(piece.body)["error"]["param"] == param


def test_embeddings_are_unit_vectors_in_both_encodings() -> None:
    body = {"input": ["one two", "three", "three"], "encoding_format": "float"}
    reported = CreateEmbeddingResponse.model_validate(document(Operation.EMBEDDING, body, task="embed"), strict=True)
    vectors = [row.embedding for row in reported.data]
    assert [sum(x * x for x in vector) for vector in vectors] == pytest.approx([1.0] * 3)
    assert vectors[1] == vectors[2] != vectors[0]
    assert reported.usage.prompt_tokens == 4
    packed = document(Operation.EMBEDDING, body | {"encoding_format": "base64"}, task="embed")
    raw = base64.b64decode(packed["data"][0]["embedding"])
    assert struct.unpack(f"<{len(raw) // 4}f", raw) == pytest.approx(vectors[0], abs=1e-6)
    (piece,) = pieces(Operation.CHAT, HELLO, task="embed")
    assert piece.status == 400
