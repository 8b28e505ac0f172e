"""The JSON of a receipt stays what programs read, byte for byte but for what a clock measures, however a request ends.

`receipts.json` was written by this module when a receipt still copied each of its fields.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Container
from pathlib import Path
from typing import Any

import pytest

from serve_app.core.limits import LimitReason
from serve_app.errors import RateLimited
from serve_app.router import ModelRouter
from tests.fakes.asgi_client import CHAT, Client, Reply, ask, cancel, running, started
from tests.fakes.engines import MODEL, FakeCluster, model, run, turns, until
from tests.fakes.router import LONG, SOON_S

BEFORE = Path(__file__).with_name("receipts.json")
ADMISSION = {"classes": {"normal": {"ttft_slo_s": 60.0, "itl_slo_s": 60.0}}}
ID = {"X-Request-Id": "asked"}
PROMPTS = ["one two", "three", "four five six"]
Scenario = Callable[[Client, FakeCluster], Awaitable[None]]


def masked_receipt(body: bytes, known: Container[str]) -> str:
    """The known fields of a receipt, without ids that are made up, and without what a clock has measured."""
    fields = {name: value for name, value in json.loads(body).items() if name in known}
    text = re.sub(r"[0-9a-f]{32}", "ID", json.dumps(fields, separators=(",", ":")))
    text = re.sub(r"\d+\.\d+(e-\d+)?", lambda found: found[0] if float(found[0]) == 0.0 else "F", text)
    text = re.sub(r'"(itl_s|longest_gap_s)":(null|F|0\.0)', r'"\1":T', text)
    text = re.sub(r", then \w+ m?s a token( with a pause of \w+ m?s at most)?", "", text)
    text = re.sub(r", \w+ m?s of it for a limit of its key or tenant", "", text)
    text = re.sub(r',"(First token|Waits by reason): [^"]*"', "", text)  # new sentences between
    text = re.sub(r"(Started at once|Started after \w+ m?s|Waited \w+ m?s)", "Began", re.sub(r"\d+ ms\b", "F ms", text))
    text = re.sub(r"held [\d,]+ KV", "held N KV", re.sub(r"\br[12]\b", "replica", text))
    text = re.sub(r"\bF m?s\b", "F s", text)
    if "answered after" in text:
        return text
    text = re.sub(r"used 2 \+ [1-9]\d*", "used 2 + N", text)  # tokens that had come when it was cut off
    return re.sub(r'"output_tokens":[1-9]\d*', '"output_tokens":N', text)


def posts(body: dict[str, Any], path: str = "/v1/completions", **headers: str) -> Scenario:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        await client.post(body, path=path, headers=ID | {name.replace("_", "-"): headers[name] for name in headers})

    return scenario


async def broken_json(client: Client, cluster: FakeCluster) -> None:
    await client.request("POST", "/v1/completions", b"{", headers=ID)


async def leaves_while_it_runs(client: Client, cluster: FakeCluster) -> None:
    reply = Reply()
    task = client.posting(ask("a b", LONG), headers=ID, reply=reply)
    await until(lambda: bool(reply.chunks), SOON_S, "first frames")
    await cancel(task)


async def leaves_while_it_waits(client: Client, cluster: FakeCluster) -> None:
    first, _ = await running(client, n=4)
    second = client.posting(ask("a b"), headers=ID)
    await turns(20)
    await cancel(second)
    await cancel(first)


async def is_refused_by_its_deadline(client: Client, cluster: FakeCluster) -> None:
    first, _ = await running(client, n=4, prompt_logprobs=1)
    second = client.posting(ask("waits", priority="high"))
    await turns(20)
    await client.post(ask("no"), headers=ID | {"X-Deadline-Ms": "20"})
    await cancel(second)
    await cancel(first)


async def is_refused_by_a_limit(client: Client, cluster: FakeCluster) -> None:
    client.limits.refusal = RateLimited("per minute", code=LimitReason.RATE_LIMIT, retry_after_s=1.5)
    await client.post(ask("a b"), headers=ID)


async def waits_for_a_limit(client: Client, cluster: FakeCluster) -> None:
    client.limits.waited_s = 3.0
    await client.post(ask("a b"), headers=ID)


async def is_replayed(client: Client, cluster: FakeCluster) -> None:
    for headers in ({}, ID):
        await client.post(ask("a b"), headers={**headers, "Idempotency-Key": "k"})


async def loses_its_engine(client: Client, cluster: FakeCluster) -> None:
    reply = Reply()
    task = client.posting(ask("a b", LONG), headers=ID, reply=reply)
    await until(lambda: bool(reply.chunks), SOON_S, "first frames")
    client.model.replica_set.info = None  # no engine is known that could go on
    cluster.kill("r1")
    await task


async def continues_elsewhere(client: Client, cluster: FakeCluster) -> None:
    await cluster.add("r2")
    reply = Reply()
    task = client.posting(ask("a b", 400), headers=ID, reply=reply)
    await until(lambda: bool(reply.chunks), SOON_S, "first frames")
    cluster.kill("r1" if cluster["r1"].work else "r2")
    await task


async def is_moved(client: Client, cluster: FakeCluster) -> None:
    reply = Reply()
    task = client.posting(ask("a b", 400), headers=ID, reply=reply)
    await until(lambda: bool(reply.chunks), SOON_S, "first frames")
    assert client.model.stop_drained("r1") == 0
    await task


async def meets_an_error_of_ours(client: Client, cluster: FakeCluster) -> None:
    async def failing(*_: Any) -> None:
        raise RuntimeError("an error of ours")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRouter, "serve", failing)
        await client.post(ask("a b"), headers=ID)


CHATS = {"model": MODEL, "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 3}
GENERATING: dict[str, Scenario] = {
    "answered": posts(ask("one two three", 7)),
    "of a class without a level": posts(ask("one two three", 7, priority="high")),
    "two answers, not streamed": posts({**CHATS, "n": 2}, CHAT),
    "responses": posts({"model": MODEL, "input": "hello there", "max_output_tokens": 3}, "/v1/responses"),
    "a list": posts(ask(PROMPTS, 4, n=2, stream=False)),
    "a list with an entry that is none": posts(ask([*PROMPTS, None], 4)),  # type: ignore[list-item]
    "tokenize": posts({"model": MODEL, "prompt": "a b c"}, "/tokenize"),
    "broken json": broken_json,
    "no such model": posts(ask("p", model="no")),
    "no such class": posts(ask("p", priority="critical")),
    "too many answers": posts(ask("p", n=4000)),
    "more than a replica has": posts(ask("p", n=8)),
    "empty": posts(ask("", stream=False)),
    "leaves while it runs": leaves_while_it_runs,
    "leaves while it waits": leaves_while_it_waits,
    "refused by its deadline": is_refused_by_its_deadline,
    "refused by a limit": is_refused_by_a_limit,
    "waits for a limit": waits_for_a_limit,
    "replayed": is_replayed,
    "loses its engine": loses_its_engine,
    "continues elsewhere": continues_elsewhere,
    "moved": is_moved,
    "an error of ours": meets_an_error_of_ours,
}
TEXTS = [f"text number {number}" for number in range(70)]
POOLING: dict[str, Scenario] = {
    "embeddings": posts({"model": MODEL, "input": TEXTS}, "/v1/embeddings"),
    "one embedding": posts({"model": MODEL, "input": TEXTS[0]}, "/v1/embeddings"),
    "rerank": posts({"model": MODEL, "query": "which", "documents": TEXTS, "top_n": 3}, "/v1/rerank"),
    "score of pairs": posts({"model": MODEL, "text_1": TEXTS, "text_2": TEXTS}, "/v1/score"),
    "score of one": posts({"model": MODEL, "text_1": "a", "text_2": "b c"}, "/v1/score"),
}


def receipt_of(name: str) -> bytes:
    found: list[bytes] = []

    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1", admission=ADMISSION, limits={"requests_per_minute": 60})
        await {**GENERATING, **POOLING}[name](client, cluster)
        await asyncio.sleep(0)
        found.append((await client.get("/admin/requests/asked")).body)

    run(scenario, model(task="embed") if name in POOLING else model())
    return found[0]


@pytest.mark.parametrize("name", [*GENERATING, *POOLING])
def test_a_receipt_is_reported_as_before_in_the_same_order_with_new_facts_between(name: str) -> None:
    before = json.loads(BEFORE.read_text())
    assert masked_receipt(receipt_of(name), before["fields"]) == before["receipts"][name]


if __name__ == "__main__":
    bodies = {name: receipt_of(name) for name in (*GENERATING, *POOLING)}
    names = list(json.loads(bodies["answered"]))
    texts = {name: masked_receipt(body, names) for name, body in bodies.items()}
    BEFORE.write_text(json.dumps({"fields": names, "receipts": texts}, indent=1) + "\n")
