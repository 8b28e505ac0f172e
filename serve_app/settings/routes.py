"""Names that clients may send in place of a model's: what stands behind each.

Invariant: what parses resolves: a name is no model's, every model behind a name is one of `models`, so no name leads to
another one and none to itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Annotated

from pydantic import Field, model_validator

from serve_app.core.names import DEFAULT_WEIGHT, ModelRoute, Shadow, WeightedModel
from serve_app.settings.mistakes import nearest
from serve_app.settings.model import MODEL_NAME, FrozenSettings

MAX_WEIGHT = 1_000_000.0  # a weight is a part of their sum, in percent or in whatever unit
MAX_MODELS = 32  # of one name: a request hashes each target, and may wait at each fallback

Name = Annotated[str, Field(pattern=MODEL_NAME, max_length=200)]


class TargetSettings(FrozenSettings):
    """A model, and its part of the requests."""

    model: Name
    weight: float = Field(DEFAULT_WEIGHT, ge=0, le=MAX_WEIGHT)  # of the sum of weights; 0: no requests


class ShadowSettings(FrozenSettings):
    """A model that answers some requests a second time, for comparison; nobody gets or pays for these answers."""

    model: Name
    share: float = Field(gt=0, le=1)  # of the requests


class RouteSettings(FrozenSettings):
    """A name that clients send in place of a model's; with one target an alias."""

    name: Name
    targets: tuple[TargetSettings, ...] = Field(min_length=1, max_length=MAX_MODELS)
    # In order, when the target has no replica, refuses, or fails before the first byte.
    fallbacks: tuple[Name, ...] = Field((), max_length=MAX_MODELS)
    shadow: ShadowSettings | None = None

    @model_validator(mode="after")
    def _has_parts(self) -> RouteSettings:
        _require_distinct("targets", [target.model for target in self.targets])
        _require_distinct("fallbacks", self.fallbacks)
        if not sum(target.weight for target in self.targets):
            raise ValueError("targets: their weights are 0 in sum, and no request could run")
        if self.shadow is not None and self.shadow.model in self.route().all_models:
            raise ValueError(f"shadow.model: {self.shadow.model!r} runs requests of this name already")
        return self

    def route(self) -> ModelRoute:
        """The same for the core."""
        shadow = None if self.shadow is None else Shadow(self.shadow.model, self.shadow.share)
        targets = tuple(WeightedModel(target.model, target.weight) for target in self.targets)
        return ModelRoute(self.name, targets, self.fallbacks, shadow)


def check_routes(routes: Sequence[RouteSettings], models: Collection[str]) -> None:
    """Raises ValueError: a name is given twice or is a model's, or stands for what is no model."""
    _require_distinct("routes", [route.name for route in routes])
    names = {route.name for route in routes}
    for index, route in enumerate(routes):
        if route.name in models:
            raise ValueError(f"routes.{index}.name: {route.name!r} is the name of a model")
        for path, model in _models_of(route):
            if model == route.name:
                raise ValueError(f"routes.{index}.{path}: {model!r} is this name itself")
            if model in names:
                raise ValueError(f"routes.{index}.{path}: {model!r} is a name, too; give the models behind it")
            if model not in models:
                near = nearest(model, models)
                advice = f"did you mean {near}?" if near else f"there are: {', '.join(models)}"
                raise ValueError(f"routes.{index}.{path}: there is no model {model!r}; {advice}")


def _models_of(route: RouteSettings) -> Iterator[tuple[str, str]]:
    """Every model of a name, with its place in the name's settings."""
    yield from ((f"targets.{number}.model", one.model) for number, one in enumerate(route.targets))
    yield from ((f"fallbacks.{number}", model) for number, model in enumerate(route.fallbacks))
    if route.shadow is not None:
        yield "shadow.model", route.shadow.model


def _require_distinct(field: str, names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{field}: {name!r} is given twice")
