"""What a router's message costs the quota actor's core while a session waits: 20 routers, 200 engines of one model.

Every message has an arrival and an end, as `benchmarks.exchange` has them; CPU time of one core, of the message and of
what the actor does with it besides. A session waits throughout for more tokens than any engine has free.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from benchmarks.exchange import MODEL, connected
from serve_app.core.memory import SessionRequest
from serve_app.core.quota import Quota

ROUTERS = 20
ENGINES = 200
SLOTS = 64
POOL_TOKENS = 100_000
MESSAGES = 500
QUICK_MESSAGES = 100
WARM = 20  # messages
RUNNING = 2  # of a router on each engine, in the mean


def tick_us(seed: int, quick: bool) -> float:
    """Microseconds a message with a session waiting, in the mean."""
    messages = QUICK_MESSAGES if quick else MESSAGES
    draw = random.Random(seed)
    quota, routers = connected(ENGINES, SLOTS, POOL_TOKENS, ROUTERS)
    for router in routers:
        for _ in range(RUNNING * ENGINES):
            router.say(quota, (router.arrive(),), 0.0)
    after = wait_for_session(quota)
    spent_s = 0.0
    now = 0.0
    for number in range(WARM + messages):
        now += 5e-4
        router = draw.choice(routers)
        events = (router.arrive(), router.end()) if router.running else (router.arrive(),)
        took_s = router.say(quota, events, now)
        began = time.process_time()
        after(now)
        quota.queue.router_sessions.take_woken()
        quota.queue.next_due()
        took_s += time.process_time() - began
        spent_s += took_s if number >= WARM else 0.0
    return round(spent_s / messages * 1e6, 1)


def wait_for_session(quota: Quota) -> Callable[[float], object]:
    """Have a session wait; returns what the actor's shell does after each message while one does."""
    ask = SessionRequest("tenant session", MODEL, int(0.9 * POOL_TOKENS), 1e6, wait_until=1e6)
    if quota.on_open_session(ask, 0.0) is not None:
        raise RuntimeError("the session does not wait")
    return lambda now: quota.queue.session_admission.take_outcomes()
