"""What running requests are charged: the input at the start, the output as it is produced, and the rest at the end.

Weights and rules are VTC's (see `core.queue.class_queue`): an output token costs two input tokens. The end corrects
what was charged by the engine's own figures.

Invariant: a request that has ended has charged its tenant exactly what is known of its use, and is forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.core.queue.class_queue import Level
from serve_app.core.queue.tenant_queue import Lane, Waiting

INPUT_WEIGHT = 1.0  # as in the paper and in what providers charge
OUTPUT_WEIGHT = 2.0  # a token of output costs an engine step of its own; prices are two to five times the input's


@dataclass(slots=True, eq=False)
class _Run:
    level: Level
    lane: Lane
    expected: int  # output tokens
    prompt: int  # charged
    produced: int = 0  # output tokens, charged


class Service:
    """The charges of all running requests. O(log n) per method."""

    def __init__(self) -> None:
        self._runs: dict[str, _Run] = {}

    def begin(self, waiting: Waiting, level: Level) -> None:
        """A request begins to run; it is still in its level."""
        arrival = waiting.arrival
        lane = level.begin(arrival.tenant)
        prompt = max(1, arrival.prompt_tokens)  # nothing is free: else a tenant of empty prompts would always be next
        expected = max(0, arrival.cost - prompt)
        run = self._runs[waiting.request_id] = _Run(level, lane, expected, prompt)
        _charge(run, INPUT_WEIGHT * run.prompt)

    def progress(self, request_id: str, tokens: int) -> None:
        """So many more tokens of output. An unknown id changes nothing."""
        run = self._runs.get(request_id)
        if run is not None:
            run.produced += tokens
            _charge(run, OUTPUT_WEIGHT * tokens)

    def done(self, request_id: str, prompt: int | None, output: int | None) -> None:
        """It has ended after this many tokens; None: nobody knows, so the estimate stands."""
        run = self._runs[request_id]
        self._end(request_id, prompt, max(run.produced, run.expected) if output is None else output)

    def stopped(self, request_id: str) -> None:
        """It was cancelled or lost: what it produced counts."""
        self._end(request_id, None, self._runs[request_id].produced)

    def _end(self, request_id: str, prompt: int | None, output: int) -> None:
        run = self._runs.pop(request_id)
        more_prompt = 0 if prompt is None else max(1, prompt) - run.prompt
        _charge(run, INPUT_WEIGHT * more_prompt + OUTPUT_WEIGHT * (output - run.produced))
        run.level.end()


def _charge(run: _Run, tokens: float) -> None:
    run.level.charge(run.lane, tokens)
