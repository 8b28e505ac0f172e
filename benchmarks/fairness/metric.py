"""How evenly clients were served: VTC's figures, as its artifact computes them. Pure functions of answers.

From "Fairness in Serving Large Language Models" (VTC; Sheng et al., OSDI 2024), `fair_bench/plot` of its artifact: a
request is worth its prompt tokens and twice its output tokens, and is held to be served evenly between its first
token and its end; what a client asks for in a window is the worth of the requests that came in it. In each window of
60 s a client is short of the lesser of two amounts: what the best served client got more than it, and what it asked for
and did not get; a window's difference is the sum of that over the clients. One thing is stricter here: windows follow
each other every few seconds, where the artifact looks at 19 of them, so the largest difference is at least as large.

Invariant: no figure depends on the order of the answers or on the names of the clients.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from serve_app.core.queue import INPUT_WEIGHT, OUTPUT_WEIGHT

WINDOW_S = 60.0  # the artifact's
STRIDE_S = 5.0  # between the beginnings of two windows
P99 = 0.99

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one request. Moments are seconds of one clock.

    Args:
        output_tokens: that it asks for, whether it got them or not.
        first_s: when its first token came; None: it has none yet.
        seen_s: when it ended or was last looked at; None: it has no token yet.
        served_tokens: of output, by then.
    """

    client: str
    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    first_s: float | None = None
    seen_s: float | None = None
    served_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Span:
    """From when to when figures are taken, in seconds."""

    begin_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        return self.end_s - self.begin_s

    def windows(self) -> Floats:
        """Where each window that is wholly inside begins. ValueError: there is none."""
        last_s = self.end_s - WINDOW_S
        if last_s < self.begin_s:
            raise ValueError(f"{self} is shorter than a window of {WINDOW_S:g} s")
        begins: Floats = np.arange(self.begin_s, last_s + 1e-9, STRIDE_S, dtype=np.float64)
        return begins


@dataclass(frozen=True, slots=True)
class Fairness:
    """The figures of one run.

    Args:
        service_ratio: as the function.
        max_diff_over_rate: the largest difference of a window over the mean service of all in as much time.
        mean_diff_over_rate: the mean one, over the same.
        tokens_per_s: as the function.
    """

    service_ratio: float
    max_diff_over_rate: float
    mean_diff_over_rate: float
    tokens_per_s: float


def worth(prompt_tokens: float, output_tokens: float) -> float:
    """Service of so many tokens, in input tokens."""
    return INPUT_WEIGHT * prompt_tokens + OUTPUT_WEIGHT * output_tokens


def clients_of(answers: Sequence[Answer]) -> list[str]:
    """Their names, in order."""
    return sorted({answer.client for answer in answers})


def accumulated(
    answers: Sequence[Answer], moments: Floats, input_weight: float = INPUT_WEIGHT, output_weight: float = OUTPUT_WEIGHT
) -> Floats:
    """What each client had been served at each of the moments: one row a client, in order of their names."""
    row = {client: number for number, client in enumerate(clients_of(answers))}
    found = np.zeros((len(row), len(moments)))
    for answer in answers:
        if answer.first_s is None or answer.seen_s is None:
            continue
        amount = input_weight * answer.prompt_tokens + output_weight * answer.served_tokens
        length_s = answer.seen_s - answer.first_s
        if length_s > 0:
            part = np.clip((moments - answer.first_s) / length_s, 0.0, 1.0)
        else:
            part = (moments >= answer.first_s).astype(np.float64)
        found[row[answer.client]] += amount * part
    return found


def demanded(answers: Sequence[Answer], begins: Floats, length_s: float) -> Floats:
    """The worth of what each client asked for in each window, as `accumulated`. A window has its begin, not its end."""
    row = {client: number for number, client in enumerate(clients_of(answers))}
    found = np.zeros((len(row), len(begins)))
    for answer in answers:
        inside = (begins <= answer.arrived_s) & (answer.arrived_s < begins + length_s)
        found[row[answer.client]] += inside * worth(answer.prompt_tokens, answer.output_tokens)
    return found


def differences(served: Floats, asked: Floats) -> Floats:
    """The difference of each window: clients are rows, windows are columns.

    A client that got more than it asked for in a window (it was served late) counts with what it got too much, as in
    the artifact.
    """
    behind = served.max(axis=0, keepdims=True) - served
    result: Floats = np.minimum(behind, np.abs(asked - served)).sum(axis=0)
    return result


def largest_difference(served: Floats, waiting: Flags) -> float:
    """The largest difference of service between two clients over any time in which both always had requests waiting,
    in input tokens: what VTC's theorem 4.4 bounds. Clients are rows, moments columns."""
    largest = 0.0
    for first, second in combinations(range(len(served)), 2):
        ahead = served[first] - served[second]
        both = waiting[first] & waiting[second]
        edges = np.flatnonzero(np.diff(both, prepend=False, append=False))
        for begin, end in edges.reshape(-1, 2):
            largest = max(largest, float(np.ptp(ahead[begin:end])))
    return largest


def service_of(answers: Sequence[Answer], span: Span, input_weight: float, output_weight: float) -> Floats:
    """What each client was served in a span, in order of their names. ValueError: nobody was served in it."""
    edges = np.array([span.begin_s, span.end_s])
    found: Floats = np.diff(accumulated(answers, edges, input_weight, output_weight), axis=1)[:, 0]
    if not found.sum() > 0:
        raise ValueError(f"nobody was served in {span}")
    return found


def service_ratio(answers: Sequence[Answer], span: Span) -> float:
    """The service of the best served client over that of the worst served; infinite if one got none."""
    service = service_of(answers, span, INPUT_WEIGHT, OUTPUT_WEIGHT)
    worst = service.min()
    return float(service.max() / worst) if worst > 0 else float("inf")


def tokens_per_s(answers: Sequence[Answer], span: Span) -> float:
    """Prompt and output tokens of all clients."""
    return float(service_of(answers, span, 1.0, 1.0).sum() / span.length_s)


def judge(answers: Sequence[Answer], span: Span) -> Fairness:
    """The figures of a span. ValueError: it is shorter than a window, or nobody was served in it."""
    begins = span.windows()
    rate = service_of(answers, span, INPUT_WEIGHT, OUTPUT_WEIGHT).sum() / span.length_s
    served = accumulated(answers, begins + WINDOW_S) - accumulated(answers, begins)
    found = differences(served, demanded(answers, begins, WINDOW_S)) / WINDOW_S / rate
    return Fairness(
        service_ratio=service_ratio(answers, span),
        max_diff_over_rate=float(found.max()),
        mean_diff_over_rate=float(found.mean()),
        tokens_per_s=tokens_per_s(answers, span),
    )


def light_clients(answers: Sequence[Answer], length_s: float, rate: float) -> frozenset[str]:
    """Clients that ask for less than their fair share: than one of as many equal parts of what can be served.

    Args:
        length_s: of the trace, from 0.
        rate: of service, that there is for all.
    """
    asked = demanded(answers, np.zeros(1), length_s)[:, 0]
    clients = clients_of(answers)
    return frozenset(one for one, worth_ in zip(clients, asked, strict=True) if worth_ < rate * length_s / len(clients))


def first_token_waits(answers: Sequence[Answer], clients: Collection[str]) -> list[float]:
    """Seconds from arrival to the first token, of every request of these clients.

    Raises:
        ValueError: one has none: leaving it out would flatter whoever let it wait.
    """
    waits = []
    for answer in answers:
        if answer.client in clients:
            if answer.first_s is None:
                raise ValueError(f"a request of {answer.client!r} has no first token")
            waits.append(answer.first_s - answer.arrived_s)
    return waits


def p99(values: Sequence[float]) -> float:
    """By linear interpolation. ValueError: no values."""
    if not values:
        raise ValueError("no values")
    return float(np.quantile(np.asarray(values), P99))
