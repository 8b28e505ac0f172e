"""What is killed, and when: drawn from a seed.

A kill comes when so many rows are done, so that the kills fall on the whole batch however long the stack takes to come
back. Invariant: with as many kills as kinds, or more, every kind is there.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

LAST_SHARE = 0.9  # of the rows, after which nothing is killed: a kill at the end would hit an idle stack


class Victim(StrEnum):
    """A kind of process; the store's is its owner (SQLite) or its connections (PostgreSQL), the files' their owner."""

    WORKER = "worker"
    ROUTER = "router"
    ENGINE = "engine"
    QUOTA_ACTOR = "quota_actor"
    STORE = "store"
    FILES = "files"


KINDS = tuple(Victim)


@dataclass(frozen=True, slots=True)
class Kill:
    """After `after_rows` rows are done and `pause_s` more, one of this kind."""

    victim: Victim
    after_rows: int
    pause_s: float


@dataclass(frozen=True, slots=True)
class Shape:
    """The stack and the batch. What an engine's death costs are the rows that it runs, a router's those that it has:
    with `slots` of each engine, an expected `slots` rows a kill."""

    kills: int
    rows: int = 1_000
    slots: int = 2
    tokens: int = 40
    step_s: float = 0.01
    engines: int = 2
    routers: int = 2


def kills_of(seed: int, count: int, rows: int, kinds: Sequence[Victim] = KINDS) -> list[Kill]:
    """The kills in their order."""
    draw = random.Random(f"{seed} kills")
    chosen = list(kinds)[:count] + draw.choices(kinds, k=max(0, count - len(kinds)))
    draw.shuffle(chosen)
    moments = sorted(draw.randrange(1, max(2, round(rows * LAST_SHARE))) for _ in chosen)
    return [Kill(victim, at, draw.random()) for victim, at in zip(chosen, moments, strict=True)]
