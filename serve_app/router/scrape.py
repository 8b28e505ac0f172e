"""One scrape of the metrics of all router replicas, whichever of them answers: only HAProxy has an address to scrape.

The answering router asks the engines for their load and for vLLM's own metrics, the other routers for their own
metrics, the quota actor for the ledger, the store for the batches, Serve's controller for the decisions of scaling, and
HAProxy. Each sample of a router gets the label `router`, as each is a counter of one process; the others have none.

Invariant: a scrape ends within twice `other_routers.ANSWER_TIMEOUT_S`; a router that has not answered by then is
missing in it, and logged. What another part has not answered is missing, too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from serve_app.errors import ServeAppError
from serve_app.ray_adapter import NO_ANSWER, in_fresh_context
from serve_app.router.metrics import (
    END,
    ClusterAnswers,
    RouterMetrics,
    TextFormat,
    accepted,
    cluster_families,
    engine_families,
    haproxy_families,
    passed_on,
    rendered,
)
from serve_app.router.model_router import ModelRouter
from serve_app.router.other_routers import ANSWER_TIMEOUT_S, answers_in_time
from serve_app.store import StoreFigures
from serve_app.transport import EngineLoad, EngineTexts

logger = logging.getLogger("ray.serve")

Exposition = tuple[str, bytes]  # a router's id, and its metrics as text
AskAll = Callable[[bool], Awaitable[Iterable[Awaitable[Exposition]]]]  # as `Scrape.here`
FAILURES: tuple[type[BaseException], ...] = (ServeAppError, *NO_ANSWER)  # of the parts in `ClusterSources`
T = TypeVar("T")


class ClusterSources(NamedTuple):
    """What is asked at a scrape, beside routers and engines, as `ClusterAnswers` has the answers. All but `keys`
    and `routers`, which this router knows, may raise NO_ANSWER or a ServeAppError."""

    figures: Callable[[], Awaitable[Mapping[str, Any]]]
    store: Callable[[], Awaitable[StoreFigures]]
    decisions: Callable[[], Awaitable[Mapping[str, Mapping[str, Any]]]]
    proxies: Callable[[], Awaitable[Mapping[str, str | None]]]
    keys: Callable[[], Mapping[tuple[str, str], int]]
    routers: Callable[[], int]

    async def ask(self) -> ClusterAnswers:
        """What has been answered in time; the parts are asked at once."""
        quota, store, decisions, proxies = await asyncio.gather(
            _answer(self.figures, "the quota actor"),
            _answer(self.store, "the store"),
            _answer(self.decisions, "Serve's controller"),
            _answer(self.proxies, "HAProxy"),
        )
        return ClusterAnswers(quota, store, decisions, proxies, self.keys(), self.routers())


class Scrape:
    """Answers scrapes at one router.

    Args:
        router: its id.
        models: by name, as they are served now.
        ask_all: asks every router for `here`; the call and the answers may raise NO_ANSWER.
        sources: of the figures of the whole deployment.
    """

    def __init__(
        self,
        router: str,
        metrics: RouterMetrics,
        models: Mapping[str, ModelRouter],
        ask_all: AskAll,
        sources: ClusterSources,
    ) -> None:
        self._router = router
        self._sources = sources
        self._metrics = metrics
        self._models = models
        self._ask_all = ask_all

    def here(self, is_openmetrics: bool = False) -> Exposition:
        """This router's id and its own metrics, in OpenMetrics' or Prometheus' text format."""
        self._metrics.read(self._models.values(), time.monotonic())
        return self._router, self._metrics.render(_format(is_openmetrics))

    async def everywhere(self, accept: str = "") -> tuple[str, bytes]:
        """The content type and the metrics of all routers and engines. `accept`: the header of the request."""
        text_format = accepted(accept)
        is_openmetrics = text_format is TextFormat.OPENMETRICS
        # in a context of its own: the calling HTTP request must not decide how replies are read
        others = in_fresh_context(self._others(is_openmetrics), "metrics")
        answers = in_fresh_context(self._sources.ask(), "figures")
        models = dict(self._models)
        looks = await asyncio.gather(*(_look(model, is_openmetrics) for model in models.values()))
        looks = [one for one in looks if self._models.get(one.model) is models[one.model]]  # else it was removed
        found = dict(await others)
        found |= [self.here(is_openmetrics)]
        cluster = await answers
        families = (
            engine_families({one.model: one.loads for one in looks}),
            cluster_families(cluster, {name: _fixed_replicas(one) for name, one in models.items()}, time.time()),
            haproxy_families(cluster.proxies or {}),
        )
        parts = [merged(found), *(rendered(one, text_format) for one in families)]
        parts.append(passed_on(texts for one in looks for texts in one.texts))
        return text_format.value, b"".join([*parts, END] if is_openmetrics else parts)

    async def _others(self, is_openmetrics: bool) -> list[Exposition]:
        """What the routers answer, this one perhaps among them."""
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                answers = await self._ask_all(is_openmetrics)
        except NO_ANSWER as error:
            logger.warning("Scrape did not reach the other routers, and their metrics are missing: %s", error)
            return []
        return await answers_in_time(answers, "the scrape")


async def _answer(ask: Callable[[], Awaitable[T]], part: str) -> T | None:
    """What a part of the deployment answers in time; None: nothing."""
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            return await ask()
    except FAILURES as error:
        logger.warning("Scrape did not get the figures of %s, and they are missing: %s", part, error)
        return None


class _ModelLook(NamedTuple):
    """What the engines of a model have answered: loads by replica, and vLLM's own metrics."""

    model: str
    loads: Mapping[str, EngineLoad]
    texts: list[EngineTexts]


async def _look(model: ModelRouter, is_openmetrics: bool) -> _ModelLook:
    """Ask the engines of a model; those that do not answer are missing."""
    replicas = sorted(model.replica_set.running)
    loads, texts = await asyncio.gather(
        asyncio.gather(*map(model.replica_set.fetch_load, replicas)),
        asyncio.gather(*(model.replica_set.fetch_metrics(replica, is_openmetrics) for replica in replicas)),
    )
    by_replica = {replica: load for replica, load in zip(replicas, loads, strict=True) if load is not None}
    return _ModelLook(model.settings.name, by_replica, texts)


def _fixed_replicas(model: ModelRouter) -> int | None:
    """The number of a model's replicas; None: it follows the load."""
    bounds = model.settings.replicas
    return bounds.min_replicas if bounds.min_replicas == bounds.max_replicas else None


def _format(is_openmetrics: bool) -> TextFormat:
    return TextFormat.OPENMETRICS if is_openmetrics else TextFormat.PROMETHEUS


def merged(expositions: Mapping[str, bytes]) -> bytes:
    """One exposition of those of several routers, by their ids: each family once, each sample with its router."""
    families: dict[str, list[str]] = {}
    for router, text in sorted(expositions.items()):
        family = families.setdefault("", [])
        is_new = True
        for line in text.decode().split("\n")[:-1]:  # a name may hold what `splitlines` takes for a line's end
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                is_new = name not in families
                family = families.setdefault(name, [])
            if not line.startswith("#"):
                family.append(_labelled(line, f'router="{router}"'))
            elif is_new:
                family.append(line)
    return "".join(f"{line}\n" for family in families.values() for line in family).encode()


def _labelled(sample: str, label: str) -> str:
    name, _, value = sample.partition(" ")  # a name without labels; else a part of them, with the brace
    if "{" not in name:
        return f"{name}{{{label}}} {value}"
    name, _, rest = sample.partition("{")
    return f"{name}{{{label},{rest}"
