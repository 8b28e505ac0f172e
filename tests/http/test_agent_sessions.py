"""The sessions that coding agents name by themselves count as `X-Session-Id`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serve_app.http.agent_sessions import AGENT_HEADERS, MAX_SESSION_ID_CHARS, MAX_USER_ID_CHARS, agent_session
from tests.fakes.asgi_client import CHAT, Client, ask
from tests.fakes.engines import MODEL, FakeCluster
from tests.http.test_app_receipts import check, receipts

ID = "2154a206-7c69-4b90-89da-79b22ff2afb5"
# As Claude Code 2.1.332 sends it, and as its versions did before 2.1.
USER_IDS = [
    json.dumps({"device_id": "6598", "account_uuid": "", "session_id": ID}),
    f"user_6598_account__session_{ID}",
]


def of_user(user_id: Any) -> str | None:
    return agent_session({}, {"metadata": {"user_id": user_id}})


@pytest.mark.parametrize("header", AGENT_HEADERS)
def test_an_agent_s_header_names_its_session(header: bytes) -> None:
    assert agent_session({header: ID.encode()}, {}) == ID


@pytest.mark.parametrize("user_id", USER_IDS)
def test_the_user_of_claude_code_names_its_session(user_id: str) -> None:
    assert of_user(user_id) == ID


@pytest.mark.parametrize("value", ["", " ", "two words", "é", "x" * (MAX_SESSION_ID_CHARS + 1)])
def test_what_is_no_id_counts_as_not_sent(value: str) -> None:
    headers = dict.fromkeys(AGENT_HEADERS, value.encode("latin-1"))
    assert agent_session(headers, {}) is None
    assert agent_session(headers, {"metadata": {"user_id": USER_IDS[0]}}) == ID
    assert of_user(json.dumps({"session_id": value})) is None


@pytest.mark.parametrize(
    "user_id",
    ["somebody", "", "{", "[]", "7", "null", '{"session_id": 7}', 7, None, [ID], "[" * MAX_USER_ID_CHARS,
     f"{'u' * MAX_USER_ID_CHARS}_session_{ID}"],
)  # fmt: skip
def test_another_user_id_names_no_session(user_id: Any) -> None:
    assert of_user(user_id) is None


@pytest.mark.parametrize("metadata", [None, [], "text", {}])
def test_metadata_of_another_shape_name_no_session(metadata: Any) -> None:
    assert agent_session({}, {"metadata": metadata}) is None


def test_a_receipt_has_the_session_and_the_client_s_own_header_comes_first() -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        await client.post(ask("a b"), headers={"Session-Id": "of-codex"})
        await client.post(ask("a b"), headers={"Session-Id": "of-codex", "X-Session-Id": "mine"})
        await client.post(ask("a b"))
        asked = {"max_tokens": 3, "messages": [{"role": "user", "content": "hi"}]}
        message = {"model": MODEL, "metadata": {"user_id": USER_IDS[0]}, **asked}
        await client.post(message, path="/v1/messages")
        await client.post({"model": MODEL, **asked}, path=CHAT, headers={"X-Session-Id": "no id"})
        found = receipts(client)
        assert [one.session_id for one in found] == ["of-codex", "mine", None, ID, None]
        shown = json.loads((await client.get(f"/admin/requests/{found[0].request_id}")).body)
        assert shown["session_id"] == "of-codex"
        assert "the home of its session or prefix (session of-codex)" in " ".join(shown["story"])

    check(scenario)
