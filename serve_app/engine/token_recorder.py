"""Notes the token ids behind a response while vLLM's serving objects pull the engine's outputs.

Invariant: a group is recorded before the serving object sees its output, so the groups taken with an event cover all
tokens whose text is in the events up to it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from serve_app.errors import ServeAppError
from serve_app.transport import ENDED, Usage

Output = Any  # vLLM's RequestOutput or PoolingRequestOutput; only the adapter imports vllm


class Recorder:
    """One request's record.

    Args:
        choices: answers per prompt (`n`).
        fatal: the errors that mean the engine broke; kept in `failure`, since the serving objects make events of them.
        tenant: tells tenants apart; kept here for `RecordedLLM`, which refuses (`refused`) what harms others.
    """

    __slots__ = (
        "calls",
        "choices",
        "failure",
        "fatal",
        "finish_reason",
        "groups",
        "refused",
        "tenant",
        "usage_by_call",
    )

    def __init__(self, choices: int, fatal: tuple[type[BaseException], ...], tenant: str = "") -> None:
        self.choices = choices
        self.tenant = tenant
        self.refused: ServeAppError | None = None
        self.fatal = fatal
        self.calls = 0  # one call of generate() per prompt
        self.groups: list[list[int]] = []
        self.usage_by_call: list[list[int]] = []
        self.failure: BaseException | None = None
        self.finish_reason = ""  # of all choices: why the first was cut off, if any was

    def take(self) -> list[list[int]]:
        groups, self.groups = self.groups, []
        return groups

    def usage(self) -> Usage:
        if not self.calls:
            return Usage()
        prompt, completion, cached = (sum(column) for column in zip(*self.usage_by_call, strict=True))
        return Usage(prompt, completion, cached, self.finish_reason)

    def record(self, outputs: AsyncGenerator[Output, None]) -> AsyncGenerator[Output, None]:
        """Pass the outputs of one prompt on, noting the token ids of each before its consumer sees it. Called once per
        prompt, in the order of the prompts."""
        first_choice, used = self.calls * self.choices, self._new_call()
        return self._pass_on(outputs, first_choice, used)

    def record_pooling(self, outputs: AsyncGenerator[Output, None]) -> AsyncGenerator[Output, None]:
        """The same for embeddings, where only the prompt counts."""
        return self._pass_on(outputs, None, self._new_call())

    def _new_call(self) -> list[int]:
        self.calls += 1
        used = [0, 0, 0]  # prompt, completion, cached tokens
        self.usage_by_call.append(used)
        return used

    async def _pass_on(
        self, outputs: AsyncGenerator[Output, None], first_choice: int | None, used: list[int]
    ) -> AsyncGenerator[Output, None]:
        try:
            async for output in outputs:
                if not used[0] and output.prompt_token_ids is not None:
                    used[0] = len(output.prompt_token_ids)
                    used[2] = output.num_cached_tokens or 0
                if first_choice is not None:
                    self._note(output, first_choice, used)
                yield output
        except self.fatal as error:
            self.failure = error
            raise
        finally:
            await outputs.aclose()

    def _note(self, output: Output, first_choice: int, used: list[int]) -> None:
        for choice in output.outputs:
            ids = choice.token_ids
            if ids:
                used[1] += len(ids)
                self.groups.append([first_choice + choice.index, *ids])
            if choice.finish_reason and self.finish_reason in ("", ENDED):
                self.finish_reason = choice.finish_reason
