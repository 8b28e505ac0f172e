"""The load of a trace: the requests to simulate, as the options cut and change them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from autoscaling.simulator import SimulatedRequest, read_trace
from serve_app.errors import BadRequest
from serve_app.types import CLASS_ALIASES, RequestClass


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What is taken of a trace.

    Args:
        model: that all requests ask for; None: the trace's own, or the first of the configuration.
        request_class: of all requests; None: the trace's own.
        scale: arrivals come so many times as fast.
        last_s: only requests of the last so many seconds of the trace, before `scale`; None: all.
        most: at most so many of them, the first; None: all.
    """

    model: str | None = None
    request_class: str | None = None
    scale: float = 1.0
    last_s: float | None = None
    most: int | None = None


def load_of(lines: Iterable[str], models: Sequence[str], options: LoadOptions) -> list[SimulatedRequest]:
    """The requests, in order; the first comes at 0.

    Raises:
        BadRequest: the trace or an option is wrong, or a request asks for a model that is not configured.
    """
    if options.model is not None and options.model not in models:
        raise BadRequest(f"--model {options.model}: the configuration has {', '.join(models)}", param="--model")
    if options.request_class is not None and options.request_class not in CLASS_ALIASES:
        known = ", ".join(each.label for each in RequestClass)
        raise BadRequest(f"--class {options.request_class}: it is none of {known}", param="--class")
    found = read_trace(lines, options.model or models[0])
    if options.last_s is not None:
        begin_s = found[-1].at_s - options.last_s
        found = [request for request in found if request.at_s >= begin_s]
    found = found[: options.most]
    begin_s = found[0].at_s
    load = [_changed(request, begin_s, options) for request in found]
    unknown = Counter(request.model for request in load if request.model not in models)
    if unknown:
        name, count = unknown.most_common(1)[0]
        raise BadRequest(
            f"model: {count} requests of the trace ask for {name!r}, which the configuration does not have; "
            "--model NAME sends all requests to one model",
            param="model",
        )
    return load


def _changed(request: SimulatedRequest, begin_s: float, options: LoadOptions) -> SimulatedRequest:
    given = options.request_class
    return replace(
        request,
        at_s=(request.at_s - begin_s) / options.scale,
        model=options.model or request.model,
        request_class=request.request_class if given is None else CLASS_ALIASES[given],
    )
