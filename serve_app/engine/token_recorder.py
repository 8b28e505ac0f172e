"""Records the token ids of a response while vLLM's serving objects pull the engine's outputs.

Invariant: a group is recorded before the serving object receives its output, so the groups taken with an event cover
all tokens whose text is in the events up to it.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from serve_app.errors import ServeAppError
from serve_app.transport import FINISH_STOP, TokenUsage

Output = Any  # vLLM's RequestOutput or PoolingRequestOutput; only the adapter imports vllm


@dataclass(slots=True)
class TokenRecorder:
    """The record of one request.

    Args:
        choices: answers per prompt (`n`).
        fatal: errors that mean a broken engine; kept in `failure`, since the serving objects turn them into events.
        tenant: a distinct text per tenant, for `RecordedLLM`, which sets `refused` when it refuses a grammar.
    """

    choices: int
    fatal: tuple[type[BaseException], ...]
    tenant: str = ""
    groups: list[list[int]] = field(default_factory=list)
    usage_by_call: list[list[int]] = field(default_factory=list)  # one call of generate() per prompt
    refused: ServeAppError | None = None
    failure: BaseException | None = None
    finish_reason: str = ""  # of all choices: that of the first one cut off, if any

    def take_groups(self) -> list[list[int]]:
        groups, self.groups = self.groups, []
        return groups

    def usage(self) -> TokenUsage:
        if not self.usage_by_call:
            return TokenUsage()
        prompt, completion, cached = (sum(column) for column in zip(*self.usage_by_call, strict=True))
        return TokenUsage(prompt, completion, cached, self.finish_reason)

    def record(self, outputs: AsyncGenerator[Output, None], *, pooling: bool = False) -> AsyncGenerator[Output, None]:
        """Pass the outputs of one prompt on; records the token ids of each before its consumer receives it. Called once
        per prompt, in the order of the prompts. `pooling`: embeddings and scores, of which only the prompt counts."""
        first_choice = None if pooling else len(self.usage_by_call) * self.choices
        used = [0, 0, 0]  # prompt, completion, cached tokens
        self.usage_by_call.append(used)
        return self._pass_on(outputs, first_choice, used)

    async def _pass_on(
        self, outputs: AsyncGenerator[Output, None], first_choice: int | None, used: list[int]
    ) -> AsyncGenerator[Output, None]:
        try:
            async for output in outputs:
                if not used[0] and output.prompt_token_ids is not None:
                    used[0] = len(output.prompt_token_ids)
                    used[2] = output.num_cached_tokens or 0
                if first_choice is not None:
                    self._record_output(output, first_choice, used)
                yield output
        except self.fatal as error:
            self.failure = error
            raise
        finally:
            await outputs.aclose()

    def _record_output(self, output: Output, first_choice: int, used: list[int]) -> None:
        for choice in output.outputs:
            if choice.logprobs:
                choice.logprobs[:] = [_by_rank(position) for position in choice.logprobs]
            ids = choice.token_ids
            if ids:
                used[1] += len(ids)
                self.groups.append([first_choice + choice.index, *ids])
            if choice.finish_reason and self.finish_reason in ("", FINISH_STOP):
                self.finish_reason = choice.finish_reason


def _by_rank(position: Any) -> Any:
    """The log probabilities of one position, the likeliest token first. vLLM puts the sampled token first, and its
    serving objects take the first ones for `top_logprobs`."""
    return dict(sorted(position.items(), key=lambda entry: entry[1].rank or math.inf)) if position else position
