"""What a client assembles of a stream that two engines made is what one engine would have given it."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from serve_app.errors import EngineFailed
from serve_app.transport import NOT_CONTINUABLE
from tests.e2e import continued_streams, continued_table
from tests.e2e.assembled import answer_of, assembled, assert_continued
from tests.e2e.continuations import found
from tests.e2e.continued_streams import CUTS
from tests.e2e.ended_core import ASKED
from tests.requires import ROOT, requires

requires("vllm")

EXACT = continued_streams.exact()
PAGE = ROOT / "docs/explanation/continuity.md"
WRONG = [
    "too_few_events", "too_many_events", "no_groups", "unknown_tokens", "unknown_choice", "empty_group",
    "against_the_grammar", "beyond_the_end", "no_stream",
]  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_a_continued_stream_is_the_undisturbed_one(name: str) -> None:
    assert_continued(name, found()["cut"][name])


def test_the_scenarios_are_what_they_are_called() -> None:
    """Else they would be equal for no reason."""
    answers = {name: answer_of(name, found()["cut"][name]["undisturbed"]["text"]) for name in EXACT}
    signs = answers["chat_characters"]["choices"][0]
    assert len(signs["logprobs"]["content"]) > len(signs["delta"]["content"]) == 9
    calls = answers["chat_tool"]["choices"][0]["delta"]["tool_calls"].values()
    assert {call["function"]["name"] for call in calls} == {"weather"}
    assert all(call["function"]["arguments"].startswith('{"city"') for call in calls)
    for choice in answers["chat_schema_pair"]["choices"].values():
        assert json.loads(choice["delta"]["content"])["city"]
    assert answers["completion_stop"]["choices"][0]["finish_reason"] == "stop"
    assert answers["completion_stop"]["choices"][0]["stop_reason"]
    first, second = answers["chat_seeded_pair"]["choices"].values()
    assert first["delta"]["content"] != second["delta"]["content"]
    assert len(answers["completion_prompts"]["choices"]) == 6
    plain, penalized = (answers[name]["choices"][0]["delta"]["content"] for name in ("chat", "chat_penalties"))
    assert plain != penalized
    assert answers["chat_tool_cached"]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert found()["cut"]["responses_tool"]["undisturbed"]["usage"][2] > 0
    (written,) = answers["responses_schema"]["deltas"].values()
    assert written.startswith('{"city"')
    stored, plain = (found()["cut"][name]["undisturbed"]["usage"][0] for name in ("responses_stored", "responses"))
    assert stored > plain
    assert answers["messages"]["stop_reason"] == "max_tokens"
    (block,) = answers["messages"]["content"]
    assert block["deltas"] == answers["chat"]["choices"][0]["delta"]["content"]
    assert answers["messages_schema"]["content"][0]["deltas"].startswith('{"city"')
    (call,) = (block for block in answers["messages_tool"]["content"] if block["type"] == "tool_use")
    assert call["name"] == "weather"
    assert call["deltas"].startswith('{"city"')
    (begun,) = answers["messages_begun"]["content"]
    assert begun["deltas"] != block["deltas"]
    assert answers["messages_stop"]["stop_reason"] == "stop_sequence"
    assert answers["messages_stop"]["stop_sequence"]


@pytest.mark.parametrize("name", continued_streams.INEXACT)
def test_what_cannot_be_continued_exactly_is_not(name: str) -> None:
    undisturbed = found()["cut"][name]["undisturbed"]
    cuts = found()["cut"][name]["cuts"]
    assert undisturbed["failure"] == ""
    assert len(set(found()["cut"][name]["places"])) == len(cuts) == CUTS
    assert [cut["failure"] for cut in cuts] == [NOT_CONTINUABLE] * len(cuts)
    assert all(cut["status"] == [] for cut in cuts)


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_gives_no_byte(name: str) -> None:
    assert found()["cut"][name]["failure"] == NOT_CONTINUABLE
    assert found()["cut"][name]["status"] == []


@pytest.mark.parametrize("name", ASKED)
def test_an_answer_that_ends_with_sigterm_to_its_engine_core_is_a_loss(name: str) -> None:
    """vLLM ends it as if it were whole, with finish reason `abort`."""
    ended = found()["ended"][name]
    assert ended["failure"] == EngineFailed.code
    assert "abort" not in ended["text"]
    assert "[DONE]" not in ended["text"]
    assert "response.completed" not in ended["text"]
    assert "message_stop" not in ended["text"]
    assert not ended["text"].startswith("{")


def test_the_documented_table_has_every_scenario() -> None:
    """Each is cut so often, and once more in what the second engine made."""
    cuts = Counter(continued_table.cell_of(name) for name in continued_table.exact() for _ in range(CUTS + 1))
    assert "\n".join(continued_table.table(cuts, cuts)) in PAGE.read_text()


def test_an_engine_goes_on_after_requests_that_do_not_fit() -> None:
    assert found()["continues"] is True
    assert assembled(found()["cut"]["after"]["text"]) == assembled(found()["cut"]["first"]["text"])
