"""Entries of a Redis stream through workers that are deployed: replies, dead letters, and a worker killed meanwhile.
The last test ends the stack, and looks at what of a request's use the store has then."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import redis

from benchmarks.common.processes import title_of
from serve_app.names import BATCH_WORKER
from serve_app.store import UsageQuery
from serve_app.store.sql import SqlStore
from tests.e2e import stack as stacks
from tests.e2e.crashing import kill
from tests.e2e.stack import BATCH_KEY, PEOPLE_KEY, Stack
from tests.fakes.redis_server import redis_server
from tests.requires import requires
from tests.waiting import wait_until

pytestmark = pytest.mark.long  # a stack of its own; tests/batch has streams on one router

MODEL = "streamed"
STEP_S = 0.005
ROWS = "rows"
REPLIES = "answers"
DEAD = "dead"
MINE = "answers:mine"
# each runs for 1.5 s, eight at a time
ENTRIES = 60
TOKENS = 300
USED = ("requests", "output_tokens")
CLAIM_IDLE_S = 2.0  # the other worker claims what the killed one had
READ_S = 30.0  # for entries to be read, and for their use to be reported: a second on an idle machine
ANSWERED_S = 60.0  # for 60 entries, a third of them again: 15 s on an idle machine


@dataclass
class StreamStack:
    """The stack, and Redis as a producer and a reader of replies see it."""

    stack: Stack
    redis: redis.Redis
    ends: ExitStack  # the stack's; closed, it is taken down

    def add(self, **fields: str) -> str:
        found: Any = self.redis.xadd(ROWS, fields)  # type: ignore[arg-type]  # of its stubs
        return str(found.decode())

    def entries(self, stream: str) -> list[dict[str, str]]:
        found: Any = self.redis.xrange(stream)
        return [{name.decode(): value.decode() for name, value in fields.items()} for _, fields in found]

    def consumers(self) -> dict[int, int]:
        """Entries in flight, by the process of the worker that has them."""
        found: Any = self.redis.xinfo_consumers(ROWS, "serve-app")
        return {int(one["name"].decode().rsplit("-", 2)[1]): one["pending"] for one in found}


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StreamStack]:
    requires("linux")
    with redis_server() as server:
        stream = {"stream": ROWS, "reply_stream": REPLIES, "dead_stream": DEAD, "reply_prefix": "answers:"}
        config: dict[str, Any] = {
            "models": [
                {
                    "name": MODEL,
                    "engine": "simulated",
                    "max_num_seqs": 8,
                    "cpus_per_rank": 0.5,
                    "simulated": {"decode_step_s": STEP_S},
                }
            ],
            "auth": {
                "keys": [
                    {"key": PEOPLE_KEY, "tenant": "people", "admin": True},
                    {"key": BATCH_KEY, "name": "nightly", "tenant": "research"},
                ]
            },
            "batch": {
                "workers": 2,
                "redis": {
                    "url": server.url,
                    "streams": [{**stream, "key_id": "nightly", "claim_idle_s": CLAIM_IDLE_S}],
                },
            },
        }
        with ExitStack() as ends, server.client() as client:
            own_stack = ends.enter_context(stacks.own(tmp_path_factory.mktemp("streamed"), config, name="streamed"))
            yield StreamStack(own_stack, client, ends)


def request(prompt: str, tokens: int = TOKENS, model: str = MODEL) -> str:
    return json.dumps({"model": model, "prompt": prompt, "max_tokens": tokens})


def used(own_stack: Stack) -> Counter[str]:
    """What the store has of rows."""
    found = own_stack.get("/admin/usage?by=model").json()["data"]
    return Counter({name: one[name] for one in found for name in USED if one["model"] == f"{MODEL} (batch)"})


def test_entries_are_answered_once_each_though_a_worker_is_killed_that_runs_some(streamed: StreamStack) -> None:
    ids = [
        streamed.add(endpoint="/v1/completions", body=request(f"Say {number}"), id=f"order-{number}")
        for number in range(ENTRIES)
    ]
    own = streamed.add(endpoint="/v1/completions", body=request("Mine", 5), reply_to=MINE)
    wrong = streamed.add(endpoint="/v1/completions", body=request("No", 5, model="unknown"))
    wait_until(lambda: len(streamed.entries(REPLIES)) > 0, READ_S, "some are answered")
    in_flight = streamed.consumers()
    killed = max(in_flight, key=lambda pid: in_flight[pid])
    assert in_flight[killed] > 0
    assert title_of(killed).startswith(f"ray::ServeReplica:serve_app:{BATCH_WORKER}")
    kill(killed)
    answered = lambda: {one["entry"] for one in streamed.entries(REPLIES)}  # noqa: E731
    wait_until(lambda: len(answered()) + len(streamed.entries(MINE)), ANSWERED_S, "replies", wanted=ENTRIES + 2)
    wait_until(lambda: sum(streamed.consumers().values()), READ_S, "entries in flight", wanted=0)

    replies = streamed.entries(REPLIES)
    assert answered() == {*ids, wrong}
    assert {one["status"] for one in replies if one["entry"] != wrong} == {"200"}
    assert [(one["entry"], one["status"]) for one in streamed.entries(MINE)] == [(own, "200")]
    assert [(one["entry"], one["reason"][:3]) for one in streamed.entries(DEAD)] == [(wrong, "404")]
    tokens = Counter(json.loads(one["body"])["usage"]["completion_tokens"] for one in replies if one["entry"] != wrong)
    assert tokens.keys() == {TOKENS}
    once = Counter(requests=ENTRIES + 1, output_tokens=ENTRIES * TOKENS + 5)
    wait_until(lambda: used(streamed.stack), READ_S, "each counted once", wanted=once)


def test_no_use_is_lost_at_a_normal_end(streamed: StreamStack) -> None:
    cluster = streamed.stack.cluster
    assert cluster is not None
    file = cluster.state.store_file
    body = {"model": MODEL, "prompt": "a b c", "max_tokens": 5}
    assert streamed.stack.post("/v1/completions", body).status_code == 200  # and the end begins before the next report
    streamed.ends.close()
    found = SqlStore(f"sqlite:///{file}").usage(UsageQuery(by=("tenant",)))
    (row,) = [one for one in found if one.tenant == "people"]
    assert (row.requests, row.prompt_tokens, row.output_tokens, row.unsettled) == (1, 3, 5, 0)
