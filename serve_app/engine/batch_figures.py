"""Figures of an engine's batches, for its `EngineLoad`.

Decides what `batch_size`, `batch_wait_s`, `padding_ratio` and `tokens_per_s` are: rates and steps over the last
`WINDOW_S` seconds, figures of batches over the last `RECENT_BATCHES` of them. Where the engine batches by itself, its
batch is a step, and nothing is padded.

Invariant: memory is constant, and the cost per request is too; nothing is done per token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from serve_app.core.batching import RequestBatch, padding_ratio
from serve_app.transport import EngineLoad

WINDOW_S = 10.0  # smooths the steps of long prompts; shorter than the usual 15 s between two scrapes
SAMPLE_S = 1.0  # between two samples of the engine's counters: how exact the window is
RECENT_BATCHES = 32  # enough for a mean; batches of seconds each are fewer than one in a window


class OpenBatch:
    """A batch that runs. `lengths`: the tokens that its ended requests have used."""

    def __init__(self, size: int) -> None:
        self.open = size
        self.lengths: list[int] = []


class BatchFigures:
    """See the module. Clockless: callers give the time."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, EngineLoad]] = deque(maxlen=round(WINDOW_S / SAMPLE_S) + 1)
        self._started: deque[tuple[int, float]] = deque(maxlen=RECENT_BATCHES)  # sizes, and their waits together
        self._padding: deque[float] = deque(maxlen=RECENT_BATCHES)
        self.batches = 0
        self.requests = 0

    def start_batch(self, batch: RequestBatch) -> OpenBatch:
        """A batch has started."""
        size = len(batch.items)
        self._started.append((size, sum(batch.waits_s)))
        self.batches += 1
        self.requests += size
        return OpenBatch(size)

    def end_request(self, batch: OpenBatch, tokens: int) -> None:
        """A request of a batch has ended. `tokens`: prompt and output; 0: it was cut off, and counts for no padding."""
        if tokens:
            batch.lengths.append(tokens)
        batch.open -= 1
        if not batch.open and batch.lengths:
            self._padding.append(padding_ratio(batch.lengths))

    def forget_batches(self) -> None:
        """The policy has changed: the figures are those of its own batches."""
        self._started.clear()
        self._padding.clear()

    def sample(self, load: Callable[[], EngineLoad], now: float) -> None:
        """Remember the engine's counters, once every `SAMPLE_S`; to be called as often or more often."""
        if not self._samples or now >= self._samples[-1][0] + SAMPLE_S:
            self._samples.append((now, load()))

    def add_to(self, load: EngineLoad, now: float, *, waiting: int, forms_batches: bool) -> EngineLoad:
        """The engine's load with the figures.

        Args:
            waiting: requests that wait for their batch.
            forms_batches: whether batches of requests are formed; else the engine's steps are the batches.
        """
        since, before = self._samples[0] if self._samples else (now, load)
        steps = load.steps - before.steps
        span_s = now - since
        tokens = load.prompt_tokens + load.generated_tokens - before.prompt_tokens - before.generated_tokens
        requests = sum(size for size, _ in self._started)
        if forms_batches:
            batch_size = requests / len(self._started) if self._started else 0.0
        else:
            batch_size = (load.sequence_steps - before.sequence_steps) / steps if steps else 0.0
        return msgspec.structs.replace(
            load,
            waiting=load.waiting + waiting,
            batch_size=batch_size,
            batch_wait_s=sum(wait_s for _, wait_s in self._started) / requests if requests else 0.0,
            padding_ratio=sum(self._padding) / len(self._padding) if forms_batches and self._padding else 0.0,
            tokens_per_s=tokens / span_s if span_s > 0.0 else 0.0,
            batches=self.batches,
            batched_requests=self.requests,
        )
