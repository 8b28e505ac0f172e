"""What the tests of the console do in its page."""

from __future__ import annotations

from dataclasses import dataclass

from playwright.sync_api import Locator, Page, ViewportSize, expect

from tests.fakes.console_server import COOKIE, ConsoleServer

DESKTOP: ViewportSize = {"width": 1280, "height": 800}
PHONE: ViewportSize = {"width": 390, "height": 844}
# The pages by their addresses, with a text of the fake's data on each.
PAGES = {
    "overview": "1 replica waits since 140 s",
    "memory": "Node 10.0.0.12",
    "requests": "The newest",
    "requests?failed=1": "engine failed",
    "requests?waiting=1": "slots kept for higher classes",
    "requests/slow0000000000000000000000000001": "Where the time went",
    "history": "First token, p95",
    "events": "changed its target from 3 to 4",
    "usage": "Limits of keys",
    "batches": "batch_19be44c0",
    "keys": "night-batch",
    "audit": "key.create",
    "logs": "The engine died",
    "chat": "Message",
}


@dataclass(frozen=True)
class Visitor:
    """A page of the browser, and the endpoint that it looks at."""

    page: Page
    endpoint: ConsoleServer

    def open(self) -> Page:
        self.page.goto(f"{self.endpoint.url}/console/")
        return self.page

    def enter(self, tenant: str | None) -> Page:
        """Come with a session."""
        self.endpoint.sessions["of-the-test"] = tenant
        self.page.context.add_cookies([{"name": COOKIE, "value": "of-the-test", "url": self.endpoint.url}])
        self.open()
        expect(self.page.locator(".vitals")).to_be_visible()
        return self.page


def show(page: Page, address: str, text: str = "") -> None:
    """Go to a page of the console, and wait for its data."""
    page.evaluate("address => { location.hash = address }", f"#/{address}")
    expect(page.locator("main")).to_contain_text(text or PAGES[address])


def part(page: Page, title: str) -> Locator:
    """A section by its heading."""
    return page.get_by_role("region", name=title, exact=True)


def row(page: Page, text: str) -> Locator:
    return page.get_by_role("row").filter(has_text=text)


def focused(page: Page) -> str:
    """The name of what has the focus."""
    return str(
        page.evaluate("(({ ariaLabel, textContent }) => (ariaLabel || textContent).trim())(document.activeElement)")
    )
