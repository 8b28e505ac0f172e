"""The charges of running requests: input tokens at the start, output tokens as produced, the difference at the end.

Weights and rules are those of VTC (see `core.queue.class_queue`): an output token costs two input tokens. At the end
the charges are corrected to the engine's token counts.

Invariant: an ended request has charged its tenant exactly its known use, and is removed.
"""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.core.queue.class_queue import ClassQueue
from serve_app.core.queue.tenant_queue import QueuedRequest, TenantQueue

INPUT_WEIGHT = 1.0  # as in the paper and in the prices of providers
OUTPUT_WEIGHT = 2.0  # an output token costs an engine step of its own; its price is two to five times that of input


@dataclass(slots=True, eq=False)
class _ChargedRequest:
    class_queue: ClassQueue
    tenant_queue: TenantQueue
    expected_output: int  # tokens, as all below
    charged_prompt: int
    charged_output: int = 0


class VtcCharges:
    """The charges of all running requests. O(log n) per method."""

    def __init__(self) -> None:
        self._running: dict[str, _ChargedRequest] = {}

    def begin(self, waiting: QueuedRequest, class_queue: ClassQueue) -> None:
        """A request begins to run; it is still in its class queue."""
        arrival = waiting.arrival
        tenant_queue = class_queue.begin_run(arrival.tenant)
        prompt = max(1, arrival.prompt_tokens)  # at least 1, or a tenant with empty prompts would always be next
        expected = max(0, arrival.cost - prompt)
        run = self._running[waiting.request_id] = _ChargedRequest(class_queue, tenant_queue, expected, prompt)
        _charge(run, INPUT_WEIGHT * run.charged_prompt)

    def progress(self, request_id: str, tokens: int) -> None:
        """Charge `tokens` more output tokens. An unknown id changes nothing."""
        run = self._running.get(request_id)
        if run is not None:
            run.charged_output += tokens
            _charge(run, OUTPUT_WEIGHT * tokens)

    def done(self, request_id: str, prompt: int | None, output: int | None) -> None:
        """The request has ended after these tokens; None: unknown, the estimate counts."""
        run = self._running[request_id]
        self._settle(request_id, prompt, max(run.charged_output, run.expected_output) if output is None else output)

    def cancelled(self, request_id: str) -> None:
        """The request was cancelled or lost: only its produced output is charged."""
        self._settle(request_id, None, self._running[request_id].charged_output)

    def _settle(self, request_id: str, prompt: int | None, output: int) -> None:
        run = self._running.pop(request_id)
        more_prompt = 0 if prompt is None else max(1, prompt) - run.charged_prompt
        _charge(run, INPUT_WEIGHT * more_prompt + OUTPUT_WEIGHT * (output - run.charged_output))
        run.class_queue.end_run()


def _charge(run: _ChargedRequest, tokens: float) -> None:
    run.class_queue.charge(run.tenant_queue, tokens)
