"""A name, its weighted targets and its fallbacks; and which target a key has. Pure.

Of several targets a key has the one with the highest -weight / ln(h), where h is the hash of the key and the target in
(0, 1): weighted rendezvous hashing (Schindelhauer and Schomaker, "Weighted Distributed Hash Tables", SPAA 2005: their
logarithmic method). -ln(h) / weight is exponential with that rate, so the lowest of them is a target's with the
probability weight / (sum of weights).

Invariants: a key has one target while the weights stand, in every router. A target whose weight rises takes keys and
gives none away, one whose weight falls gives keys away and takes none: a change moves only the keys that it must.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

DEFAULT_WEIGHT = 1.0  # targets without weights have equal parts
_HASH_BITS = 52  # so that (hash + 0.5) / 2**52 is exact, and neither 0 nor 1


class WeightedModel(NamedTuple):
    """A model with its part of a name's requests: its weight of the sum of weights; 0: none."""

    model: str
    weight: float = DEFAULT_WEIGHT


class Shadow(NamedTuple):
    """A model that runs a share (0 to 1) of a name's requests a second time, for nobody."""

    model: str
    share: float


@dataclass(frozen=True, slots=True)
class ModelRoute:
    """A name, and the models that answer it.

    Args:
        targets: at least one has a weight above 0.
        fallbacks: in order; for a request that its target cannot run.
    """

    name: str
    targets: tuple[WeightedModel, ...]
    fallbacks: tuple[str, ...] = ()
    shadow: Shadow | None = None

    def target(self, key: str) -> str:
        """The model that requests with this key run on."""
        return max((one for one in self.targets if one.weight > 0), key=lambda target: _score(target, key)).model

    def models(self, key: str) -> tuple[str, ...]:
        """The models that a request may run on: its target, then the fallbacks, each once."""
        return tuple(dict.fromkeys((self.target(key), *self.fallbacks)))

    def shown(self) -> dict[str, Any]:
        """What stands behind the name, as JSON."""
        return {
            "targets": [{"model": one.model, "weight": one.weight} for one in self.targets],
            "fallbacks": list(self.fallbacks),
            "shadow": None if self.shadow is None else self.shadow._asdict(),
        }

    def shadows(self, key: str) -> bool:
        """Whether the request with this key runs on the shadow, too."""
        return self.shadow is not None and _uniform("shadow", key) < self.shadow.share

    @property
    def all_models(self) -> tuple[str, ...]:
        """Every model that a request of a client may run on, each once."""
        return tuple(dict.fromkeys((*(one.model for one in self.targets), *self.fallbacks)))


class ModelRoutes:
    """The routes of the configuration, by name."""

    def __init__(self, routes: Iterable[ModelRoute] = ()) -> None:
        self.configure(routes)

    def configure(self, routes: Iterable[ModelRoute]) -> None:
        """Replace them, for requests that arrive from now on."""
        self.by_name = {route.name: route for route in routes}

    def find(self, name: object) -> ModelRoute | None:
        """The route of this name; None: there is none, and it may be a model's."""
        return self.by_name.get(name) if isinstance(name, str) else None


def _score(target: WeightedModel, key: str) -> float:
    return -target.weight / math.log(_uniform(target.model, key))


def _uniform(name: str, key: str) -> float:
    """The hash of both, in (0, 1). A model's name has no `\\0`."""
    text = f"{name}\0{key}".encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(text, digest_size=8, person=b"target").digest()
    return ((int.from_bytes(digest) >> (64 - _HASH_BITS)) + 0.5) / float(2**_HASH_BITS)
