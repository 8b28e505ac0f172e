"""The models of one router replica, which follow the configuration while requests run.

Invariant: a change of one model affects no other model. A removed model gets no new requests at once; its waiting
requests are refused, and its running requests finish before its queue is closed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from serve_app.ray_adapter import Handle, in_fresh_context
from serve_app.router.model_router import ModelRouter
from serve_app.router.queue_client import QueueClient
from serve_app.settings import ModelSettings, Settings
from serve_app.transport import UnreadBytes

logger = logging.getLogger("ray.serve")

Connect = Callable[[ModelSettings], Handle]


class ModelRegistry:
    """Models by name.

    Args:
        connect: makes the handle of a model's engine deployment.
        router_id: this router's name.
        client: the queue client of all models.
    """

    def __init__(self, connect: Connect, router_id: str, client: QueueClient) -> None:
        self._connect, self._router_id, self._client, self._unread = connect, router_id, client, UnreadBytes()
        self._model_numbers = itertools.count(1)
        self.models: dict[str, ModelRouter] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # strong references: the event loop keeps weak ones only

    def apply(self, settings: Settings) -> frozenset[str]:
        """Apply the configuration; returns the names of the removed models.

        New models take requests once this returns: the requests wait for the first replica.
        """
        wanted = {model.name: model for model in settings.models}
        gone = frozenset(self.models) - frozenset(wanted)
        for name in gone:
            logger.info("Model %s left the configuration; its waiting requests are refused", name)
            self._run(self.models.pop(name).close(), f"leaving-{name}")
        for name, model in wanted.items():
            present = self.models.get(name)
            if present is not None:
                present.configure(model, settings.admission, settings.router.replicas)
                continue
            new = self.models[name] = ModelRouter(
                model,
                self._connect(model),
                settings.admission,
                # a new name: a model that was removed and came back must not share a replica's router session
                f"{self._router_id}.{next(self._model_numbers)}",
                settings.router.replicas,
                self._client,
                self._unread,
            )
            self._run(new.start(), f"starting-{name}")
        return gone

    async def wait_settled(self) -> None:
        """Wait until every model follows its replicas and every removed model is closed."""
        while self._tasks:
            await asyncio.gather(*self._tasks)

    def _run(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        """Run in a context of its own: the task outlives the Serve call of the reconfiguration."""
        task = in_fresh_context(coroutine, name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
