"""The models behind one name side by side, from the records of its requests. Pure.

A request that left a model for the next one counts as an error of the model that it left, and as a request of the model
on which it ended. The second run of a request, on a shadow, is a request of that model. What a limit of the key or
tenant refused, what was wrong with a request itself, and what its client left, says nothing of a model.

Intervals are of 95%: of a share Wilson's (E. B. Wilson, "Probable Inference", 1927), of a median the two order
statistics around it (W. J. Conover, "Practical Nonparametric Statistics", 3.2), which need no assumption of how times
are distributed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from serve_app.core.limits import LimitReason
from serve_app.types import Outcome

Z = 1.96  # of a normal distribution, 95% are within so many standard deviations
_FAILED = (Outcome.ENGINE_FAILED, Outcome.INTERNAL_ERROR)
_LIMITS = frozenset(reason.value for reason in LimitReason)


class Estimate(NamedTuple):
    """A figure with the ends of its interval."""

    value: float
    low: float
    high: float


class ComparedModel(NamedTuple):
    """What the requests to a name say of one of its models. None: no request says it.

    Args:
        requests: that count. errors: the share that failed, was refused, or left the model.
        first_token_s, token_s, output_tokens: medians of answers: to the first token, between tokens, and their length.
    """

    model: str
    requests: int
    errors: Estimate | None
    first_token_s: Estimate | None
    token_s: Estimate | None
    output_tokens: Estimate | None


def compared(name: str, models: Iterable[str], records: Iterable[Mapping[str, Any]]) -> list[ComparedModel]:
    """The figures of each model. `records`: as the request log has them; those of other names are passed over."""
    named = [record for record in records if record["asked_model"] == name]
    return [_figures(model, named) for model in models]


def _figures(model: str, records: Sequence[Mapping[str, Any]]) -> ComparedModel:
    left = sum(model in (hop[0] for hop in record["hops"]) for record in records)
    ended = [record for record in records if record["model"] == model]
    answered = [record for record in ended if record["outcome"] == Outcome.OK]
    refused = sum(record["outcome"] == Outcome.REFUSED and record["refused"] not in _LIMITS for record in ended)
    failed = left + refused + sum(record["outcome"] in _FAILED for record in ended)
    return ComparedModel(
        model,
        failed + len(answered),
        share(failed, failed + len(answered)),
        *(median([record[field] for record in answered]) for field in ("first_token_s", "itl_s", "output_tokens")),
    )


def share(count: int, total: int) -> Estimate | None:
    """A share of independent trials. None: there are none."""
    if not total:
        return None
    part = count / total
    weight = 1 + Z * Z / total
    middle = (part + Z * Z / (2 * total)) / weight
    spread = Z / weight * math.sqrt(part * (1 - part) / total + Z * Z / (4 * total * total))
    return Estimate(part, max(0.0, middle - spread), min(1.0, middle + spread))


def median(found: Iterable[float | None]) -> Estimate | None:
    """The median of what is known. None: nothing is. With less than six, the interval is all that was seen."""
    values = sorted(value for value in found if value is not None)
    if not values:
        return None
    count = len(values)
    spread = Z * math.sqrt(count) / 2
    low = max(0, math.floor(count / 2 - spread))
    high = min(count - 1, math.ceil(count / 2 + spread))
    value = (values[(count - 1) // 2] + values[count // 2]) / 2
    return Estimate(value, values[low], values[high])
