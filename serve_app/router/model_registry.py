"""The models of one router replica, kept in step with the configuration while requests run.

Invariant: a change of one model touches no other model. A model that is taken out gets no new requests at once; those
that wait for it are refused, and those that run are finished before its queue goes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from types import MappingProxyType
from typing import Any

from serve_app.ray_adapter import Handle, in_fresh_context
from serve_app.router.model_router import ModelRouter
from serve_app.router.queue_client import QueueClient
from serve_app.settings import ModelSettings, Settings
from serve_app.transport import Unread

logger = logging.getLogger("ray.serve")

Connect = Callable[[ModelSettings], Handle]


class ModelRegistry:
    """Models by name.

    Args:
        connect: makes the handle of a model's engine deployment.
        router_id: this router's name.
        client: of the queues of all models.
    """

    def __init__(self, connect: Connect, router_id: str, client: QueueClient) -> None:
        self._connect = connect
        self._router_id = router_id
        self._client, self._unread = client, Unread()
        self._made = 0
        self._models: dict[str, ModelRouter] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # the event loop itself refers to tasks weakly
        self.models: Mapping[str, ModelRouter] = MappingProxyType(self._models)  # always the present ones

    def apply(self, settings: Settings) -> frozenset[str]:
        """Make the models follow the configuration; returns the names of the models that left.

        New models can be asked for once it returns: their requests wait for the first replica.
        """
        wanted = {model.name: model for model in settings.models}
        gone = frozenset(self._models) - frozenset(wanted)
        for name in gone:
            logger.info("model %s is taken out of the configuration", name)
            self._run(self._models.pop(name).close(), f"leaving-{name}")
        for name, model in wanted.items():
            present = self._models.get(name)
            if present is not None:
                present.configure(model, settings.admission, settings.router.replicas)
                continue
            # A name of its own: a model that left and came back must not meet its former self on a replica.
            self._made += 1
            name_there = f"{self._router_id}.{self._made}"
            new = self._models[name] = ModelRouter(
                model,
                self._connect(model),
                settings.admission,
                name_there,
                settings.router.replicas,
                self._client,
                self._unread,
            )
            self._run(new.start(), f"starting-{name}")
        return gone

    async def settled(self) -> None:
        """Until every model follows its replicas, and those that left are gone."""
        while self._tasks:
            await asyncio.gather(*self._tasks)

    def _run(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        """In a context of its own: a reconfiguration is a call of Serve's, and what it starts outlives it."""
        task = in_fresh_context(coroutine, name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
