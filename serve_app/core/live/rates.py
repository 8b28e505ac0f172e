"""How fast requests end and tokens come, from what the routers had counted at two moments."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from serve_app.core.live.parts import RouterPart

MIN_GAP_S = 0.2  # less between two counts says little of a rate

Rates = Mapping[tuple[str, str | None], tuple[float, float]]  # requests and tokens a second; as `Counts`


def rates(before: Mapping[str, RouterPart], now: Mapping[str, RouterPart]) -> Rates:
    """Requests and output tokens a second by model and tenant, over the routers that have counted at both moments.

    A count that has fallen adds nothing: its router forgot it, or tokens are of a request between two runs.
    """
    found: dict[tuple[str, str | None], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for router, part in now.items():
        earlier = before.get(router)
        if earlier is None or part.at - earlier.at < MIN_GAP_S:
            continue
        for key, counts in part.counts.items():
            for index, (count, old) in enumerate(zip(counts, earlier.counts.get(key, ()), strict=False)):
                found[key][index] += max(0, count - old) / (part.at - earlier.at)
    return {key: (requests, tokens) for key, (requests, tokens) in found.items()}
