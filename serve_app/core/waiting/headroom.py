"""Slots kept free for people, so that one who comes under overload need not wait until another's answer has ended.

Order alone decides who gets the next slot, not how soon there is one: with all of them busy a slot comes free each
1/capacity seconds, several times an unloaded first token. So a class below `CLASSES_FROM` is granted nothing while no
more than the headroom is free. It is as many slots as those classes were granted in the last minute, so it costs
nothing where they do not come, and at most the policy's share of all slots. The trickle is exempt: what it promises
holds however many of the higher classes come.

This is the guard channel of telephone exchanges (Hong and Rappaport, 1986).

Invariant: with nothing running some class below can start; all that the headroom ever does is to wait for an end.
"""

from __future__ import annotations

import math

from serve_app.types import RequestClass

CLASSES_FROM = RequestClass.HIGH  # whom it is for: those with somebody at the other end


def kept(share: float, slots: int, lately: float) -> int:
    """Slots of all `slots` that are kept free, `lately` having been granted to those whom it is for (fading)."""
    return min(math.floor(share * slots), round(lately))
