"""Eight faults of a small stack, and everything that shows them: the console, its page, the events, the alerts.

The alerts are those of `deploy/prometheus`, judged by a Prometheus that scrapes the stack. None waits before it fires,
and their windows are a few scrapes; `tests/deploy/test_rules.py` has their real times.

Invariant: the tests look on the stack for the words in `DRILLS`, and the how-to page has the same.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import requests
import yaml
from playwright.sync_api import Locator, Page, expect

from scripts.dashboards.files import ROOT, RULES
from serve_app.names import RECORDS_FOLDER
from tests.e2e.changing import KEY, Place, place
from tests.e2e.consoles import State, browser, enter, model_in, page_of, show, watching
from tests.e2e.observe import Observer
from tests.e2e.stack import Stack
from tests.fakes.prometheus_server import PrometheusServer, endpoint_configuration, running_prometheus
from tests.waiting import TRUE, is_met, patient, wait_until

CHAT = "chat"  # whose engines die
CHAT_REPLICAS = 2
CHAT_GB = 2.0  # of one of them: what the large model lacks
CHAT_START_S = 3.0  # so that a console, which asks Serve's controller every five seconds, sees one missing
SMALL = "small"  # whose queue fills
LARGE = "large"  # for which there is no memory
SLOTS = 4
STEP_S = 0.01  # of the engines, per token
LONGEST = 131_072  # tokens of a request: 22 minutes, longer than a test may take
MAX_QUEUED = 20
HOG = "hog"
QUIET = "quiet"
BULK = "bulk"
QUIET_KEY = "sk-drills-quiet-0123456789"
BULK_KEY = "sk-drills-bulk-0123456789"
ROUTERS = 2

SHOWN_S = 20.0  # for a fault to be found and shown: the store's silence takes longest, ten seconds and a state
OVER_S = 60.0  # for its end: a replica or a router has started again
TRY_S = 0.5  # between two looks
REOPEN_S = 0.5  # before a console whose router has died opens its stream again
ENDED_S = 0.2  # between two looks whether it has
SCRAPE_S = 3  # of a quiet machine: above the 2 s that a scrape waits for a part that hangs
EVALUATE_S = 1
SCRAPES = 5  # in a window, in place of a rule's minutes: what two counts have in common falls into one
PRIMING_TOKENS = 3
RECORDS_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Drill:
    """A fault.

    Args:
        heading: of its row in the how-to page.
        alert: its name.
        console: what the console's page says.
        event: what an event says; empty: it is none.
    """

    heading: str
    alert: str
    console: str
    event: str = ""


ENGINE_KILLED = Drill("An engine is killed", "EngineLost", "runs 1 of 2 replicas", "lost replicas")
ENGINE_FROZEN = Drill("An engine hangs", "Ejected", "no reports from", "gets no requests for")
MEMORY_REFUSED = Drill("An engine gets no memory", "Blocked", "an engine waits for", "waits to load")
TENANT_HOGS = Drill("A tenant takes all", "Hog", "no free slot")
CLASS_FLOODS = Drill("A class floods the queue", "Flood", "of small is 90% full")
STORE_DEAD = Drill("The store does not answer", "StoreAway", "No answer from store", "Store is away")
DISK_FULL = Drill("A disk is full", "RecordsLost", "records that its disk did not take", "cannot be written")
ROUTER_LOST = Drill("A router dies", "RouterLost", "router", "lost replicas")
DRILLS = (
    ENGINE_KILLED,
    ENGINE_FROZEN,
    MEMORY_REFUSED,
    TENANT_HOGS,
    CLASS_FLOODS,
    STORE_DEAD,
    DISK_FULL,
    ROUTER_LOST,
)


def model(name: str, replicas: int = 1, **more: Any) -> dict[str, Any]:
    """The settings of a simulated model with a fixed number of replicas."""
    rates = {"decode_step_s": STEP_S, "kv_cache_tokens": SLOTS * LONGEST} | more.pop("simulated", {})
    engine = {"engine": "simulated", "max_num_seqs": SLOTS, "max_model_len": LONGEST, "cpus_per_rank": 0.5}
    bounds = {"min_replicas": replicas, "max_replicas": replicas}
    return {"name": name, **engine, "replicas": bounds, "simulated": rates} | more


def configured(*more: dict[str, Any], chat_replicas: int = CHAT_REPLICAS) -> dict[str, Any]:
    """The configuration, with further models."""
    chat = model(CHAT, chat_replicas, memory_gb=CHAT_GB, simulated={"start_s": CHAT_START_S})
    return {
        "models": [chat, model(SMALL), *more],
        "router": {"replicas": ROUTERS},
        "admission": {"max_queued": MAX_QUEUED},
        "batch": {"workers": 0},
        "auth": {
            "keys": [
                {"key": KEY, "name": "operator", "admin": True},
                {"key": QUIET_KEY, "name": QUIET, "tenant": QUIET},
                {"key": BULK_KEY, "name": BULK, "tenant": BULK, "max_class": "low", "default_class": "low"},
            ]
        },
    }


def quick_rules(window_s: int) -> dict[str, Any]:
    """The rules of `deploy/prometheus`, with short windows and without a time before an alert fires."""
    rules: dict[str, Any] = yaml.safe_load((ROOT / RULES).read_text())
    for rule in (rule for group in rules["groups"] for rule in group["rules"]):
        rule["expr"] = re.sub(r"\b(5|10)m\b", f"{window_s}s", rule["expr"])
        if "alert" in rule:
            rule["for"] = "0s"
    return rules


class OpenConsole:
    """An operator's console that stays open through every fault: it opens its stream again, as the page does.
    `states`: all that it was sent."""

    def __init__(self, stack: Stack) -> None:
        self.states: list[State] = []
        self._stack = stack
        self._session = browser(stack, KEY)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.is_set():
            # the router of its stream may just have died
            with (
                contextlib.suppress(requests.RequestException, AssertionError),
                watching(self._stack, self._session, self.states.append) as watch,
            ):
                while not (self._over.is_set() or watch.ended.is_set()):
                    watch.ended.wait(ENDED_S)
            self._over.wait(REOPEN_S)

    def close(self) -> None:
        self._over.set()
        self._thread.join()


@dataclass
class Fault:
    """One fault, from now on, as all see it.

    Args:
        stage: the stack, and those who look.
    """

    stage: Stage
    drill: Drill
    begun: str = field(init=False)

    def __post_init__(self) -> None:
        self.alert_is_over()
        self.begun = now()
        self._begun_at = time.time()
        self._seen = len(self.stage.console.states)

    def on_console(self, look: Callable[[State], object], goal: str, wanted: object = TRUE) -> State:
        """The first state since the fault in which what is looked at is true, or equals `wanted`."""
        states = self.stage.console.states

        def found() -> State | None:
            return next((state for state in states[self._seen :] if is_met(look(state), wanted)), None)

        def seen() -> str:
            values = [value for value, _ in itertools.groupby(look(state) for state in states[self._seen :])]
            return f"one after the other: {values}; {states[-1]}"

        state = wait_until(found, SHOWN_S, f"the console shows {goal}", seen=seen, poll_s=TRY_S).found
        assert state is not None
        return state

    def on_page(self, region: str = "What needs attention", *also: str, says: str | None = None) -> None:
        """The page says so in this region, with these other words. `says`: in place of the drill's words."""
        for words in (self.drill.console if says is None else says, *also):
            shown = expect(self.stage.region(region))
            shown.to_contain_text(words, ignore_case=True, timeout=1000 * patient(SHOWN_S))

    def in_events(
        self, words: str = "", *, meanwhile: Callable[[], object] = lambda: None, **details: Any
    ) -> dict[str, Any]:
        """An event since the fault with these words, else those of the drill, and with these details. `meanwhile`: done
        before each look."""

        def found() -> dict[str, Any] | None:
            meanwhile()
            events = self.stage.events(self.begun)
            fitting = (one for one in events if (words or self.drill.event) in one["message"])
            return next((one for one in fitting if details.items() <= one["details"].items()), None)

        seen = lambda: [one["message"] for one in self.stage.events(self.begun)]  # noqa: E731
        event = wait_until(found, SHOWN_S, f"an event: {words or self.drill.event}", seen=seen, poll_s=TRY_S).found
        assert event is not None
        return event

    def alerts(self, *, meanwhile: Callable[[], object] = lambda: None, **labels: str) -> None:
        """Its alert has fired with these labels since the fault. `meanwhile`: done before each look, so that the fault
        lasts until a scrape has seen it."""
        wanted = {"alertname": self.drill.alert, **labels}

        def fired() -> list[dict[str, str]]:
            return self.stage.all_firing(int(time.time() - self._begun_at))

        def look() -> bool:
            meanwhile()
            return any(wanted.items() <= found.items() for found in fired())

        wait_until(look, SHOWN_S, f"{self.drill.alert} fires", seen=fired, poll_s=TRY_S)

    def is_over(self, look: Callable[[State], object], goal: str) -> None:
        """The console's newest state is as wanted, and its page no longer says that something is wrong."""
        stage = self.stage
        wait_until(
            lambda: look(stage.console.states[-1]),
            OVER_S,
            f"the console shows {goal}",
            seen=lambda: stage.console.states[-1],
            poll_s=TRY_S,
        )
        shown = expect(stage.region("What needs attention"))
        shown.not_to_contain_text(self.drill.console, ignore_case=True, timeout=1000 * patient(SHOWN_S))

    def alert_is_over(self) -> None:
        """It does not fire: no longer, or not yet."""
        alert = self.drill.alert
        look = lambda: all(found["alertname"] != alert for found in self.stage.all_firing())  # noqa: E731
        wait_until(look, OVER_S, f"{alert} is over", seen=self.stage.all_firing, poll_s=TRY_S)


@dataclass
class Stage:
    """The stack, and those who look at it. `records`: the disk of its request log and its events."""

    place: Place
    stack: Stack
    console: OpenConsole
    page: Page
    prometheus: PrometheusServer
    records: Path
    hog_id: str = ""
    hog_key: str = ""

    def region(self, name: str) -> Locator:
        """A part of the page that is shown."""
        return self.page.get_by_role("region", name=name)

    def open_page(self, address: str) -> None:
        """A page of the console, with new answers."""
        show(self.page, "chat")
        show(self.page, address)

    def answer(self, path: str, **query: Any) -> dict[str, Any]:
        """Of a route for operators."""
        found = self.stack.get(path, params=query)
        assert found.status_code == 200, found.text
        return dict(found.json())

    def events(self, since: str, **query: Any) -> list[dict[str, Any]]:
        """The oldest first."""
        return list(self.answer("/admin/events", since=since, limit=1000, **query)["data"][::-1])

    def all_firing(self, within_s: int = 0) -> list[dict[str, str]]:
        """The labels of the alerts that fire, or have fired in the last seconds."""
        firing = 'ALERTS{alertstate="firing"}'
        query = f"max_over_time({firing}[{within_s}s])" if within_s else firing
        return [labels for labels, _ in self.prometheus.samples(query)]


def now() -> str:
    return datetime.now(UTC).isoformat()


def is_whole(state: State, name: str, replicas: int) -> bool:
    """Whether a model has all its replicas, and each takes requests."""
    found = model_in(state, name)
    replicas_shown = found.get("replicas", ())
    usable = [one for one in replicas_shown if one["state"] == "RUNNING" and not (one["ejected"] or one["silent"])]
    return found["running"] == found["wanted"] == len(replicas_shown) == len(usable) == replicas


def any_of(state: State, name: str, mark: str) -> bool:
    """Whether a replica of a model has this mark."""
    return any(one[mark] for one in model_in(state, name).get("replicas", ()))


def waiting_of(state: State, name: str, tenant: str) -> int:
    """Requests of a tenant that wait for a model."""
    return sum(row["waiting"] for row in model_in(state, name)["queues"] if row["tenant"] == tenant)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of its own, in memory."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={RECORDS_BYTES}", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def filled(disk: Path) -> Iterator[None]:
    """No block of the disk is free, for the block."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    try:
        yield
    finally:
        filler.unlink()


@contextlib.contextmanager
def staged(folder: Path) -> Iterator[Stage]:
    """The stack in its first configuration, and everyone who looks, for the block."""
    scrape_s = math.ceil(patient(SCRAPE_S))
    rules = folder / "quick.rules"
    rules.write_text(yaml.safe_dump(quick_rules(SCRAPES * scrape_s + 1), width=100_000))
    with (
        small_disk(folder / "records") as records,
        place(folder / "state", extra_environment={RECORDS_FOLDER: str(records)}) as started,
    ):
        config = configured()
        started.begin(config)
        names = frozenset(one["name"] for one in config["models"])
        stack = Stack(started.cluster.url, KEY, BULK_KEY, names, started.cluster, config)
        scraping = endpoint_configuration(stack.base_url, KEY, rules, scrape_s, EVALUATE_S)
        with running_prometheus(scraping, folder) as prometheus, page_of(stack) as page:
            console = OpenConsole(stack)
            try:
                enter(page, KEY)
                stage = Stage(started, stack, console, page, prometheus, records)
                _make_hog(stage)
                wait_until(lambda: console.states, SHOWN_S, "a state")
                yield stage
            finally:
                console.close()


def _make_hog(stage: Stage) -> None:
    """A key whose limits can be changed. Each router has answered every tenant once: a rate takes two figures."""
    made = stage.stack.post("/admin/keys", {"name": HOG, "tenant": HOG}).json()
    stage.hog_id = made["id"]
    stage.hog_key = made["key"]

    first_tokens = "serve_app_time_to_first_token_seconds_count"
    endpoint = stage.place.endpoint
    for tenant, key in ((HOG, stage.hog_key), (QUIET, QUIET_KEY), (BULK, BULK_KEY)):

        def asked(tenant: str = tenant, key: str = key) -> int:
            for asking in [endpoint.asking(SMALL, PRIMING_TOKENS, key=key) for _ in range(4 * ROUTERS)]:
                asking.answer()
            return len(Observer(stage.stack).by_router(first_tokens, model=SMALL, tenant=tenant))

        wait_until(asked, SHOWN_S, f"routers know {tenant}", wanted=ROUTERS)
