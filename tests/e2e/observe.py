"""What the tests see of the inside: the figures of GET /metrics, as any operator would, and who answers on a port."""

from __future__ import annotations

import http.client
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import requests
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.e2e.stack import REQUEST_TIMEOUT_S, Stack
from tests.waiting import patient, wait_until

ABORT_S = 1.0  # what is promised for a client's disconnect
IDLE_S = 30.0  # for what is already ending to end
FILL_S = 30.0  # for requests in flight to reach the line or the engine
PROBE_S = 10.0  # a listener that does not answer a local call for that long is not one that serves without a key
HTTP_PROCESSES = ("haproxy", "ray::ProxyActor", "ray::ServeReplica")  # how the names of processes begin


class Observer:
    """Reads /metrics over one kept connection, so that a look never waits for a new one."""

    def __init__(self, stack: Stack) -> None:
        self._session = requests.Session()
        self._session.headers.update(stack.headers())
        self._url = f"{stack.base_url}/metrics"

    def text(self) -> str:
        response = self._session.get(self._url, timeout=REQUEST_TIMEOUT_S)
        response.raise_for_status()
        return response.text

    def value(self, metric: str, **labels: str) -> float:
        """Sum of the samples of this name that carry these labels."""
        return _sum(self.text(), metric, labels)

    def by_router(self, metric: str, **labels: str) -> dict[str, float]:
        """The same for each router, as all of them are in one scrape."""
        found: dict[str, float] = {}
        for sample in samples_of(self.text(), metric, labels):
            found[sample.labels["router"]] = found.get(sample.labels["router"], 0.0) + sample.value
        return found

    def running(self, model: str) -> float:
        """Sequences the engines run."""
        return self.value("serve_app_engine_running_sequences", model=model)

    def waiting(self, model: str) -> float:
        """Requests in the routers' lines."""
        return self.value("serve_app_waiting", model=model)

    def granted(self, model: str) -> float:
        """Slots the line has given away."""
        return self.value("serve_app_slots", model=model, state="granted")

    def generated(self, model: str) -> float:
        """Tokens the engines have generated since their start."""
        return self.value("serve_app_engine_generated_tokens_total", model=model)

    def ended(self, model: str, outcome: str) -> float:
        """Requests that have ended so."""
        return self.value("serve_app_requests_total", model=model, outcome=outcome)

    def figures(self, model: str) -> tuple[float, float, float]:
        """Running in the engine, waiting in the line, slots granted, all seen at once."""
        text = self.text()
        return (
            _sum(text, "serve_app_engine_running_sequences", {"model": model}),
            _sum(text, "serve_app_waiting", {"model": model}),
            _sum(text, "serve_app_slots", {"model": model, "state": "granted"}),
        )

    def wait_idle(self, model: str) -> None:
        """Until nothing of the model runs or waits and no slot is granted."""
        wait_until(lambda: self.figures(model), IDLE_S, f"{model} (running, waiting, granted)", wanted=(0, 0, 0))

    @contextmanager
    def ends(self, model: str, outcome: str, count: int = 1) -> Iterator[None]:
        """Exactly `count` requests end so during the block, or shortly after it."""
        before = self.ended(model, outcome)
        yield
        wait_until(
            lambda: self.ended(model, outcome) - before, IDLE_S, f"{model} requests ended as {outcome}", wanted=count
        )


def _sum(text: str, metric: str, labels: Mapping[str, str]) -> float:
    return sum(sample.value for sample in samples_of(text, metric, labels))


def samples_of(text: str, metric: str, labels: Mapping[str, str]) -> list[Sample]:
    """The samples of this name that carry these labels. Only their lines are parsed: a page has thousands of others."""
    lines = [line for line in text.split("\n") if line.startswith((f"{metric}{{", f"{metric} "))]
    return [
        sample
        for family in text_string_to_metric_families("\n".join([*lines, ""]))
        for sample in family.samples
        if labels.items() <= sample.labels.items()
    ]


def http_status(port: int) -> int | None:
    """How a GET of the models without a key is answered; None where HTTP is not spoken."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=patient(PROBE_S))
    try:
        connection.request("GET", "/v1/models")
        return connection.getresponse().status
    except (http.client.HTTPException, OSError):
        return None
    finally:
        connection.close()
