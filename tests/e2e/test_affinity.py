"""Requests that begin alike run where their prefix is cached: three routers, two replicas, simulated engines."""

from __future__ import annotations

import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.stack import Stack
from tests.e2e.three import WIDE

PREFIXES = 12
REQUESTS = 6  # of each prefix
CLIENTS = 8
SHARE = 0.95  # one by one nothing is in the way; a channel that has just opened may move a bound once
# rounds in a row that say that all routers have slots of both replicas; rounds at most
ALIKE = 3
ROUNDS = 30
BUSY_SHARE = 0.85  # eight at once are below the quarter of a replica's slots that is free of the bound, mostly
PLACED = re.compile(rf'serve_app_placements_total{{router="[^"]+",key="prefix",model="{WIDE}",place="([^"]+)"}} (\S+)')


def prompt(kind: str, prefix: int, number: int) -> str:
    return f"{kind} {prefix}: " + "the beginning of them all " * 100 + f"{number}"


def ask(three: Stack, kind: str, prefix: int, number: int) -> str:
    """The request's id."""
    body = {"model": WIDE, "prompt": prompt(kind, prefix, number), "max_tokens": 3}
    answer = three.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    return str(answer.headers["x-serve-app-request-id"])


def replica_of(three: Stack, kind: str, prefix: int, number: int) -> str:
    """The replica that has answered."""
    return str(three.get(f"/admin/requests/{ask(three, kind, prefix, number)}").json()["replica_id"])


def await_both_replicas(three: Stack) -> None:
    """Modules before this one end replicas and routers: until a router has slots of the one that came for them, what
    belongs there runs elsewhere."""
    rounds: list[list[str]] = []
    while len(rounds) < ALIKE or rounds[-ALIKE:] != [rounds[-1]] * ALIKE or len(set(rounds[-1])) < 2:
        assert len(rounds) < ROUNDS, rounds[-ALIKE:]
        rounds.append([replica_of(three, "before", prefix, len(rounds)) for prefix in range(PREFIXES)])


def test_requests_that_begin_alike_run_on_one_replica_through_all_routers(three: Stack) -> None:
    await_both_replicas(three)
    where: dict[int, Counter[str]] = {}
    for number in range(REQUESTS):
        for prefix in range(PREFIXES):
            where.setdefault(prefix, Counter())[replica_of(three, "calm", prefix, number)] += 1
    found = sum(max(counts.values()) for counts in where.values()) / (PREFIXES * REQUESTS)
    homes = {counts.most_common(1)[0][0] for counts in where.values()}
    print(f"{found:.1%} of {PREFIXES * REQUESTS} requests ran where their prefix is; {PREFIXES} prefixes, {homes}")
    assert found >= SHARE, where
    assert len(homes) == 2, where


def placed(three: Stack) -> Counter[str]:
    """Requests of all routers by how their replica was chosen."""
    found: Counter[str] = Counter()
    for route, count in PLACED.findall(three.get("/metrics").text):
        found[route] += round(float(count))
    return found


@pytest.mark.long
def test_under_load_most_requests_still_do(three: Stack) -> None:
    before = placed(three)
    with ThreadPoolExecutor(CLIENTS) as pool:
        asked = [pool.submit(ask, three, "busy", prefix, number) for number in range(40) for prefix in range(PREFIXES)]
        for answer in asked:
            answer.result()
    found = placed(three) - before
    home = found["home"] / found.total()
    print(f"{home:.1%} at home with {CLIENTS} at once: {found}")
    assert home >= BUSY_SHARE, found
