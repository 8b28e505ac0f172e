"""Counters behind `EngineLoad`, fed by the engine at each step."""

from __future__ import annotations

from serve_app.engine.protocol import EngineLoad


class LoadSink:
    """The newest figures; one writer, any reader, one event loop."""

    __slots__ = (
        "generated",
        "kv_cache_usage",
        "preempted",
        "prompted",
        "running",
        "steps",
        "waiting",
    )

    def __init__(self) -> None:
        self.running = self.waiting = self.steps = self.generated = self.prompted = self.preempted = 0
        self.kv_cache_usage = 0.0

    def snapshot(self) -> EngineLoad:
        return EngineLoad(
            running=self.running,
            waiting=self.waiting,
            kv_cache_usage=self.kv_cache_usage,
            steps=self.steps,
            generated_tokens=self.generated,
            prompt_tokens=self.prompted,
            preemptions=self.preempted,
        )
