"""Tokens of an OpenID provider at three routers, beside keys: who is let in, as whom, and what is left of a request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.e2e.stack import Stack
from tests.e2e.three import EMBED, MODEL, all_routers
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.fakes.openid_provider import OpenIdProvider

REPORTED_S = 20.0  # a report takes a second and some milliseconds; the rest is for a busy machine
FOUND_S = 40.0  # for keys that the provider has made: an unknown one starts a reading once in 30 s


@pytest.fixture
def other() -> Iterator[OpenIdProvider]:
    """Another provider, with the same claims and the same key ids."""
    from tests.fakes import openid_provider

    with openid_provider.serving() as running:
        yield running


def completed(target: Stack, token: str, model: str = MODEL) -> tuple[int, str]:
    """The status of a completion, and its request id or the code of its error."""
    body = {"model": model, "prompt": "The river", "max_tokens": 2}
    answer = target.post("/v1/completions", body, headers=target.headers(token))
    code = answer.json().get("error", {}).get("code")
    return answer.status_code, str(code or answer.headers["x-serve-app-request-id"])


def test_every_router_serves_a_token_as_its_claims_say(three: Stack, provider: OpenIdProvider) -> None:
    token = provider.token_of("agent")
    for router in all_routers(three):
        status, request_id = completed(router, token)
        assert status == 200
        receipt = three.get(f"/admin/requests/{request_id}", headers=three.headers(token)).json()
        assert (receipt["tenant"], receipt["key_id"], receipt["outcome"]) == ("research", "jwt:agent", "ok")
        assert completed(router, token, EMBED) == (403, "model_not_allowed")
        assert completed(router, three.api_key)[0] == 200, "a key beside the tokens"
        assert router.get("/admin/quota", headers=three.headers(token)).status_code == 403
        assert router.get("/admin/quota", headers=three.headers(provider.token_of("operator"))).status_code == 200


def test_the_use_of_a_token_stands_under_its_subject(three: Stack, provider: OpenIdProvider) -> None:
    token = provider.token_of("operator")  # no other test has requests of it

    def requests() -> int:
        answer = three.get("/admin/usage?by=key", headers=three.headers(token))
        assert answer.status_code == 200, answer.text
        return sum(row["requests"] for row in answer.json()["data"] if row["key"] == "jwt:operator")

    before = requests()
    assert completed(three, token)[0] == 200
    wait_until(requests, REPORTED_S, "its use", wanted=before + 1)


def test_no_router_lets_in_a_token_of_another_provider(three: Stack, other: OpenIdProvider) -> None:
    for router in all_routers(three):
        assert completed(router, other.token_of("operator")) == (401, "invalid_token")


def test_after_a_rotation_each_router_lets_in_new_tokens_and_no_old_ones(
    three: Stack, provider: OpenIdProvider
) -> None:
    old = provider.token_of("agent")
    provider.rotate()
    new = provider.token_of("agent")
    for router in all_routers(three):
        wait_until(lambda router=router: completed(router, new)[0], FOUND_S, "its key is known", wanted=200)
        assert completed(router, old)[0] == 401
