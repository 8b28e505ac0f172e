"""The load that `benchmarks.overload` offers: who asks when, for how much, under which label. Pure.

Lengths are pairs drawn from the Azure conversation trace, prompt and answer scaled by the one factor that makes the
mean answer `MEAN_OUTPUT_TOKENS`. Arrivals are Poisson. A *group* (high, normal, low) and a tenant are drawn for each
request; what an arm makes of them is its labels.

Invariant: the same seed, rate and span give the same requests, whichever arm they are sent to.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.common.traces import AZURE_FILE, recorded
from benchmarks.common.workload import CHAT_PATH, chat, post
from serve_app.engine import WORDS

MEAN_OUTPUT_TOKENS = 128
HIGH = "high"
NORMAL = "normal"
LOW = "low"
GROUPS = (HIGH, NORMAL, LOW)
GROUP_SHARES = (0.1, 0.4, 0.5)
TENANTS = 4
TEMPLATE_TOKENS = 11  # what the chat template of the built-in model sets around one message
SPARE_TOKENS = 16  # below the model's length: a request of just that length is vLLM's to refuse

Lengths = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Offer:
    """One request. `at_s` counts from the beginning of the load; a prompt's tokens include the template's."""

    number: int
    at_s: float
    group: str
    tenant: int
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Label:
    """How an arm sends a request: with whose key, in which class (None: none is named) and by which deadline."""

    api_key: str
    priority: str | None = None
    deadline_ms: int | None = None


def lengths(folder: Path, longest: int) -> Lengths:
    """Prompt and answer of each request of the trace, scaled; those that exceed `longest` tokens together are left out.

    Raises:
        TraceMissingError: the trace is not in the folder.
    """
    rows = [(one.prompt_tokens, one.output_tokens) for one in recorded(folder, AZURE_FILE)]
    return scaled(rows, longest)


def scaled(rows: Lengths, longest: int) -> Lengths:
    """The rows by one factor, whole tokens, at least one beside the template's and one of an answer."""
    factor = MEAN_OUTPUT_TOKENS / fmean(output for _, output in rows)
    made = [(max(TEMPLATE_TOKENS + 1, round(p * factor)), max(1, round(o * factor))) for p, o in rows]
    return [(prompt, output) for prompt, output in made if prompt + output + SPARE_TOKENS <= longest]


def offers(drawn_from: Lengths, rate: float, span_s: float, seed: int, tenants: int = TENANTS) -> list[Offer]:
    """The arrivals of `span_s` seconds at `rate` requests a second, of so many tenants alike."""
    draw = random.Random(seed)
    at_s = 0.0
    found: list[Offer] = []
    while (at_s := at_s + draw.expovariate(rate)) < span_s:
        group = draw.choices(GROUPS, GROUP_SHARES)[0]
        found.append(Offer(len(found), at_s, group, draw.randrange(tenants), *draw.choice(drawn_from)))
    return found


def endless(drawn_from: Lengths, seed: int, tenants: int = TENANTS) -> Iterator[Offer]:
    """Requests without moments, for a closed loop."""
    draw = random.Random(seed)
    number = 0
    while True:
        group = draw.choices(GROUPS, GROUP_SHARES)[0]
        yield Offer(number, 0.0, group, draw.randrange(tenants), *draw.choice(drawn_from))
        number += 1


def text(offer: Offer, draw: random.Random) -> str:
    """A prompt of that many tokens: a common word is one token, and no two prompts begin alike."""
    return " ".join(draw.choices(WORDS, k=offer.prompt_tokens - TEMPLATE_TOKENS))


def request_bytes(offer: Offer, label: Label, client_id: str, where: str, model: str, prompt: str) -> bytes:
    """The request as HTTP/1.1 on the wire; `where` is host and port."""
    body = chat(model, prompt, offer.output_tokens)
    headers = {"x-request-id": client_id}
    if label.priority is not None:
        body["priority"] = label.priority
    if label.deadline_ms is not None:
        headers["x-deadline-ms"] = str(label.deadline_ms)
    return post(where, CHAT_PATH, label.api_key, body, **headers)
