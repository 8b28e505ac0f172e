"""What a decision costs: CPU of the cores of a router and of the quota actor, without the network between them.

`far`: a router charges on its credit. `near`: of keys that ask for three times their limits, the router asks and the
actor decides; a third is charged, the others are told a moment and never come back. Both with `SCOPES` keys in turn,
the end of what was charged, heartbeats, and reservations that are given up.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from typing import Any

from serve_app.core.limits import ActorLimits, Charged, LimitedRequest, Limits, RouterLimits

SCOPES = 1_000
WARM_EACH = 60
DECISIONS = 50_000
STEP_S = 0.0005  # between requests: 2,000 a second, two a second of each key
FAR = Limits(1e6, 1e9, None, None, 1_000)
NEAR = Limits(40.0, 20_000.0, None, None, 8)  # 0.67 requests a second of 500 tokens each


def decision_us() -> dict[str, float]:
    """Microseconds a decision."""
    return {"far": _measure(FAR), "near": _measure(NEAR)}


def _measure(limits: Limits) -> float:
    sent: list[Any] = []  # to the actor
    answers: list[Any] = []
    router = RouterLimits("r", sent.append)
    actor = ActorLimits(1, lambda to, action: answers.append(action), lambda: 1, 0.0)
    scopes = [((f"key:{number}", limits),) for number in range(SCOPES)]
    names = itertools.count()
    now = 0.0
    running = deque[tuple[float, str]]()
    beat_at = 0.0

    def exchange() -> None:
        while sent or answers:
            for event in sent:
                actor.on_event("r", event, now)
            sent.clear()
            actor.after_event(now)
            for action in answers:
                router.on_action(action, now)
            answers.clear()

    def decide(number: int) -> None:
        name = f"q{next(names)}"
        request = LimitedRequest(name, scopes[number % SCOPES], 500, 0, name.encode())
        decision = router.on_arrive(request, now, is_fenced=False, may_ask=True)
        if decision is None:
            exchange()
            decided, router.decided = router.decided, []
            decision = decided[0] if decided else None
        if isinstance(decision, Charged):
            running.append((now + 0.5, name))

    warm = SCOPES * WARM_EACH  # the bursts are used up then, of the keys that are near
    began = 0.0
    for number in range(warm + DECISIONS):
        if number == warm:  # once: this clock costs more than a decision
            began = time.process_time()
        now += STEP_S
        decide(number)
        while running and running[0][0] <= now:
            router.on_end(running.popleft()[1], 400, 0, now)
        if now >= beat_at:
            beat_at = now + 1.0
            router.on_heartbeat(now)
            actor.on_tick(now)
        due = actor.next_due()
        if due is not None and due <= now:
            actor.on_tick(now)
        exchange()
    return round((time.process_time() - began) / DECISIONS * 1e6, 1)
