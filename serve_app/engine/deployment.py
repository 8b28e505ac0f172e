"""The engine replica: one engine, the connections of the routers that use it, and Serve's lifecycle around both.

Invariant: a request runs only while its router's connection is open. When that ends, or when the replica shuts down,
the request is aborted inside the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import ray.util

from serve_app.core.batching import BatchPolicy
from serve_app.core.kv_budget import requests_at_once
from serve_app.core.memory import DrainReport
from serve_app.core.spans import trace_of
from serve_app.core.times import ENGINE_LOOK_S, LAST_FRAMES_S
from serve_app.engine.batch_figures import BatchFigures
from serve_app.engine.batched_engine import BatchedEngine
from serve_app.engine.continuation import is_continued, require_continuable, require_stream
from serve_app.engine.engine_failure import death, start_failure
from serve_app.engine.own_metrics import OwnMetrics
from serve_app.engine.replica_drain import ReplicaDrain
from serve_app.engine.start import (
    download_size,
    environment,
    fingerprint,
    grant_request,
    memory_grant,
    model_lookup,
    phases,
    rank_layout,
)
from serve_app.engine.tiny_model import default_root
from serve_app.errors import EngineFailed, EngineUnreachable, ServeAppError
from serve_app.names import KV_USE, ONGOING, SLOT_USE, SLOTS, START_S
from serve_app.quota import QuotaActor
from serve_app.ray_adapter import end_on_sigterm, freeze_heap, keep_while_loading, session_folder
from serve_app.settings import BatchingSettings, ModelSettings, QuotaSettings
from serve_app.system import EventKind, enter_request, event, keep_events, mark_log, set_up_log
from serve_app.transport import (
    EngineBackend,
    EngineInfo,
    EngineLoad,
    EngineTexts,
    Frame,
    Submit,
    TcpAddress,
    TcpServer,
    Unsent,
)

logger = logging.getLogger("ray.serve")

# vLLM tokenizes in a thread. At Python's 5 ms, that thread runs only after the event loop has served a whole batch.
THREAD_SWITCH_S = 0.0005
NEARER_S = 1.0  # a deadline that is nearer by less than this is the known one, as told at another report
DIED = "the engine's process ended under the request"
EXIT_ENGINE_DEAD = 70  # EX_SOFTWARE
EXIT_DRAINED = 0


def end_process(status: int) -> None:
    """End this process at once; a separate function so that tests can replace it."""
    os._exit(status)


def make_backend(settings: ModelSettings) -> EngineBackend:
    """The engine that the settings select; imports vLLM only if it is used."""
    if settings.engine == "simulated":
        from serve_app.engine.simulated import SimulatedEngine

        return SimulatedEngine(settings)
    environment.prepare(settings.ranks, settings.engine_seqs, settings.max_image_pixels, settings.max_audio_s)
    from serve_app.engine.vllm_adapter.engine import VllmEngine

    return VllmEngine(settings, time.monotonic)


class EngineReplica:
    """Serve deployment class of an engine.

    Args:
        settings: the model, as a plain mapping (Serve pickles constructor arguments).
        quota: settings of the cluster's memory quota; None: this engine takes memory that no ledger counts.
    """

    batched: BatchedEngine | None = None  # None: its model has had no `batching` so far

    async def __init__(self, settings: dict[str, Any], quota: dict[str, Any] | None = None) -> None:  # type: ignore[misc]  # Ray awaits it
        # Serve awaits it. On the class, the garbage collector would call it, too, and await nothing.
        self.__del__ = self.shutdown
        keep_while_loading()
        end_on_sigterm()
        self._settings = ModelSettings.model_validate(settings)
        mark_log(grant_request.replica_name())
        set_up_log("engine", model=self._settings.name, replica=grant_request.replica_name())
        keep_events(session_folder(), f"engine-{grant_request.replica_name()}")
        self._ending = False
        self.draining: asyncio.Task[None] | None = None
        self.drain_state: ReplicaDrain | None = None
        self._figures = BatchFigures()
        self.own_metrics = OwnMetrics({"model": self._settings.name, "replica": grant_request.replica_name()})
        self.server = TcpServer(self.run, self.produced, ray.util.get_node_ip_address())
        sys.setswitchinterval(THREAD_SWITCH_S)
        self._phases = self._start_phases()
        self.server.fingerprint = self._fingerprint()
        self._layout = rank_layout.layout_of_this_replica(self._settings, environment.platform())
        self._grant = None if quota is None else await self._obtain(QuotaSettings.model_validate(quota))
        self._phases.begin()
        try:
            self.backend = make_backend(self._settings)
            self.backend.report_first_tokens(self.server.tell_first_token)
            info = await self.backend.start()
        except ServeAppError:
            raise  # it says what is wrong
        except Exception as error:
            raise start_failure(self._settings.name, error) from error
        self.server.fingerprint = self._fingerprint()  # of what it has loaded: it may have been downloaded only now
        start_s = self._phases.finish()
        freeze_heap()
        if self._grant is not None:
            self._grant.engine_started(info.kv_cache_tokens, info.kv_cache_bytes, info.slots, self.server.fingerprint)
        self.engine_info = msgspec.structs.replace(info, start_s=start_s)
        self._set_batching(self._settings.batch_policy)
        if self.draining is None:
            self.server.set_slots(info.slots)
        self.watching = asyncio.create_task(self._watch())
        logger.info(
            "Engine of model %s is ready after %.1f s%s: %s; %d KV tokens, %d slots, max length %d",
            self.engine_info.model,
            start_s,
            "" if self._phases.last_s is None else f" (last start {self._phases.last_s:.1f} s)",
            ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in self._phases.seconds.items()),
            self.engine_info.kv_cache_tokens,
            self.engine_info.slots,
            self.engine_info.max_model_len,
            extra=self._event(start_s=round(start_s, 1)),
        )

    def _event(self, **details: Any) -> dict[str, Any]:
        return event(EventKind.HEALTH, self._settings.name, replica=grant_request.replica_name(), **details)

    def _fingerprint(self) -> str | None:
        return fingerprint.model_fingerprint(self._settings, environment.platform())

    def _start_phases(self) -> phases.StartPhases:
        settings = self._settings
        history = default_root().parent / "starts"
        found = model_lookup.weights_bytes(settings), model_lookup.cache_folder(settings)
        return phases.StartPhases(
            settings.name, history, time.monotonic, *found, ask_hub=lambda: download_size.ask_hub(settings)
        )

    async def reconfigure(self, config: dict[str, Any]) -> None:
        """Apply what a running engine takes over; Serve calls this at the start, too, and for each change after that.
        `config`: the model's `batching` and `drain_s`, as `serve_app.app` declares them."""
        batching = config["batching"]
        self._set_batching(None if batching is None else BatchingSettings.model_validate(batching).policy())
        if self._grant is not None:
            self._grant.set_drain_s(config["drain_s"])

    def _set_batching(self, policy: BatchPolicy | None) -> None:
        if self.batched is not None:
            self.batched.set_policy(policy)
        elif policy is not None:
            self.batched = BatchedEngine(self.backend, policy, time.monotonic, self._figures)

    async def _watch(self) -> None:
        """Detect a dead engine, and one that has been frozen for `health_stall_s`, sooner than Serve's next check."""
        while self.backend.alive:
            try:
                await self.backend.check_health()
            except EngineFailed as error:
                self._give_up(error)
                return
            self._figures.sample(self.backend.load, time.monotonic())
            await asyncio.sleep(ENGINE_LOOK_S)
        self._give_up(await self._death(EngineFailed("the engine's process has died")))

    async def _obtain(self, quota: QuotaSettings) -> memory_grant.MemoryGrant:
        """Wait for this engine's memory and its turn to load, and size the engine to its grant."""
        request = grant_request.GrantRequest(self._settings, environment.platform(), QuotaActor(quota))
        ranks = request.ranks(self._layout.nodes)
        loop = asyncio.get_running_loop()

        def drain(within_s: float) -> None:
            loop.call_soon_threadsafe(self.drain, within_s)

        need = await asyncio.to_thread(lambda: request.need)
        logger.info("Engine of model %s needs %s beside its KV cache", self._settings.name, need)
        grant = request.grant(ranks, self._on_grant_lost, drain, self._drain_report, self._phases.now)
        grant.report = replace(grant.report, fingerprint=self.server.fingerprint)
        hold = (await grant.obtain(quota.wait_s))[0]
        request.restrict_to_device(hold)
        self._settings = await asyncio.to_thread(request.granted_settings, hold, self._settings.ranks // len(ranks))
        return grant

    def drain(self, within_s: float) -> None:
        """Take no new requests and end. Running ones may finish within this time; then they continue elsewhere. Serve
        starts another replica where memory is free. Called again, only a nearer deadline counts."""
        until = time.monotonic() + within_s
        if self.drain_state is None:
            logger.info(
                "Engine of model %s drains: it takes no new requests and ends within %.0f s",
                *(self._settings.name, within_s),
                extra=self._event(within_s=within_s),
            )
            self.drain_state = ReplicaDrain(until)
            self.draining = asyncio.create_task(self._drain_and_end(self.drain_state))
            if self.batched is not None:
                self.batched.close()  # no batch waits to be filled
        elif until < self.drain_state.until - NEARER_S:
            self.drain_state.until = until
        else:
            return
        self.server.drain(within_s)

    async def _drain_and_end(self, drain: ReplicaDrain) -> None:
        while (left_s := drain.left_s(time.monotonic())) > 0 and (requests := self.server.requests):
            await asyncio.wait(requests, timeout=min(left_s, ENGINE_LOOK_S))  # the deadline may come nearer
        await asyncio.sleep(LAST_FRAMES_S)  # for the last frames to leave
        await self.shutdown()
        end_process(EXIT_DRAINED)

    def _drain_report(self) -> DrainReport | None:
        drain = self.drain_state
        return None if drain is None else drain.report(len(self.server.requests), time.monotonic())

    def _on_grant_lost(self, why: str) -> None:
        """Called from the grant's thread: the memory grant is lost, or loading has stalled."""
        name = self._settings.name
        extra = self._event(cause=why)
        logger.warning("Engine of model %s ends because its start or its grant failed: %s", name, why, extra=extra)
        if hasattr(self, "backend"):
            self.backend.kill()
        end_process(EXIT_ENGINE_DEAD)

    async def info(self, replica_id: str) -> EngineInfo:
        """The limits of this engine. `replica_id` is for routing, here and below."""
        return self.engine_info

    async def load(self, replica_id: str) -> EngineLoad:
        """The live load of the engine."""
        waiting, forms_batches = (self.batched.waiting, self.batched.forms_batches) if self.batched else (0, False)
        return self._figures.add_to(self.backend.load(), time.monotonic(), waiting=waiting, forms_batches=forms_batches)

    async def metrics(self, is_openmetrics: bool, replica_id: str) -> EngineTexts:
        """The engine's own metrics, in OpenMetrics' or Prometheus' text format."""
        return await asyncio.to_thread(
            lambda: self.own_metrics.texts(self.backend.own_metrics(), is_openmetrics=is_openmetrics)
        )

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve every `metrics_interval_s`, for scaling: the number of running requests that are load, how
        many could run, how long a start takes, and the shares of the KV cache and the slots in use."""
        load = self.backend.load()
        info = self.engine_info
        slots = requests_at_once(info.slots, len(self.server.requests), load.running, load.kv_cache_usage)
        return {
            ONGOING: self.server.load,
            SLOTS: slots,
            START_S: info.start_s,
            KV_USE: load.kv_cache_usage,
            SLOT_USE: min(1.0, load.running / info.slots),
        }

    async def open_wire(self, router_id: str, replica_id: str) -> TcpAddress:
        """A ticket for one TCP connection of this router (`serve_app.transport.tcp`), which carries its requests."""
        return await self.server.issue_ticket(router_id)

    async def hold(self, ticket: bytes, replica_id: str) -> None:
        """Wait for the end of the connection of this ticket, so that Serve waits for it; cancelling this ends it."""
        await self.server.hold(ticket)

    async def run(self, submit: Submit, put: Callable[[Frame], None]) -> None:
        """Run one request to its end, and put its frames, the last one with its usage.

        Raises:
            EngineFailed: the engine died during the request, or cannot continue it; frames may have been put. Any other
                error is the request's: the engine lives, and could not handle it.
        """
        enter_request(submit.request_id, trace_of(submit.traceparent))
        if self.drain_state is not None:
            raise EngineUnreachable("this engine replica drains")
        if is_continued(submit):
            require_continuable(
                submit,
                engine_continues=self.engine_info.continues,
                is_same_model=submit.fingerprint in (None, self.server.fingerprint),
            )
        engine = self.backend if self.batched is None else self.batched
        try:
            async with contextlib.aclosing(engine.run(submit)) as frames:
                async for frame in frames:
                    if submit.events:
                        require_stream(frame)
                    put(frame)
        except asyncio.CancelledError:
            self._on_request_ended(by_its_router=True)
            raise
        except EngineFailed as error:
            if not self.backend.alive:
                self._give_up(await self._death(error))
                if not isinstance(error, EngineUnreachable):  # vLLM's message is in the log; clients do not need it
                    raise EngineFailed(DIED) from None
            raise
        except Exception as error:
            if self.backend.alive:
                raise  # the request's own
            self._give_up(await self._death(EngineFailed(f"{DIED}: {error!r}")))
            raise EngineFailed(DIED) from None
        self._on_request_ended(by_its_router=False)

    def _on_request_ended(self, *, by_its_router: bool) -> None:
        if self.drain_state is not None:
            self.drain_state.on_request_ended(time.monotonic(), by_its_router=by_its_router)

    def produced(self, submit: Submit) -> Unsent:
        """What a running request has produced and no frame has told yet."""
        return self.backend.produced(submit)

    async def check_health(self) -> None:
        """Called by Serve; raises when the engine is dead or frozen. The replica then ends by itself: Serve would check
        twice more and wait for requests that the engine will never answer."""
        try:
            await self._layout.check()
            await self.backend.check_health()
        except EngineFailed as error:
            self._give_up(error)
            raise

    async def _death(self, error: EngineFailed) -> EngineFailed:
        """What the engine says of its own end; else the error by which a request has met it."""
        try:
            await self.backend.check_health()
        except EngineFailed as known:
            return known
        return error

    def _give_up(self, error: EngineFailed) -> None:
        """End this process and the engine's within `LAST_FRAMES_S`, and report the cause to operators; Serve starts
        another replica at once."""
        if not self._ending:
            self._ending = True
            why = death(error)
            name = self._settings.name
            extra = self._event(cause=why)
            logger.error(
                "Engine of model %s ends, and Serve starts another. Check the cause: %s", name, why, extra=extra
            )
            if self.batched is not None:
                self.batched.fail()
            if self._grant is not None:
                self._grant.fail(why)
            asyncio.get_running_loop().call_later(LAST_FRAMES_S, self._end)

    def _end(self) -> None:
        self.backend.kill()
        end_process(EXIT_ENGINE_DEAD)

    async def shutdown(self) -> None:
        """End the engine and its connections, and report that its memory is free."""
        self._ending = True
        # `__init__` may have failed anywhere
        if hasattr(self, "watching"):
            self.watching.cancel()
        if hasattr(self, "server"):
            await self.server.close()
        if self.batched is not None:
            self.batched.fail("this engine replica ends")
        if hasattr(self, "backend"):
            await self.backend.shutdown()
        if grant := getattr(self, "_grant", None):
            await asyncio.to_thread(grant.end)
