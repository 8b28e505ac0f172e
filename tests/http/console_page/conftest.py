"""One Chromium, one page and one fake endpoint for a module. A test begins at the door, as a new browser would, and
fails with any error in the page's console."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, expect, sync_playwright

from tests.fakes.console_server import ConsoleServer, console_server
from tests.http.console_page.browser import DESKTOP, Visitor
from tests.requires import requires
from tests.waiting import patient

CHROMIUM = "/usr/bin/chromium"
SEEN_S = 15.0  # until the page shows something: it takes 0.2 s on a quiet machine
# What Chromium itself says of an answer that a test asked for, such as a 401.
OF_ANSWERS = "Failed to load resource"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    requires("chromium")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--disable-gpu"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def shared_endpoint() -> Iterator[ConsoleServer]:
    with console_server() as served:
        yield served


@pytest.fixture
def endpoint(shared_endpoint: ConsoleServer) -> ConsoleServer:
    shared_endpoint.reset()
    return shared_endpoint


@pytest.fixture(scope="module")
def shared_page(browser: Browser) -> Iterator[Page]:
    """What it loads is in its cache for the next test."""
    context = new_context(browser)
    yield context.new_page()
    context.close()


@pytest.fixture
def visitor(shared_page: Page, endpoint: ConsoleServer) -> Iterator[Visitor]:
    """The module's page, without a session and without what earlier tests chose."""
    shared_page.context.clear_cookies()
    shared_page.set_viewport_size(DESKTOP)
    shared_page.emulate_media(color_scheme="light")
    try:
        yield from _watched(Visitor(shared_page, endpoint))
    finally:
        shared_page.evaluate("localStorage.clear()")
        shared_page.goto("about:blank")


@pytest.fixture
def own_visitor(browser: Browser, endpoint: ConsoleServer) -> Iterator[Visitor]:
    """A page of the test's own, whose clock it may set."""
    context = new_context(browser)
    try:
        yield from _watched(Visitor(context.new_page(), endpoint))
    finally:
        context.close()


def new_context(browser: Browser) -> BrowserContext:
    context = browser.new_context(viewport=DESKTOP, color_scheme="light", reduced_motion="reduce")
    context.add_init_script(
        "document.addEventListener('securitypolicyviolation', (event) =>"
        " console.error(`policy: ${event.violatedDirective} ${event.blockedURI}`))"
    )
    return context


def _watched(visitor: Visitor) -> Iterator[Visitor]:
    """The page may do nothing wrong: no error, no exception, nothing against the policy."""
    limit_ms = patient(SEEN_S) * 1000
    expect.set_options(timeout=limit_ms)
    visitor.page.set_default_timeout(limit_ms)
    complaints: list[str] = []
    listeners = {"console": _listen(complaints), "pageerror": lambda error: complaints.append(str(error))}
    for event, listener in listeners.items():
        visitor.page.on(event, listener)  # type: ignore[call-overload]  # its overloads name one event each
    yield visitor
    for event, listener in listeners.items():
        visitor.page.remove_listener(event, listener)
    visitor.endpoint.sessions.clear()
    assert complaints == []


def _listen(complaints: list[str]) -> Callable[[ConsoleMessage], None]:
    def on_message(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and OF_ANSWERS not in message.text:
            complaints.append(message.text)

    return on_message


@pytest.fixture
def operator(visitor: Visitor) -> Page:
    """Signed in with an operator's key, at the overview."""
    return visitor.enter(tenant=None)


@pytest.fixture
def tenant(visitor: Visitor) -> Page:
    """Signed in with the key of the tenant `product`."""
    return visitor.enter(tenant="product")
