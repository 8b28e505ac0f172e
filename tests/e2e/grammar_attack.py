"""An engine alone under grammars that cost much.

One tenant sends them and leaves after `STAYS_S`; another one's trivial request comes a second after them.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import psutil

from serve_app.settings.settings import BUILT_IN_MODEL
from serve_app.transport import EngineBackend, Submit
from serve_app.types import Operation
from tests.waiting import during, patient, quiet_time, slowness

STAYS_S = 3.0  # as the attack's clients did
SPAN_S = 2.0  # in which idle CPU is measured
IDLE_CPU_S = 0.5  # in a span; one that compiles has 2
SETTLED_S = 8.0  # for what goes on after they left: what is admitted costs 2 s
LATE_S = 90.0  # the trivial request, where nothing bounds the others

TRIVIAL = {"json": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}}


def words(count: int, seed: int) -> list[str]:
    source = random.Random(seed)
    return ["".join(source.choices("abcdefghijklmnopqrstuvwxyz", k=12)) for _ in range(count)]


NESTED = "((((a{0,99}b){0,99}c){0,99}d){0,99}e){0,99}"
ATTACKS: list[dict[str, Any]] = [
    *({"choice": words(100_000, seed)} for seed in range(4)),
    *({"choice": words(15_000, seed)} for seed in range(4)),  # below the bound of size
    {"json": {"enum": words(15_000, 5)}},
    {"json": {"type": "object", "properties": {w: {"type": "string", "pattern": NESTED} for w in words(100, 6)}}},
    {"grammar": "root ::= " + " | ".join(words(3000, 7)) + "".join(f'\n{w} ::= "{w}" [a-z]+' for w in words(3000, 7))},
]
AMBIGUOUS = {"grammar": 'root ::= e\ne ::= "a" e e | "a" e | "a" | [a-z] e | [a-z] e e'}


def cpu_s() -> float:
    """CPU seconds of this process and all below it, those that have ended too."""
    me = psutil.Process()
    own = me.cpu_times()
    below = [child.cpu_times() for child in me.children(recursive=True)]
    each = [times.user + times.system + times.children_user + times.children_system for times in below]
    return own.user + own.system + sum(each)


async def ask(
    backend: EngineBackend, tenant: str, wanted: dict[str, Any], tokens: int = 60, **more: Any
) -> dict[str, Any]:
    body = {"model": BUILT_IN_MODEL.name, "messages": [{"role": "user", "content": "Say."}], "max_tokens": tokens}
    body |= {"structured_outputs": wanted, "temperature": 1.0, "seed": 1} | more
    began = quiet_time()
    answer = b""
    status = 0
    async for piece in backend.run(Submit(1, f"r{random.random()}", Operation.CHAT, body, cache_salt=tenant)):
        status = status or piece.status
        answer += piece.body
    return {"status": status, "seconds": quiet_time() - began, "answer": answer.decode()}


async def seen(backend: EngineBackend) -> dict[str, Any]:
    """What becomes of them."""
    await asyncio.wait_for(ask(backend, "other", TRIVIAL), patient(LATE_S))  # imports, caches
    long = [{"role": "user", "content": "word " * 20_000}]  # starts the process that reads large requests
    await asyncio.wait_for(ask(backend, "other", TRIVIAL, messages=long), patient(LATE_S))
    alone = await ask(backend, "other", {"json": TRIVIAL["json"] | {"title": "1"}})
    before = cpu_s()
    attack = [asyncio.create_task(ask(backend, "attacker", one)) for one in ATTACKS]
    await asyncio.sleep(1.0)  # the attack is under way
    under = asyncio.create_task(ask(backend, "other", {"json": TRIVIAL["json"] | {"title": "2"}}))
    await asyncio.sleep(STAYS_S - 1.0)  # the attackers stay, and then leave
    ended = [task.result() for task in attack if task.done()]
    for task in attack:
        task.cancel()
    try:
        trivial = await asyncio.wait_for(under, patient(LATE_S))
    except TimeoutError:
        trivial = {"status": 0, "seconds": LATE_S, "answer": ""}
    for _ in during(patient(SETTLED_S + SPAN_S)):
        used = (cpu_s() - before) / slowness()
        later = cpu_s()
        await asyncio.sleep(SPAN_S)  # the span in which idle CPU is measured
        after = cpu_s() - later
        if after < IDLE_CPU_S:
            break
    return {
        "alone": alone,
        "under": trivial,
        "ended": [{"status": one["status"], "answer": one["answer"][:500]} for one in ended],
        "attack_cpu_s": used,
        "after_cpu_s": after,
        "refused": await ask(backend, "third", ATTACKS[4]),
        "refused_stream": await ask(backend, "third", ATTACKS[5], stream=True),
        "refused_size": await ask(backend, "third", ATTACKS[0]),
        "ambiguous": await ask(backend, "third", AMBIGUOUS, tokens=900, min_tokens=900),
    }
