"""Each page of the console shows the data of a loaded system, and each question of a night takes at most two clicks.

who waits and why                              the overview: no click
which tenant hogs                              the overview: no click; over time: History, By tenant
first token's p95 by class in the last hour    History
what does GPU memory do                        GPU memory
why did it scale                               Scaling and events, Scaling
what failed in the last ten minutes            the overview: no click; all of it: its figure `Failed, 10 min`
model or router?                               the overview's list of failures, one of its requests
"""

from __future__ import annotations

import re

from playwright.sync_api import Page, expect

from tests.fakes.console_data import EVIL
from tests.fakes.console_server import ConsoleServer
from tests.http.console_page.browser import part, row, show

TENANTS_PAGES = ["Overview", "Agent sessions", "Requests", "History", "Limits and use", "Batches", "Chat"]


def test_who_waits_and_why_is_on_the_first_page(operator: Page) -> None:
    queues = part(operator, "Who waits, and why")
    expect(queues.get_by_role("row").nth(1)).to_contain_text(
        re.compile("high.*product.*chat-70b.*3.*900 ms.*no free slot")
    )
    expect(row(operator, "night").first).to_contain_text(
        re.compile("24.*slots kept for higher classes, 7.*no free slot")
    )


def test_the_tenant_that_hogs_is_first_on_the_first_page_and_over_time_in_two_clicks(operator: Page) -> None:
    busiest = part(operator, "Busiest tenants, 10 min")
    expect(busiest.get_by_role("row").nth(1)).to_contain_text(re.compile(r"product.*\d\d%"))
    operator.get_by_role("link", name="History").click()
    operator.get_by_role("link", name="By tenant").click()
    expect(operator.get_by_role("figure").nth(3).get_by_role("rowheader").first).to_have_text("night")


def test_the_first_token_of_the_last_hour_by_class_takes_one_click(operator: Page) -> None:
    operator.get_by_role("link", name="History").click()
    chart = operator.get_by_role("figure", name="First token, p95")
    expect(chart.get_by_role("row").nth(4)).to_contain_text(re.compile(r"low.*\d+\.\d s.*\d+ ?s"))
    expect(chart.get_by_role("img", name=re.compile("First token, p95: critical, high, normal, low"))).to_be_visible()


def test_gpu_memory_takes_one_click(operator: Page) -> None:
    operator.get_by_role("link", name="GPU memory", exact=True).click()
    expect(operator.locator(".vitals")).to_contain_text(re.compile("Free135 GB.*Fragmentation41%"))
    device = operator.get_by_role("img", name=re.compile("^GPU 1: 60% used. code-32b 38.0 GB, code-32b 6.0 GB"))
    expect(device).to_be_visible()
    expect(part(operator, "Engines that wait for memory")).to_contain_text("at least 72.0 GB needed on one device")
    expect(operator.get_by_role("row").filter(has_text="agent-triage").first).to_contain_text(
        re.compile("session.*6.0 GB")
    )


def test_why_it_scaled_takes_two_clicks(operator: Page) -> None:
    operator.get_by_role("link", name="Scaling and events").click()
    operator.get_by_role("link", name="Scaling", exact=True).click()
    events = part(operator, "Events")
    expect(events.get_by_role("row").nth(2)).to_contain_text(
        "changed its target from 3 to 4 replicas: 31 requests wait at class low"
    )
    expect(events).not_to_contain_text("ejected")


def test_what_failed_in_ten_minutes_is_on_the_first_page_and_whole_in_one_click(operator: Page) -> None:
    expect(part(operator, "Failed lately").get_by_role("row")).to_have_count(3)
    operator.get_by_role("link", name="Failed, 10 min").click()
    expect(part(operator, "Failed by an engine or inside").get_by_role("row").nth(1)).to_contain_text("engine failed")


def test_model_or_router_takes_one_click_on_a_request(operator: Page) -> None:
    part(operator, "Failed lately").get_by_role("link").nth(1).click()
    expect(operator.locator(".verdict")).to_contain_text(
        re.compile(r"^engine failed Model: .*; 2 replicas were lost under it\.$")
    )


def test_the_page_of_a_request_says_why_it_waited_and_for_how_long_in_which_part(operator: Page) -> None:
    show(operator, "requests?slow=1", "The slowest")
    operator.get_by_role("row").nth(1).get_by_role("link").click()
    expect(operator.locator(".verdict")).to_have_text(
        "ok Model: it waited 61.0 s of 82.3 s, slots kept for higher classes."
    )
    parts = part(operator, "Where the time went").get_by_role("row")
    expect(parts.nth(1)).to_contain_text(re.compile("slots kept for higher classes.*model.*0 ms.*61.0 s.*74%"))
    expect(parts.nth(5)).to_contain_text(re.compile("the other tokens.*model.*74.9 s.*7.4 s.*9%"))
    expect(part(operator, "Why did this wait")).to_contain_text("23 requests of class high")


def test_a_request_without_a_receipt_is_explained(operator: Page) -> None:
    show(operator, "requests/nothing", "no request 'nothing' is known to this key")


def test_requests_are_found_by_id_and_by_tenant_class_and_outcome(operator: Page) -> None:
    show(operator, "requests")
    operator.get_by_label("Tenant").fill("night")
    operator.get_by_label("Outcome").select_option("refused")
    operator.get_by_role("button", name="Search").click()
    expect(part(operator, "The newest").get_by_role("row")).to_have_count(2)
    expect(row(operator, "queue_full")).to_contain_text("night")
    operator.get_by_label("Id of a request").fill("chatcmpl-slow0000000000000000000000000001")
    operator.get_by_label("Id of a request").press("Enter")
    expect(operator.get_by_role("heading", level=1)).to_have_text("chatcmpl-slow0000000000000000000000000001")
    expect(part(operator, "Where the time went")).to_be_visible()


def test_what_waits_now_is_listed_with_its_reason_the_oldest_first(operator: Page) -> None:
    show(operator, "requests?waiting=1")
    expect(part(operator, "Waiting now").get_by_role("row").nth(1)).to_contain_text(
        re.compile("74.0 s.*slots kept.*low.*night")
    )


def test_models_show_replicas_with_batch_and_kv_and_why_one_is_missing(operator: Page) -> None:
    models = part(operator, "Models")
    expect(models).to_contain_text("31 requests wait at class low, 3 replicas answer 3.4 requests/s: 4 replicas wanted")
    expect(models.get_by_role("meter", name="Batch of b3n8d5wz")).to_have_attribute("aria-valuetext", "64 / 64")
    expect(models.get_by_role("meter", name="KV cache of x7k2m9qp")).to_have_attribute("aria-valuenow", "91")
    expect(row(operator, "k8r3w7yd")).to_contain_text("draining")


def test_the_models_behind_a_name_show_what_is_set_what_ran_and_what_left_them(operator: Page) -> None:
    names = part(operator, "Names, last hour")
    rows = names.get_by_role("row")
    expect(rows).to_have_count(4)
    expect(rows.nth(1)).to_have_text(re.compile("chat.*chat-70b.*90%, fallback.*90%.*904.*2.*3"))
    expect(rows.nth(2)).to_have_text(re.compile("chat.*chat-70b-next.*10%.*10%.*96.*1.*8"))
    expect(rows.nth(3)).to_have_text(re.compile(r"chat.*code-32b.*shadow of 5%(.*\u2013){4}"))
    names.get_by_role("link", name="By name").click()
    expect(operator.get_by_role("figure").first).to_contain_text("chat")


def test_the_name_that_was_asked_for_stands_beside_the_model_that_ran(operator: Page) -> None:
    show(operator, "requests")
    operator.get_by_label("Name").select_option("chat")
    operator.get_by_role("button", name="Search").click()
    expect(part(operator, "The newest").get_by_role("row")).to_have_count(2)
    found = row(operator, "chat-70b-next as chat")
    found.get_by_role("link").first.click()
    facts = part(operator, "Facts")
    expect(facts).to_contain_text("Asked forchat")
    expect(facts).to_contain_text("chat-70b: queue full")
    show(operator, "usage?by=name", "chat-70b-next")
    expect(part(operator, "Use").get_by_role("row").nth(2)).to_have_text(re.compile("chat.*chat-70b-next"))


def test_what_does_not_answer_and_what_needs_attention_comes_first(operator: Page, endpoint: ConsoleServer) -> None:
    endpoint.missing = ["quota_actor", "router r2"]
    attention = part(operator, "What needs attention").get_by_role("listitem")
    expect(attention.first).to_have_text("No answer from quota actor.")
    expect(attention.nth(1)).to_have_text("No answer from router r2.")
    expect(attention.nth(2)).to_contain_text("chat-70b runs 3 of 4 replicas")


def test_an_idle_system_says_that_nothing_needs_attention(operator: Page, endpoint: ConsoleServer) -> None:
    endpoint.is_idle = True
    operator.reload()
    expect(operator.locator("main")).to_contain_text("Nothing needs attention.")
    expect(part(operator, "Who waits, and why")).to_contain_text("Nobody waits.")
    for address, text in [
        ("history", "Nothing in this time."), ("events", "No event fits."), ("requests", "No request fits."),
        ("batches", "No batch runs."), ("audit", "Nothing was changed"), ("logs", "No line fits."),
        ("usage", "Nothing was used"),
        ("requests?waiting=1", "No request waits."), ("memory", "No agent session is open."),
    ]:  # fmt: skip
        show(operator, address, text)


def test_use_and_limits_and_the_record_of_changes_and_logs_are_shown(operator: Page) -> None:
    show(operator, "usage")
    expect(row(operator, "product").first).to_contain_text(re.compile(r"8.3M.*48%.*9,000"))
    expect(row(operator, "product-backend")).to_contain_text("600 requests a minute, 900,000 tokens a minute")
    show(operator, "audit")
    expect(operator.get_by_role("row").nth(1)).to_contain_text(re.compile("drain.*k8r3w7yd.*key_0"))
    show(operator, "logs")
    expect(operator.locator(".lines .bad")).to_contain_text("The engine died")


def test_batches_of_all_tenants_show_their_progress(operator: Page) -> None:
    show(operator, "batches")
    expect(row(operator, "batch_7d21f0a4")).to_contain_text("78,422 / 120,000 rows, 65%")
    expect(row(operator, "batch_7d21f0a4")).to_contain_text("a key of night cancels it")
    expect(part(operator, "Ended")).to_contain_text("batch_5f88d1b2")


def test_names_of_tenants_are_text_wherever_they_stand(operator: Page, endpoint: ConsoleServer) -> None:
    expect(operator.locator("main")).to_contain_text("product")
    for address in ("requests", "keys", "usage"):
        show(operator, address, EVIL)
    assert operator.locator("img[src]").count() == 0
    assert operator.title() != "owned"


def test_a_tenant_s_key_sees_its_own_part_alone(tenant: Page) -> None:
    expect(tenant.get_by_role("navigation", name="Pages").get_by_role("link")).to_have_text(TENANTS_PAGES)
    expect(part(tenant, "Who waits, and why").get_by_role("row")).to_have_count(3)
    for others in ("night", "search", "10.0.0.11", "GPU memory free", "Busiest"):
        expect(tenant.locator("main")).not_to_contain_text(others)
    show(tenant, "memory", "No agent session is open.")
    expect(tenant.get_by_role("button", name="Drain")).to_have_count(0)
    show(tenant, "keys", "Who waits, and why")
    show(tenant, "requests", "The newest")
    expect(tenant.get_by_label("Tenant", exact=True)).to_have_count(0)
