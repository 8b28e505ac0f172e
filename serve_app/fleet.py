"""The models of one router replica: a line each, kept in step with the configuration while requests run.

Invariant: a change of one model touches no other model's line. A model that is taken out gets no new requests at once;
who waits for it is told, and what runs there is finished before its line goes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from types import MappingProxyType
from typing import Any

from serve_app.channel import Unread
from serve_app.dispatch import ModelLine
from serve_app.serve_adapter import Handle, in_fresh_context
from serve_app.settings import ModelSettings, Settings
from serve_app.shared_line import SharedLine

logger = logging.getLogger("ray.serve")

Connect = Callable[[ModelSettings], Handle]


class Fleet:
    """Lines by model name.

    Args:
        connect: makes the handle of a model's engine deployment.
        router_id: this router's name.
        shared: see `ModelLine`.
    """

    def __init__(self, connect: Connect, router_id: str, shared: SharedLine | None = None) -> None:
        self._connect = connect
        self._router_id = router_id
        self._shared, self._unread = shared, Unread()
        self._made = 0
        self._lines: dict[str, ModelLine] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # the event loop itself refers to tasks weakly
        self.lines: Mapping[str, ModelLine] = MappingProxyType(self._lines)  # always the present ones

    def apply(self, settings: Settings) -> frozenset[str]:
        """Make the lines follow the configuration; returns the names of the models that left.

        New models can be asked for once it returns: their requests wait for the first replica.
        """
        wanted = {model.name: model for model in settings.models}
        gone = frozenset(self._lines) - frozenset(wanted)
        for name in gone:
            logger.info("model %s is taken out of the configuration", name)
            self._run(self._lines.pop(name).close(), f"leaving-{name}")
        for name, model in wanted.items():
            line = self._lines.get(name)
            if line is not None:
                line.configure(model, settings.admission, settings.router.replicas)
                continue
            # A name of its own: the line of a model that left and came back must not meet its former self on a replica.
            self._made += 1
            name_there = f"{self._router_id}.{self._made}"
            line = ModelLine(
                model,
                self._connect(model),
                settings.admission,
                name_there,
                settings.router.replicas,
                self._shared,
                self._unread,
            )
            self._lines[name] = line
            self._run(line.start(), f"starting-{name}")
        return gone

    async def settled(self) -> None:
        """Until every line follows its replicas, and those that left are gone."""
        while self._tasks:
            await asyncio.gather(*self._tasks)

    def _run(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        """In a context of its own: a reconfiguration is a call of Serve's, and what it starts outlives it."""
        task = in_fresh_context(coroutine, name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
