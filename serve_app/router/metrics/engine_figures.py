"""The metrics of engines, from their loads as a scrape has just fetched them."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from serve_app.router.metrics.families import Families
from serve_app.router.metrics.table import EngineFigure
from serve_app.transport import EngineLoad

_OF_LOAD = {figure.name.lower(): figure for figure in EngineFigure if not figure.value.is_old}


def engine_families(loads: Mapping[str, Mapping[str, EngineLoad]]) -> Families:
    """One metric for each figure of a load. `loads`: by model and replica."""
    families = Families(EngineFigure)
    for model, by_replica in loads.items():
        for replica, load in by_replica.items():
            for name, value in msgspec.structs.asdict(load).items():
                families.add(_OF_LOAD[name], value, model, replica)
                families.add(EngineFigure.OLD, value, model, replica, name)
    return families
