"""Requests that are moved a part in each event: models take turns, and the requests of each keep their order.

Invariant: of two models with requests here, neither has two turns without one of the other between them.
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class ModelTurns(Generic[T]):
    """The requests, by model and key. O(1) per method."""

    def __init__(self) -> None:
        self._by_model: dict[str, dict[str, T]] = {}  # the next model first, and of each the next request

    def __contains__(self, model: str) -> bool:
        """Whether requests of this model are here."""
        return model in self._by_model

    def __bool__(self) -> bool:
        return bool(self._by_model)

    def add(self, model: str, key: str, request: T) -> None:
        """Add a request behind the others of its model; one that is here keeps its place."""
        self._by_model.setdefault(model, {})[key] = request

    def take(self) -> T | None:
        """Remove and return the next request; None: there is none."""
        model = next(iter(self._by_model), None)
        if model is None:
            return None
        requests = self._by_model.pop(model)
        request = requests.pop(next(iter(requests)))
        if requests:
            self._by_model[model] = requests  # behind the other models
        return request
