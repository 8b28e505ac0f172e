"""axe-core finds nothing in any page, in both themes at both widths, and nothing in the dialogs and at the door; no
page scrolls sideways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.http.console_page.browser import DESKTOP, PAGES, PHONE, Visitor, show

AXE = Path(__file__).resolve().parents[2] / "vendor/axe.min.js"
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
# The theme changes colours alone: the other rules are asked once for each width.
LOOK = "options => axe.run(document, options).then(({ violations }) => violations)"


def violations(page: Page, colours_alone: bool = False) -> list[str]:
    """What axe finds, by rule and element."""
    wanted: dict[str, Any] = (
        {"type": "rule", "values": ["color-contrast"]} if colours_alone else {"type": "tag", "values": RULES}
    )
    found = page.evaluate(LOOK, {"runOnly": wanted, "resultTypes": ["violations"]})
    return [f"{rule['id']}: {node['html'][:160]}: {node['failureSummary']}" for rule in found for node in rule["nodes"]]


def test_axe_finds_what_is_wrong(visitor: Visitor) -> None:
    page = visitor.open()
    page.evaluate(AXE.read_text())
    page.evaluate("document.body.append(document.createElement('button'))")
    assert any(line.startswith("button-name") for line in violations(page))


@pytest.mark.parametrize("address", PAGES)
def test_every_page_is_accessible_in_both_themes_at_both_widths(visitor: Visitor, address: str) -> None:
    page = visitor.enter(tenant=None)
    page.evaluate(AXE.read_text())
    show(page, address)
    found: list[str] = []
    for size in (DESKTOP, PHONE):
        page.set_viewport_size(size)
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
        page.emulate_media(color_scheme="light")
        found += violations(page)
        page.emulate_media(color_scheme="dark")
        found += violations(page, colours_alone=True)
    assert found == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_door_and_the_dialogs_are_accessible(visitor: Visitor, theme: str) -> None:
    page = visitor.open()
    page.emulate_media(color_scheme=theme)  # type: ignore[arg-type]  # one of playwright's words
    page.evaluate(AXE.read_text())
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("alert")).to_be_visible()
    found = violations(page)
    page = visitor.enter(tenant=None)
    page.evaluate(AXE.read_text())
    for address, name in (("keys", "Make a key…"), ("memory", "Defragment…"), ("memory", "Drain x7k2m9qp…")):
        show(page, address, "")
        page.get_by_role("button", name=name).click()
        expect(page.get_by_role("dialog")).to_be_visible()
        found += violations(page)
        page.keyboard.press("Escape")
    assert found == []
