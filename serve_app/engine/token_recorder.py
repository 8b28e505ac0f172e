"""Records the token ids of a response while vLLM's serving objects pull the engine's outputs.

Invariant: a group is recorded before the serving object receives its output, so the groups taken with an event cover
all tokens whose text is in the events up to it. Outputs of continued runs (`ContinuedRuns`) count in the usage alone.
"""

from __future__ import annotations

import contextvars
import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from serve_app.engine.continuation import ContinuedRuns
from serve_app.errors import EngineFailed, ServeAppError
from serve_app.transport import FINISH_STOP, TokenUsage

LENGTH = "length"  # vLLM's finish reason of what `max_tokens` cut
# vLLM's finish reason of what EngineCore ended itself, on SIGTERM. Who ends a request here no longer reads its outputs.
ABORTED = "abort"

Output = Any  # vLLM's RequestOutput or PoolingRequestOutput; only the adapter imports vllm


class CutOff(NamedTuple):
    """The last output of a choice that `max_tokens` cut; of a whole answer all of it."""

    text: str
    tokens: Sequence[int]
    prompt: Sequence[int]


@dataclass(slots=True, weakref_slot=True)
class TokenRecorder:
    """The record of one request.

    Args:
        choices: answers per prompt (`n`).
        fatal: errors that mean a broken engine; kept in `failure`, since the serving objects turn them into events.
        tenant: a distinct text per tenant, for `RecordedLLM`, which sets `refused` when it refuses a grammar.
        continued: of a continued stream.
    """

    choices: int
    fatal: tuple[type[BaseException], ...]
    tenant: str = ""
    continued: ContinuedRuns | None = None
    groups: list[list[int]] = field(default_factory=list)
    usage_by_call: list[list[int]] = field(default_factory=list)  # one call of generate() per prompt
    refused: ServeAppError | None = None
    failure: BaseException | None = None
    finish_reason: str = ""  # of all choices: that of the first one cut off, if any
    cut: dict[int, CutOff] = field(default_factory=dict)  # by choice
    is_merged: bool = False  # outputs are recorded where those of all prompts are merged, not by prompt
    prompts: dict[str, int] = field(default_factory=dict)  # of each call of generate(), by its request id
    audio_tokens: int = 0  # of an encoder, in no prompt
    priority: int = 0  # of calls of generate() that name none
    awaits_first_token: bool = False  # its outputs come at its end, so its first token is told apart

    @property
    def failed(self) -> EngineFailed | None:
        """Why the stream ended below the serving objects, which turn errors into events."""
        if self.continued is not None and self.continued.failure is not None:
            return self.continued.failure
        return None if self.failure is None else EngineFailed(f"the engine died: {self.failure}")

    def take_groups(self) -> list[list[int]]:
        groups, self.groups = self.groups, []
        return groups

    def usage(self) -> TokenUsage:
        if not self.usage_by_call:
            return TokenUsage()
        prompt, completion, cached = (sum(column) for column in zip(*self.usage_by_call, strict=True))
        return TokenUsage(prompt + self.audio_tokens, completion, cached, self.finish_reason)

    def drop_query(self, documents: int) -> int:
        """Do not count the one query of a score with so many documents, which an earlier part has counted; returns its
        tokens. 0: it was no prompt of its own, since the model reads it with each document."""
        return self.usage_by_call.pop(0)[0] if len(self.usage_by_call) == documents + 1 else 0

    def record(
        self, outputs: AsyncGenerator[Output, None], request_id: str = "", *, pooling: bool = False
    ) -> AsyncGenerator[Output, None]:
        """Pass the outputs of one prompt on; records the token ids of each before its consumer receives it. Called once
        per prompt, in the order of the prompts. `pooling`: embeddings and scores, of which only the prompt counts."""
        prompt = len(self.usage_by_call)
        self.usage_by_call.append([0, 0, 0])  # prompt, completion, cached tokens
        self.prompts[request_id] = prompt
        return self._pass_on(outputs, prompt, pooling)

    async def _pass_on(
        self, outputs: AsyncGenerator[Output, None], prompt: int, pooling: bool
    ) -> AsyncGenerator[Output, None]:
        try:
            async for output in outputs:
                if not self.is_merged:
                    self.record_output(prompt, output, pooling=pooling)
                yield output
            if self.continued is not None and not self.is_merged:
                self.continued.end()
        except self.fatal as error:
            self.failure = error
            raise
        finally:
            await outputs.aclose()

    def record_output(self, prompt: int, output: Output, *, pooling: bool = False) -> None:
        """Record the next output of a prompt, before its consumer receives it.

        Raises:
            EngineFailed: the engine has ended the request, whose answer is not whole.
        """
        used = self.usage_by_call[prompt]
        if not used[0] and output.prompt_token_ids is not None:
            used[0] = len(output.prompt_token_ids)
            used[2] = output.num_cached_tokens or 0
        if pooling:
            return
        is_new = self.continued is None or not self.continued.take_output(prompt)
        for choice in output.outputs:
            if choice.finish_reason == ABORTED:
                self.failure = EngineFailed("EngineCore ends, and has ended the request")
                raise self.failure
            if is_new and self.continued is not None and choice.finish_reason == "error":
                raise self.continued.fail("the engine does not accept its tokens")
            if choice.logprobs:
                choice.logprobs[:] = [_by_rank(position) for position in choice.logprobs]
            ids = choice.token_ids
            if ids:
                used[1] += len(ids)
                if self.continued is not None:
                    ids = ids[self.continued.tokens_in_last(prompt, choice.index) :]
                if is_new and ids:
                    self.groups.append([prompt * self.choices + choice.index, *ids])
            if choice.finish_reason == LENGTH:
                self.cut[choice.index] = CutOff(choice.text, choice.token_ids, output.prompt_token_ids or ())
            if choice.finish_reason and self.finish_reason in ("", FINISH_STOP):
                self.finish_reason = choice.finish_reason


recorder_of_request: contextvars.ContextVar[TokenRecorder | None] = contextvars.ContextVar("recorder", default=None)


def _by_rank(position: Any) -> Any:
    """The log probabilities of one position, the likeliest token first. vLLM puts the sampled token first, and its
    serving objects take the first ones for `top_logprobs`."""
    return dict(sorted(position.items(), key=lambda entry: entry[1].rank or math.inf)) if position else position
