"""One scrape has the metrics of all routers, each sample with its router, in bounded time whatever the others do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families
from ray.exceptions import RayError

from serve_app.core.receipts import Receipt
from serve_app.errors import StoreAway
from serve_app.router import ClusterSources, RouterMetrics, Scrape, scrape
from serve_app.router.metrics import TextFormat, accepted
from serve_app.router.scrape import Exposition, merged
from serve_app.store import StoreFigures
from serve_app.types import Outcome, RequestClass


def exposition(requests: float, model: str = "m", help_text: str = "Requests.") -> bytes:
    registry = CollectorRegistry()
    Counter("requests", help_text, ("model",), registry=registry).labels(model).inc(requests)
    Gauge("unread", "Bytes.", registry=registry).set(1)
    return generate_latest(registry)


def samples(text: bytes, name: str) -> dict[str, float]:
    """By router; the exposition must be one that a scraper takes."""
    families = list(text_string_to_metric_families(text.decode()))
    assert len({family.name for family in families}) == len(families), "each family once"
    return {s.labels["router"]: s.value for family in families for s in family.samples if s.name == name}


def test_each_sample_gets_its_router_and_each_family_is_there_once() -> None:
    text = merged({"b": exposition(2), "a": exposition(1)})
    assert samples(text, "requests_total") == {"a": 1, "b": 2}
    assert samples(text, "unread") == {"a": 1, "b": 1}


def test_the_words_of_another_release_do_not_split_a_family() -> None:
    text = merged({"a": exposition(1), "b": exposition(2, help_text="Requests, in other words.")})
    assert samples(text, "requests_total") == {"a": 1, "b": 2}


@pytest.mark.parametrize("model", ["a b", "a{b", 'a"b', "a\nb", "a\\", "a\u2028b", "a\x0bb"])
def test_a_label_of_any_characters_stays_what_it_is(model: str) -> None:
    text = merged({"r": exposition(3, model)}).decode()
    found = [s for family in text_string_to_metric_families(text) for s in family.samples if s.name == "requests_total"]
    assert [(one.labels, one.value) for one in found] == [({"router": "r", "model": model}, 3)]


async def no_figures() -> dict[str, Any]:
    return {
        "devices": [],
        "engines": [],
        "draining": [],
        "waiting": [],
        "sessions": [],
        "sessions_waiting": [],
        "short": [],
    }


async def empty_store() -> StoreFigures:
    return StoreFigures()


async def nothing() -> dict[str, Any]:
    return {}


NOTHING = ClusterSources(no_figures, empty_store, nothing, nothing, dict, lambda: 1)


async def exposition_of(text: bytes, router: str) -> Exposition:
    return router, text


async def silent() -> Exposition:
    await asyncio.Event().wait()
    raise AssertionError("not reached")


async def broken() -> Exposition:
    raise RayError("gone")


def count_answer(metrics: RouterMetrics, model: str, prompt_tokens: int) -> None:
    receipt = Receipt("id", RequestClass.NORMAL, "t", model, Outcome.OK, 0.0, 0.0, 1.0, prompt_tokens=prompt_tokens)
    metrics.count_ended(receipt, is_streamed=True, takes_slot=False, is_list=False)


def scraped(*answers: Awaitable[Exposition], error: BaseException | None = None) -> bytes:
    """A scrape at the router `here`, with these answers of all routers, or an error of the call."""

    async def ask_all(_: bool) -> Iterable[Awaitable[Exposition]]:
        if error is not None:
            raise error
        return answers

    metrics = RouterMetrics()
    count_answer(metrics, "m", 5)
    return asyncio.run(Scrape("here", metrics, {}, ask_all, NOTHING).everywhere())[1]


def test_all_routers_are_in_one_scrape_and_the_answering_one_is_there_once() -> None:
    other = RouterMetrics()
    count_answer(other, "m", 7)
    text = scraped(exposition_of(other.render(), "there"), exposition_of(other.render(), "here"))
    assert samples(text, "serve_app_prompt_tokens_total") == {"here": 5, "there": 7}


def test_openmetrics_of_all_routers_is_one_exposition() -> None:
    """Of a model whose name looks like an exemplar, too."""
    others = [RouterMetrics() for _ in range(2)]
    for number, other in enumerate(others):
        count_answer(other, 'a # {b="c"} 1', 7)
        other.observe_first_token("m", "t", RequestClass.HIGH, 0.5, f"request-{number}")
    here = RouterMetrics()
    count_answer(here, "m", 5)

    async def ask_all(is_openmetrics: bool) -> list[Awaitable[Exposition]]:
        assert is_openmetrics
        found = zip("ab", others, strict=True)
        return [exposition_of(other.render(TextFormat.OPENMETRICS), name) for name, other in found]

    content_type, text = asyncio.run(
        Scrape("here", here, {}, ask_all, NOTHING).everywhere("application/openmetrics-text")
    )
    assert content_type.startswith("application/openmetrics-text")
    families = {family.name: family for family in openmetrics_families(text.decode())}
    tokens = families["serve_app_prompt_tokens"].samples
    assert {(one.labels["router"], one.labels["model"], one.value) for one in tokens} == {
        ("a", 'a # {b="c"} 1', 7), ("b", 'a # {b="c"} 1', 7), ("here", "m", 5)
    }  # fmt: skip
    exemplars = [one.exemplar for one in families["serve_app_time_to_first_token_seconds"].samples if one.exemplar]
    assert [one.labels["request_id"] for one in exemplars] == ["request-0", "request-1"]


@pytest.mark.parametrize(
    ("accept", "text_format"),
    [
        ("", TextFormat.PROMETHEUS),
        ("*/*", TextFormat.PROMETHEUS),
        ("text/plain;version=0.0.4", TextFormat.PROMETHEUS),
        ("application/json", TextFormat.PROMETHEUS),
        ("application/openmetrics-text;version=1.0.0,text/plain;q=0.5", TextFormat.OPENMETRICS),
    ],
)
def test_a_scraper_gets_openmetrics_if_it_takes_that(accept: str, text_format: TextFormat) -> None:
    assert accepted(accept) is text_format


async def takes_no_argument() -> Exposition:
    raise TypeError("metrics() takes 1 positional argument but 2 were given")


def test_a_router_of_the_release_before_is_missing_where_it_cannot_be_asked(caplog: pytest.LogCaptureFixture) -> None:
    text = scraped(takes_no_argument(), exposition_of(exposition(3), "there"))
    assert samples(text, "requests_total") == {"there": 3}
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_router_that_does_not_answer_is_missing_and_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scrape, "ANSWER_TIMEOUT_S", 0.05)
    text = scraped(silent(), broken(), exposition_of(exposition(3), "there"))
    assert samples(text, "requests_total") == {"there": 3}
    assert samples(text, "serve_app_prompt_tokens_total") == {"here": 5}
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2


def test_a_part_that_does_not_answer_is_missing_and_the_metrics_say_so(caplog: pytest.LogCaptureFixture) -> None:
    async def away() -> Any:
        raise StoreAway("the store is away")

    async def nobody(_: bool) -> list[Awaitable[Exposition]]:
        return []

    async def silent_node() -> dict[str, str | None]:
        return {"node-1": "haproxy_process_current_connections 3\n", "node-2": None}

    sources = ClusterSources(no_figures, away, away, silent_node, dict, lambda: 1)
    _, text = asyncio.run(Scrape("here", RouterMetrics(), {}, nobody, sources).everywhere())
    families = text_string_to_metric_families(text.decode())
    found = [one for family in families for one in family.samples]
    up = {one.labels["part"]: one.value for one in found if one.name == "serve_app_up"}
    assert up == {"quota_actor": 1, "store": 0, "controller": 0, "haproxy": 0}
    connections = [one for one in found if one.name == "haproxy_process_current_connections"]
    assert [(one.labels["node"], one.value) for one in connections] == [("node-1", 3)]  # what is known is there
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2


@pytest.mark.parametrize("error", [RayError("gone"), TimeoutError()], ids=["RayError", "TimeoutError"])
def test_without_the_others_a_router_tells_its_own(error: BaseException) -> None:
    assert samples(scraped(error=error), "serve_app_prompt_tokens_total") == {"here": 5}
