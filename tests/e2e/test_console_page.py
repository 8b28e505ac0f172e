"""The console's page on a real stack, in Chromium: signing in, what waits while it waits, why it waited, and a chat."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.e2e.consoles import PAGE_S, enter, page_of, show
from tests.e2e.half_closed import send
from tests.e2e.observe import Observer
from tests.e2e.stack import BATCH_KEY, PEOPLE_KEY, SIMULATED_SLOTS, TINY, Stack
from tests.waiting import patient, wait_until

LONG_TOKENS = 8000  # 40 s of the simulated engine


@pytest.fixture
def page(stack: Stack) -> Iterator[Page]:
    with page_of(stack) as opened:
        yield opened


def test_every_page_of_an_operator_has_an_answer_of_the_real_endpoint(stack: Stack, page: Page) -> None:
    stack.post("/v1/completions", {"model": TINY, "prompt": "a", "max_tokens": 2})
    enter(page, PEOPLE_KEY)
    for name in ("overview", "memory", "requests", "history", "events", "usage", "batches", "keys", "audit", "logs"):
        show(page, name)
        expect(page.locator("main h1")).to_have_count(1)
        expect(page.get_by_text("Loading…")).to_have_count(0)
        expect(page.get_by_role("alert")).to_have_count(0)


def test_what_waits_is_shown_while_it_waits_and_a_request_says_where_its_time_went(
    stack: Stack, observer: Observer, simulated: str, page: Page
) -> None:
    enter(page, PEOPLE_KEY)
    small = {"model": simulated, "prompt": "The river", "max_tokens": 4, "stream": True}
    with send(stack, "/v1/completions", small | {"max_tokens": LONG_TOKENS, "n": SIMULATED_SLOTS}):
        wait_until(lambda: observer.granted(simulated), patient(PAGE_S), "slots granted", wanted=SIMULATED_SLOTS)
        with send(stack, "/v1/completions", small):
            queues = page.get_by_role("region", name="Who waits, and why")
            expect(queues.get_by_role("row").filter(has_text=simulated)).to_be_visible()
    show(page, "requests")
    page.get_by_role("row").filter(has_text=simulated).first.get_by_role("link").click()
    expect(page.locator(".verdict")).to_contain_text(re.compile("cancelled.*(Model|Router|Neither)"))
    expect(page.get_by_role("region", name="Where the time went")).to_be_visible()


def test_a_chat_waits_answers_and_has_a_receipt(stack: Stack, page: Page) -> None:
    enter(page, PEOPLE_KEY)
    show(page, "chat")
    page.get_by_label("Model").select_option(TINY)
    page.get_by_label("Message").fill("What is serve-app?")
    page.get_by_label("Message").press("Enter")
    answer = page.get_by_role("article", name="Answer")
    expect(answer).to_contain_text("answered · first token after")
    answer.get_by_role("link").click()
    expect(page.get_by_role("region", name="Where the time went")).to_be_visible()


def test_a_tenant_s_key_sees_its_own_part(stack: Stack, page: Page, batch_key: str) -> None:
    assert batch_key == BATCH_KEY
    enter(page, batch_key)
    expect(page.get_by_role("link", name="Keys")).to_have_count(0)
    show(page, "requests")
    expect(page.locator("main")).not_to_contain_text("people")
