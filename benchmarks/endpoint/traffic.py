"""Requests to any endpoint, and what their clients saw: the open loop of `benchmarks.overload`, in this process.

Prompts are common words, answers as long as drawn or as the model makes them. Tokens are counted by `usage` in the
answer, or in a chunk of a stream that broke. Nothing is guessed for an answer without one: `uncounted` has the reason.

Invariant: a run is bounded by its spans and by `max_requests`; what has not ended then is hung up on.
"""

from __future__ import annotations

import gc
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

import uvloop

from benchmarks.common.arms import BenchmarkError
from benchmarks.common.workload import WORDS
from benchmarks.endpoint.size import Size
from benchmarks.endpoint.target import CLASSES, Target
from benchmarks.overload.answers import quantiles
from benchmarks.overload.offered_load import Offer
from benchmarks.overload.open_loop import HUNG, MAX_SAMPLES, STILL_REFUSED, Run, play
from benchmarks.overload.open_loop_client import Ended, Flight, Load


@dataclass(frozen=True, slots=True)
class Seen:
    """What the clients saw of one load. Moments are seconds of the loop's clock; it began at `began`. `refusals`: of
    clients who came again."""

    flights: Sequence[Flight]
    began: float
    refusals: int

    @property
    def finished(self) -> list[Flight]:
        return [flight for flight in self.flights if flight.outcome is Ended.FINISHED]

    def uncounted(self) -> dict[str, int]:
        """Answers whose tokens nobody can count: whole ones without usage, and broken ones without."""
        silent = [flight for flight in self.flights if flight.usage is None]
        return {
            "finished_without_usage": sum(flight.outcome is Ended.FINISHED for flight in silent),
            "broken_without_usage": sum(flight.outcome is Ended.FAILED and flight.first > 0 for flight in silent),
        }

    def failures(self) -> dict[str, Any]:
        """Requests that failed, with the first reasons; those that waited in vain to the end of the drain apart."""
        failed = [flight for flight in self.flights if flight.outcome is Ended.FAILED]
        codes = [flight.code for flight in failed if flight.code != HUNG or flight.first]
        unanswered = len(failed) - len(codes)
        return {"failed": len(codes), "unanswered": unanswered, "failed_samples": codes[:MAX_SAMPLES]}

    def clients_figures(self) -> dict[str, Any]:
        """How the requests ended, and how late the clients themselves were."""
        reasons = Counter(flight.code for flight in self.flights if flight.outcome is Ended.REFUSED)
        return {
            "requests": len(self.flights),
            "outcomes": dict(Counter(flight.outcome.value for flight in self.flights)),
            "refusals": self.refusals + reasons.total() - reasons[STILL_REFUSED],  # whose own is among the first
            "refusal_reasons": dict(reasons),
            "generator_late_ms": quantiles([(flight.sent - flight.due) * 1e3 for flight in self.flights]),
            **self.uncounted(),
            **self.failures(),
        }


def first_token_s(flight: Flight) -> float:
    """From the moment a request was due to its first token; infinite: it got none."""
    return flight.first - flight.due if flight.first else math.inf


@dataclass(frozen=True, slots=True)
class Traffic:
    """Clients of one endpoint.

    Args:
        key_of: whose key, headers and fields the requests of a tenant have.
    """

    target: Target
    size: Size
    seed: int
    key_of: Mapping[str, str] = field(default_factory=dict)

    def open(self, requests: Sequence[Offer], **spans: Any) -> Seen:
        """The requests at their moments; `spans` and further fields are those of `Load`.

        Raises:
            BenchmarkError: they are more than `max_requests`.
        """
        most = self.size.max_requests
        if len(requests) > most:
            raise BenchmarkError(f"{len(requests)} requests in one load, of at most {most}: see --max-requests")
        return self._seen(self._run(list(self._made(requests)), **spans))

    def closed(self, requests: Iterable[Offer], **spans: Any) -> Seen:
        """A closed loop of the clients that `spans` names.

        Raises:
            BenchmarkError: `max_requests` were through before its time.
        """
        most = self.size.max_requests
        run = self._run(self._made(islice(requests, most)), **spans)
        seen = self._seen(run)
        if run.exhausted:
            raise BenchmarkError(f"{most} requests ended before their time: see --max-requests; {seen.failures()}")
        return seen

    def probe(self) -> Flight:
        """One short request alone, which comes again while it is refused. BenchmarkError: it did not get an answer."""
        offer = Offer(0, 0.0, "", 0, self.size.prompt_words[0], 1)
        (flight,) = self._run(self._made([offer]), staying={"": 1}, window_s=self.size.drain_s).flights
        if flight.outcome is not Ended.FINISHED:
            raise BenchmarkError(f"{self.target.url}: a request alone ended as {flight.outcome.value}: {flight.code}")
        return flight

    def capacity(self, requests: Iterable[Offer], span_s: float) -> tuple[float, Seen]:
        """Requests a second that the clients of a closed loop get through, after the first third of the span.

        Raises:
            BenchmarkError: nothing was finished in it.
        """
        seen = self.closed(requests, clients=self.size.clients, warmup_s=span_s / 3, window_s=span_s * 2 / 3)
        ended = [flight.ended - seen.began for flight in seen.finished]
        inside = sum(span_s / 3 <= at_s < span_s for at_s in ended)
        if not inside:
            raise BenchmarkError(f"nothing was finished in a closed loop of {span_s:g} s: {seen.failures()}")
        return inside / (span_s * 2 / 3), seen

    def _made(self, requests: Iterable[Offer]) -> Iterator[tuple[Offer, bytes]]:
        draw = random.Random(self.seed)
        tenants = self.target.tenants
        for offer in requests:
            tenant = tenants[offer.tenant]
            prompt = " ".join(draw.choices(WORDS, k=offer.prompt_tokens))
            group = offer.group if offer.group in CLASSES else ""
            key = self.key_of.get(tenant, tenant)
            yield offer, self.target.request_bytes(key, group, prompt, offer.output_tokens)

    def _run(self, queue: Iterable[tuple[Offer, bytes]], **spans: Any) -> Run:
        fields = {"warmup_s": 0.0, "tail_s": 0.0, "drain_s": self.size.drain_s} | spans
        load = Load(self.target.host, self.target.port, tls=self.target.tls, lenient=True, **fields)
        gc.disable()  # a collection would show as a wait
        try:
            return uvloop.run(play(load, iter(queue), _silent))
        finally:
            gc.enable()

    @staticmethod
    def _seen(run: Run) -> Seen:
        return Seen(run.flights, run.began, run.refusals)


def _silent(edge: str) -> None:
    """Nobody here counts the CPU time of a server."""


def worst_lateness_ms(loads: Iterable[Mapping[str, Any]]) -> float | None:
    """The largest p99 of the clients' own lateness among the figures of loads."""
    found = [load["generator_late_ms"]["p99"] for load in loads if load["generator_late_ms"]["n"]]
    return max(found, default=None)


def as_conditions(target: Target, size: Size, seed: int, **more: Any) -> dict[str, Any]:
    """What decides the figures, and may be shown."""
    return {"endpoint": target.conditions(), "size": asdict(size), "seed": seed, **more}
