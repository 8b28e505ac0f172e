"""How many slots are kept free for interactive classes, so that their requests start under overload without a wait.

Priority alone decides which request gets the next slot, not when: with all slots busy, one comes free every 1/capacity
seconds, several times an unloaded first token. So a class below `GUARDED_FROM` is granted nothing while no more than
the guard slots are free. If the guarded classes take the part p of the drain, n free slots are used up with probability
p^n (n arrivals of theirs before the next release), so n = log(`BLOCKING_PROBABILITY`) / log(p): eight slots if they are
four tenths of the load, three for one tenth, none if they do not arrive, whatever the engine's size. At most the
policy's share of all slots. The minimum share is exempt: it holds however many guarded requests arrive.

These are the guard channels of telephone exchanges (Hong and Rappaport, 1986).

Invariant: with nothing running every class can start; guard slots only delay a lower class until a request ends.
"""

from __future__ import annotations

import math

from serve_app.types import RequestClass

GUARDED_FROM = RequestClass.HIGH  # the lowest guarded class: from here on a person waits for the answer
# Part of the guarded requests that find no free slot: their p99 is promised, and 0.01 would make it the blocked ones.
BLOCKING_PROBABILITY = 0.001


def guard_slots(share: float, slots: int, drain_part: float) -> int:
    """How many of `slots` are kept free; `drain_part`: the part of the drain that the guarded classes take."""
    if drain_part <= 0.0:
        return 0
    wanted = round(math.log(BLOCKING_PROBABILITY) / math.log(drain_part)) if drain_part < 1.0 else slots
    return min(math.floor(share * slots), wanted)
