"""Runs a share of the requests to a name a second time, on the shadow of the name, and throws the answers away.

Invariant: a shadow's run begins only while nothing waits for its model at any router, and ends when a request does, by
the quota actor's figures, or when it waits itself; it is charged to nobody, and no client waits for it longer than
these figures take.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from serve_app.core.names import ModelRoute
from serve_app.errors import ServeAppError
from serve_app.http.engine_call import AskedCall
from serve_app.ray_adapter import in_fresh_context
from serve_app.router import ModelRouter

logger = logging.getLogger("ray.serve")

SHADOW_TENANT = "(shadow)"  # whose the runs are in the queue and the request log: no client's share pays for them
MAX_AT_ONCE = 64  # of one router: each holds the body of its request
LOOK_S = 0.05  # between two looks at the queue; a request that arrives waits that long for the slot of a shadow

RunShadow = Callable[[AskedCall, ModelRouter, str], Awaitable[None]]


class ShadowRuns:
    """The runs of one router.

    Args:
        models: the models served now, by name.
        run: runs a request on a model, for nobody, under this id.
    """

    def __init__(self, models: Mapping[str, ModelRouter], run: RunShadow) -> None:
        self._models = models
        self._run = run
        self.running: set[asyncio.Task[Any]] = set()

    def begin(self, route: ModelRoute, asked: AskedCall, request_id: str) -> None:
        """A request to this name has arrived: begin its second run, if it is of the share and there is room."""
        if route.shadow is None or not asked.operation.generates or asked.identity.is_row:
            return
        model = self._models.get(route.shadow.model)
        if model is None or not model.ready or model.waiting_anywhere or len(self.running) >= MAX_AT_ONCE:
            return
        if route.shadows(request_id):
            task = in_fresh_context(self._run_while_idle(asked, model), f"shadow-{request_id}")
            self.running.add(task)
            task.add_done_callback(self.running.discard)

    def close(self) -> None:
        """End all of them."""
        for task in self.running:
            task.cancel()

    async def _run_while_idle(self, asked: AskedCall, model: ModelRouter) -> None:
        own_id = secrets.token_hex(16)
        run = asyncio.ensure_future(self._run(asked, model, own_id))
        try:
            while not run.done():
                await asyncio.wait([run], timeout=LOOK_S)
                # a shadow that waits ends alone: if it counted for the others, one would end them all
                is_in_the_way = model.queue.is_waiting(own_id) or model.others_wait(SHADOW_TENANT)
                if is_in_the_way and not run.done():
                    run.cancel()
                    await asyncio.wait([run])
            if not run.cancelled() and (error := run.exception()) is not None:
                _log(error, model.settings.name)
        finally:
            run.cancel()


def _log(error: BaseException, model: str) -> None:
    if isinstance(error, ServeAppError):
        logger.info("Request to shadow %s failed: %s", model, error)
    else:
        logger.error("Request to shadow %s failed inside the router. Report this traceback", model, exc_info=error)
