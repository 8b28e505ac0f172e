"""Slots kept free for people, so that one who comes under overload need not wait until another's answer has ended.

Order alone decides who gets the next slot, not how soon there is one: with all of them busy one comes free each
1/capacity seconds, several times an unloaded first token. So a class below `CLASSES_FROM` is granted nothing while no
more than the headroom is free. Where those it is for take the part p of the drain, n free slots are used up with
probability p^n (each is an arrival of theirs before the next end), so n = log(`MISSED`) / log(p): eight slots where
they are four tenths of the load, three where they are a tenth, none where they do not come, however large the engine
is. At most the policy's share of all slots. The trickle is exempt: what it promises holds however many of them come.

These are the guard channels of telephone exchanges (Hong and Rappaport, 1986).

Invariant: with nothing running every class can start; all that the headroom ever does is to wait for an end.
"""

from __future__ import annotations

import math

from serve_app.types import RequestClass

CLASSES_FROM = RequestClass.HIGH  # whom it is for: those with somebody at the other end
MISSED = 0.001  # of them find no free slot: one promises their p99, and with one in a hundred it would be who waited


def kept(share: float, slots: int, part: float) -> int:
    """Slots of all `slots` that are kept free, `part` being the part of the drain that goes to those it is for."""
    if part <= 0.0:
        return 0
    wanted = round(math.log(MISSED) / math.log(part)) if part < 1.0 else slots
    return min(math.floor(share * slots), wanted)
