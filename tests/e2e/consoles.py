"""Consoles on a real stack, for tests: a browser's session, what its live stream is sent, and the page in Chromium."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import requests
from playwright.sync_api import Page, expect, sync_playwright

from tests.e2e.stack import REQUEST_TIMEOUT_S, Stack
from tests.requires import requires
from tests.waiting import patient

CHROMIUM = "/usr/bin/chromium"
PAGE_S = 20.0  # two states of the live view, beside others of the suite
OF_ANSWERS = "Failed to load resource"  # Chromium's own words for the 401 of the first look

State = dict[str, Any]  # an object of GET /console/live


def model_in(state: State, name: str) -> dict[str, Any]:
    """A model of a state; one without queues, if there is none of this name."""
    return next((one for one in state.get("models", ()) if one["model"] == name), {"queues": []})


def browser(stack: Stack, key: str) -> requests.Session:
    """A browser that has logged in with a key."""
    session = requests.Session()
    session.headers["Origin"] = stack.base_url
    answer = session.post(f"{stack.base_url}/console/session", json={"key": key}, timeout=patient(REQUEST_TIMEOUT_S))
    assert answer.status_code == 204, answer.text
    return session


class Watch:
    """The last state that a console has got. `ended`: its stream is over.

    Args:
        keep: called with each state, in a thread.
    """

    def __init__(self, answer: requests.Response, keep: Callable[[State], None] = lambda state: None) -> None:
        self.state: State = {}
        self.states = 0
        self.received = 0
        self.last_event = ""
        self.ended = threading.Event()
        self._answer = answer
        self._keep = keep
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with contextlib.suppress(requests.RequestException, AttributeError):
            for line in self._answer.iter_lines(chunk_size=None):
                self.received += len(line) + 1
                name, _, value = line.partition(b": ")
                if name == b"event":
                    self.last_event = value.decode()
                elif name == b"data" and self.last_event == "live":
                    self.state = json.loads(value)
                    self.states += 1
                    self._keep(self.state)
        self.ended.set()

    def model(self, name: str) -> dict[str, Any]:
        return model_in(self.state, name)


@contextlib.contextmanager
def watching(
    stack: Stack, session: requests.Session, keep: Callable[[State], None] = lambda state: None
) -> Iterator[Watch]:
    """A console of this browser. `keep`: as of `Watch`."""
    answer = session.get(f"{stack.base_url}/console/live", stream=True, timeout=patient(REQUEST_TIMEOUT_S))
    assert answer.status_code == 200, answer.text
    try:
        yield Watch(answer, keep)
    finally:
        answer.close()


@contextlib.contextmanager
def page_of(stack: Stack, *expected: str) -> Iterator[Page]:
    """A browser's page for the block; it ends with no error in its console.

    Args:
        expected: parts of errors that faults of the stack cause.
    """
    requires("chromium")
    complaints: list[str] = []
    accepted = (OF_ANSWERS, *expected)

    def complain(text: str) -> None:
        if not any(part in text for part in accepted):
            complaints.append(text)

    with sync_playwright() as playwright:
        browser_of_page = playwright.chromium.launch(executable_path=CHROMIUM, args=["--disable-gpu"])
        opened = browser_of_page.new_page()
        expect.set_options(timeout=patient(PAGE_S) * 1000)
        opened.set_default_timeout(patient(PAGE_S) * 1000)
        opened.on("pageerror", lambda error: complain(str(error)))
        opened.on("console", lambda message: complain(message.text) if message.type == "error" else None)
        opened.goto(f"{stack.base_url}/console")
        yield opened
        browser_of_page.close()
    assert complaints == []


def enter(page: Page, key: str) -> None:
    """Sign in."""
    page.get_by_label("Key").fill(key)
    page.keyboard.press("Enter")
    expect(page.locator(".freshness")).to_have_text("Live")


def show(page: Page, address: str) -> None:
    page.evaluate("address => { location.hash = address }", f"#/{address}")
