"""Requests that begin alike run where their prefix is cached: two routers, two replicas, simulated engines."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.changing import OTHER, Place, configured, model, place
from tests.requires import requires

PREFIXES = 12
REQUESTS = 6  # of each prefix
CLIENTS = 8
SHARE = 0.95  # one by one nothing is in the way; a channel that has just opened may move a bound once
BUSY_SHARE = 0.85  # eight at once are below the quarter of a replica's slots that is free of the bound, mostly
BASE = configured(
    model(OTHER, max_num_seqs=32, replicas={"min_replicas": 2, "max_replicas": 2}), router={"replicas": 2}
)
PROMPT_TOKENS = re.compile(r'serve_app_engine\{figure="prompt_tokens",model="other",replica="([^"]+)"\} (\S+)')
PLACED = re.compile(r'serve_app_placed\{router="[^"]+",key="prefix",model="other",place="([^"]+)"\} (\S+)')


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    requires("linux")
    with place(tmp_path_factory.mktemp("affinity"), BASE) as started:
        yield started


def prompt(kind: str, prefix: int, number: int) -> str:
    return f"{kind} {prefix}: " + "the beginning of them all " * 100 + f"{number}"


def ask(there: Place, kind: str, prefix: int, number: int) -> None:
    answer = there.endpoint.ask(OTHER, prompt=prompt(kind, prefix, number))
    assert answer.status == 200, answer.text


def read(there: Place) -> dict[str, float]:
    """Prompt tokens that each replica has taken in, whichever router tells."""
    return {name: float(value) for name, value in PROMPT_TOKENS.findall(there.endpoint.get("/metrics").text)}


def test_requests_that_begin_alike_run_on_one_replica_through_both_routers(there: Place) -> None:
    where: dict[int, Counter[str]] = {}
    for number in range(REQUESTS):
        for prefix in range(PREFIXES):
            before = read(there)
            ask(there, "calm", prefix, number)
            (ran,) = [name for name, tokens in read(there).items() if tokens > before[name]]
            where.setdefault(prefix, Counter())[ran] += 1
    found = sum(max(counts.values()) for counts in where.values()) / (PREFIXES * REQUESTS)
    homes = {counts.most_common(1)[0][0] for counts in where.values()}
    print(f"{found:.1%} of {PREFIXES * REQUESTS} requests ran where their prefix is; {PREFIXES} prefixes, {homes}")
    assert found >= SHARE, where
    assert len(homes) == 2, where


def test_under_load_most_requests_still_do(there: Place) -> None:
    with ThreadPoolExecutor(CLIENTS) as pool:
        asked = [pool.submit(ask, there, "busy", prefix, number) for number in range(40) for prefix in range(PREFIXES)]
        for one in asked:
            one.result()
    placed = {route: float(count) for route, count in PLACED.findall(there.endpoint.get("/metrics").text)}
    home = placed["home"] / sum(placed.values())
    print(f"{home:.1%} at home with {CLIENTS} at once: {placed}")  # of one router, which stands for both
    assert home >= BUSY_SHARE, placed
