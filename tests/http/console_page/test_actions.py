"""What an operator does in the console: signing in and out, dialogs before each change, the keyboard, the chat box; and
what the page says when it is cut off."""

from __future__ import annotations

import re

from playwright.sync_api import Page, expect

from tests.fakes.console_server import NEW_KEY, OPERATOR, TENANT, ConsoleServer
from tests.http.console_page.browser import PHONE, Visitor, focused, part, row, show
from tests.waiting import wait_until

CALL_S = 10.0  # until the endpoint has a call
DIALOG = "dialog"


def test_a_key_is_asked_for_once_and_kept_nowhere(visitor: Visitor) -> None:
    page = visitor.open()
    expect(page.get_by_label("Key")).to_be_focused()
    page.keyboard.type(OPERATOR)
    page.keyboard.press("Enter")
    expect(page.locator(".vitals")).to_be_visible()
    page.reload()
    expect(page.locator(".vitals")).to_be_visible()
    kept = page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])")
    assert OPERATOR not in kept
    assert "cookie-" not in kept, "the cookie is for the server alone"


def test_signing_in_says_plainly_what_is_wrong(visitor: Visitor) -> None:
    page = visitor.open()
    enter = page.get_by_role("button", name="Sign in")
    enter.click()
    expect(page.get_by_role("alert")).to_have_text("Enter a key.")
    page.get_by_label("Key").fill("sk-wrong-0123456789")
    enter.click()
    expect(page.get_by_role("alert")).to_have_text("No such key, or it is revoked or expired.")
    expect(page.get_by_label("Key")).to_be_focused()
    visitor.endpoint.is_away = True
    enter.click()
    expect(page.get_by_role("alert")).to_have_text("The endpoint does not answer. Is serve-app running?")


def test_signing_out_ends_the_session_and_a_tenant_may_come_next(visitor: Visitor) -> None:
    page = visitor.enter(tenant=None)
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_role("status").first).to_contain_text("You are signed out.")
    assert visitor.endpoint.sessions == {}
    page.get_by_label("Key").fill(TENANT)
    page.keyboard.press("Enter")
    expect(page.locator(".who")).to_have_text("product-backend (tenant product)")


def test_a_revoked_key_is_signed_out_with_the_reason(operator: Page, endpoint: ConsoleServer) -> None:
    endpoint.sessions.clear()
    expect(operator.get_by_text("Signed out: the session has ended, or its key was revoked.")).to_be_visible()


def test_a_live_view_that_stops_says_how_old_it_is(own_visitor: Visitor, endpoint: ConsoleServer) -> None:
    own_visitor.page.clock.install()
    page = own_visitor.enter(tenant=None)
    expect(page.locator(".freshness")).to_have_text("Live")
    endpoint.is_live_silent = True
    page.clock.fast_forward(8_000)
    expect(page.locator(".freshness")).to_have_text(re.compile(r"^Last update \d+ s ago$"))
    expect(page.locator(".frame")).to_have_class(re.compile("stale"))
    endpoint.is_live_silent = False
    expect(page.locator(".freshness")).to_have_text("Live")


def test_an_endpoint_that_is_away_is_named_and_found_again(operator: Page, endpoint: ConsoleServer) -> None:
    endpoint.is_away = True
    expect(operator.locator(".freshness")).to_contain_text("Endpoint does not answer · last update")
    operator.set_viewport_size(PHONE)
    assert operator.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    expect(part(operator, "Who waits, and why")).to_be_visible()
    endpoint.is_away = False
    expect(operator.locator(".freshness")).to_have_text("Live")


def test_a_key_is_made_and_shown_once(operator: Page, endpoint: ConsoleServer) -> None:
    show(operator, "keys")
    operator.get_by_role("button", name="Make a key…").click()
    dialog = operator.locator(DIALOG)
    expect(dialog.get_by_label("Name")).to_be_focused()
    dialog.get_by_role("button", name="Make the key").click()
    expect(dialog.get_by_role("alert")).to_have_text("Name: enter one.")
    dialog.get_by_label("Name").fill("ci")
    dialog.get_by_label("Tenant").fill("search")
    dialog.get_by_label("Models").fill("chat-70b, embed")
    dialog.get_by_label("Tokens a minute").fill("9000")
    dialog.get_by_label("Name").press("Enter")
    expect(dialog.get_by_role("heading")).to_have_text("The key of ci")
    expect(dialog.locator(".secret")).to_have_text(NEW_KEY)
    dialog.get_by_role("button", name="Copy").click()
    expect(dialog.get_by_role("status")).to_have_text(re.compile("Copied|Selected"))
    dialog.get_by_role("button", name="I have stored it").click()
    expect(row(operator, "9,000 tokens a minute")).to_contain_text("ci")
    expect(dialog).to_have_count(0)
    assert NEW_KEY not in operator.content()
    wanted = {"name": "ci", "tenant": "search", "max_class": "high", "admin": False, "metrics": False}
    assert endpoint.calls == [
        ("POST", "/admin/keys", wanted | {"models": ["chat-70b", "embed"], "limits": {"tokens_per_minute": 9000}})
    ]


def test_a_refused_field_keeps_the_dialog_and_gets_the_focus(operator: Page) -> None:
    show(operator, "keys")
    operator.get_by_role("button", name="Make a key…").click()
    dialog = operator.locator(DIALOG)
    dialog.get_by_label("Name").fill("n" * 41)
    dialog.get_by_role("button", name="Make the key").click()
    expect(dialog.get_by_role("alert")).to_have_text("`name` is too long")
    expect(dialog.get_by_label("Name")).to_be_focused()


def test_limits_are_changed_and_a_key_is_rotated_and_revoked(operator: Page, endpoint: ConsoleServer) -> None:
    show(operator, "keys")
    dialog = operator.locator(DIALOG)
    operator.get_by_role("button", name="Limits of product-backend…").click()
    expect(dialog).to_contain_text("All keys of product together: 40,000,000 tokens a day.")
    dialog.get_by_label("Requests a minute").fill("")
    dialog.get_by_label("Requests at once").fill("8")
    dialog.get_by_role("button", name="Set the limits").click()
    expect(row(operator, "product-backend")).to_contain_text("8 requests at once")
    expect(row(operator, "product-backend")).not_to_contain_text("requests a minute")
    operator.get_by_role("button", name="Rotate search-api…").click()
    dialog.get_by_role("button", name="Rotate").click()
    expect(dialog.locator(".secret")).to_have_text(NEW_KEY)
    dialog.get_by_role("button", name="I have stored it").click()
    operator.get_by_role("button", name="Revoke night-batch…").click()
    expect(dialog.get_by_role("button", name="Cancel")).to_be_focused()
    dialog.get_by_role("button", name="Revoke").click()
    expect(row(operator, "night-batch")).to_contain_text("revoked")
    assert [call[:2] for call in endpoint.calls] == [
        ("POST", "/admin/keys/key_1"), ("POST", "/admin/keys/key_2/rotate"), ("DELETE", "/admin/keys/key_3"),
    ]  # fmt: skip
    assert endpoint.calls[0][2]["limits"]["requests_per_minute"] is None
    assert endpoint.calls[1][2] == {"grace_s": 86_400}


def test_a_drain_is_asked_for_twice_and_followed_to_its_end(operator: Page, endpoint: ConsoleServer) -> None:
    show(operator, "memory")
    operator.get_by_role("button", name="Drain x7k2m9qp…").click()
    dialog = operator.locator(DIALOG)
    expect(dialog).to_contain_text("x7k2m9qp (chat-70b)")
    dialog.get_by_role("button", name="Cancel").click()
    expect(dialog).to_have_count(0)
    assert endpoint.calls == []
    operator.get_by_role("button", name="Drain x7k2m9qp…").click()
    dialog.get_by_label("Move what still runs after").fill("30")
    dialog.get_by_role("button", name="Drain", exact=True).click()
    followed = part(operator, "Drains")
    expect(followed).to_contain_text("x7k2m9qp: 30.0 s left, 3 running")
    endpoint.have_drains_ended = True
    expect(followed).to_contain_text("x7k2m9qp: ended, 0 running, 2 finished, 1 moved")
    assert endpoint.calls == [("POST", "/admin/drains", {"name": "x7k2m9qp", "within_s": 30})]


def test_a_node_that_cannot_be_drained_is_explained_in_the_dialog(operator: Page) -> None:
    show(operator, "memory")
    operator.get_by_role("button", name="Drain node 10.0.0.11…").click()
    dialog = operator.locator(DIALOG)
    expect(dialog.get_by_role("listitem")).to_have_text(
        ["x7k2m9qp (chat-70b)", "b3n8d5wz (chat-70b)", "e2f5j8ln (embed)"]
    )
    dialog.get_by_role("button", name="Drain", exact=True).click()
    expect(dialog.get_by_role("alert")).to_have_text("10.0.0.11 is the head, which cannot be drained")


def test_a_defragmentation_says_what_restarts_and_begins_behind_a_dialog(
    operator: Page, endpoint: ConsoleServer
) -> None:
    show(operator, "memory", "Plan: one move makes room for chat-70b")
    operator.get_by_role("button", name="Defragment…").click()
    dialog = operator.locator(DIALOG)
    expect(dialog.get_by_role("listitem")).to_have_text(
        "e2f5j8ln of embed restarts: 10.0.0.11/2 → 10.0.0.12/1, 14.0 GB to load"
    )
    assert endpoint.calls == []
    dialog.get_by_role("button", name="Defragment").click()
    expect(part(operator, "Drains")).to_contain_text("e2f5j8ln (embed)")
    assert endpoint.calls == [("POST", "/admin/defrag", {})]


def test_a_batch_is_cancelled_behind_a_dialog(operator: Page, endpoint: ConsoleServer) -> None:
    show(operator, "batches")
    operator.get_by_role("button", name="Cancel batch_19be44c0…").click()
    dialog = operator.locator(DIALOG)
    expect(dialog).to_contain_text("610 of 4,000 rows have an answer and keep it.")
    dialog.get_by_role("button", name="Cancel the batch").click()
    expect(dialog).to_have_count(0)
    assert endpoint.calls == [("POST", "/v1/batches/batch_19be44c0/cancel", {})]


def test_escape_leaves_a_dialog_and_gives_the_focus_back(operator: Page, endpoint: ConsoleServer) -> None:
    show(operator, "keys")
    opener = operator.get_by_role("button", name="Revoke night-batch…")
    opener.focus()
    operator.keyboard.press("Enter")
    expect(operator.locator(DIALOG)).to_be_visible()
    operator.keyboard.press("Tab")
    assert focused(operator) == "Revoke"
    operator.keyboard.press("Escape")
    expect(operator.locator(DIALOG)).to_have_count(0)
    expect(opener).to_be_focused()
    assert endpoint.calls == []


def test_every_page_is_reached_by_keyboard_with_a_focus_that_is_seen(operator: Page) -> None:
    operator.keyboard.press("Tab")
    assert focused(operator) == "To the content"
    operator.keyboard.press("Enter")
    expect(operator.locator("main")).to_be_focused()
    operator.get_by_role("link", name="Overview").focus()
    operator.keyboard.press("Tab")
    assert focused(operator) == "GPU memory"
    assert operator.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    operator.keyboard.press("Enter")
    expect(operator.get_by_role("heading", level=1)).to_have_text("GPU memory")
    expect(operator.locator("main")).to_be_focused()
    expect(operator.get_by_role("link", name="GPU memory")).to_have_attribute("aria-current", "page")


def test_a_choice_on_a_page_keeps_the_focus(operator: Page) -> None:
    show(operator, "history")
    operator.get_by_role("link", name="By model").focus()
    operator.keyboard.press("Enter")
    expect(operator.get_by_role("link", name="By model")).to_have_attribute("aria-current", "true")
    expect(operator.get_by_role("link", name="By model")).to_be_focused()


def test_the_focus_stays_while_the_live_view_changes(operator: Page, endpoint: ConsoleServer) -> None:
    link = part(operator, "Who waits, and why").get_by_role("link", name="night")
    link.focus()
    endpoint.missing = ["store"]
    expect(operator.locator("main")).to_contain_text("No answer from store.")
    expect(link).to_be_focused()


def test_the_menu_of_a_phone_opens_closes_and_leads_on(visitor: Visitor) -> None:
    visitor.page.set_viewport_size(PHONE)
    page = visitor.enter(tenant=None)
    menu = page.get_by_role("navigation", name="Pages")
    expect(menu).to_be_hidden()
    button = page.get_by_role("button", name="Menu")
    button.click()
    expect(button).to_have_attribute("aria-expanded", "true")
    page.keyboard.press("Escape")
    expect(menu).to_be_hidden()
    expect(button).to_be_focused()
    button.click()
    menu.get_by_role("link", name="History").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("History")
    expect(menu).to_be_hidden()


def test_the_theme_follows_the_system_until_it_is_chosen_and_stays_chosen(operator: Page) -> None:
    theme = "document.documentElement.dataset.theme"
    operator.emulate_media(color_scheme="dark")
    operator.wait_for_function(f"{theme} === 'dark'")
    operator.get_by_role("button", name="Theme: auto").click()
    expect(operator.get_by_role("button", name="Theme: light")).to_be_visible()
    assert operator.evaluate(theme) == "light"
    operator.reload()
    expect(operator.get_by_role("button", name="Theme: light")).to_be_visible()
    assert operator.evaluate("JSON.stringify({...localStorage})") == '{"serve_app_theme":"light"}'


def test_a_chat_shows_its_wait_its_answer_and_its_receipt(operator: Page, endpoint: ConsoleServer) -> None:
    endpoint.chat_gate.clear()
    show(operator, "chat")
    operator.get_by_label("Class").select_option("high")
    operator.get_by_label("Message").fill("Why?")
    operator.get_by_label("Message").press("Enter")
    answer = operator.get_by_role("article", name="Answer")
    expect(answer).to_contain_text("waits at place 2, starts in about 400 ms")
    endpoint.chat_gate.set()
    expect(answer).to_contain_text(re.compile(r"It waited for a slot.answered · first token after \d+ ms"))
    assert endpoint.calls[0][2]["priority"] == "high"
    answer.get_by_role("link", name="why it took so long").click()
    expect(part(operator, "Where the time went")).to_be_visible()


def test_a_chat_is_stopped_and_a_refusal_is_shown(operator: Page, endpoint: ConsoleServer) -> None:
    show(operator, "chat")
    message = operator.get_by_label("Message")
    message.fill("refuse")
    message.press("Enter")
    expect(operator.get_by_role("alert")).to_have_text("the queue is full")
    message.fill("endless")
    message.press("Enter")
    answers = operator.get_by_role("article", name="Answer")
    expect(answers.nth(1)).to_contain_text("waited")
    operator.get_by_role("button", name="Stop").click()
    expect(answers.nth(1)).to_contain_text("stopped")
    wait_until(lambda: len(endpoint.calls), CALL_S, "calls of the chat", wanted=2)
    assert [turn["role"] for turn in endpoint.calls[1][2]["messages"]] == ["user", "user"]
