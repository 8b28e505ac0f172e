"""A network between a router and the quota actor that loses, delays and repeats messages."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from ray.exceptions import RayError


class Away(RayError):
    """The actor cannot be reached."""


@dataclass
class Network:
    """What happens to a message and to its answer; both ways are drawn for by themselves."""

    delay_s: Callable[[], float] = lambda: 0.0
    lost: float = 0.0  # of messages and of answers, as parts of all
    repeated: float = 0.0  # messages that arrive twice
    draw: random.Random = field(default_factory=lambda: random.Random(1))

    async def carry(self) -> None:
        """One way. Raises Away: it got lost, which is known at once."""
        if self.draw.random() < self.lost:
            raise Away("lost on its way")
        await asyncio.sleep(self.delay_s())  # the network's delay, drawn

    def twice(self) -> bool:
        return self.draw.random() < self.repeated
