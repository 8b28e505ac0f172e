"""vLLM's engine client with our additions: it records output token ids, aborts always reach EngineCore, and the load
after each step is kept."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any

import msgspec
from vllm.exceptions import VLLMValidationError
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import StatLoggerBase

from serve_app.engine.grammar_queue import GrammarQueue
from serve_app.engine.prompt_turns import PrefillTurns, ScoredPrompt
from serve_app.engine.token_recorder import recorder_of_request
from serve_app.engine.vllm_adapter.continuing import continued_queue
from serve_app.engine.vllm_adapter.grammar import grammar_of
from serve_app.engine.vllm_adapter.log_probabilities import (
    Entries,
    ScoringTurns,
    computed_in_turn,
    made_in_turns,
    too_many_entries,
)
from serve_app.errors import ServeAppError
from serve_app.transport import EngineLoad


class RecordedLLM(AsyncLLM):
    """AsyncLLM that passes outputs through the recorder of their request, and grammars first through `grammars`."""

    grammars: GrammarQueue | None = None
    prompt_turns: PrefillTurns | None = None  # of prompts whose log probabilities are asked for

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._scoring_turns = ScoringTurns()

    def __del__(self) -> None:
        """Do nothing: `VllmEngine.shutdown` has ended it, and vLLM's own finalizer fails at interpreter exit."""

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        recorder = recorder_of_request.get()
        if recorder is not None:
            kwargs.setdefault("priority", recorder.priority)  # transcriptions have none of their own
        outputs = super().generate(prompt, sampling_params, request_id, **kwargs)
        if sampling_params.prompt_logprobs is not None:
            tenant = "" if recorder is None else recorder.tenant
            tokens = self._scored_tokens(prompt, sampling_params)
            scored = ScoredPrompt(request_id, tenant, kwargs.get("priority", 0), tokens)
            outputs = made_in_turns(outputs, tenant, self._scoring_turns)
            outputs = outputs if self.prompt_turns is None else computed_in_turn(outputs, scored, self.prompt_turns)
        return outputs if recorder is None else recorder.record(outputs, request_id)

    def encode(self, *args: Any, **kwargs: Any) -> AsyncGenerator[PoolingRequestOutput, None]:
        outputs = super().encode(*args, **kwargs)
        recorder = recorder_of_request.get()
        return outputs if recorder is None else recorder.record(outputs, pooling=True)

    async def add_request(self, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        await self.check_grammar(getattr(params, "structured_outputs", None))
        add = functools.partial(super().add_request, request_id, prompt, params, *args, **kwargs)
        recorder = recorder_of_request.get()
        if recorder is None or recorder.continued is None:
            return await add()
        number = recorder.prompts[request_id]
        if not recorder.continued.groups_of(number):
            return await add()
        return await continued_queue(self, add, params, number, recorder.continued)

    async def make_entries(self, tenant: str, kept: Iterable[Entries]) -> None:
        """Make these log probabilities of an answer, in its tenant's turns."""
        for entries in kept:
            await self._scoring_turns.run(tenant, entries.slices())

    def end_prompt_turns(self) -> None:
        """Ends the turns of the prompts that EngineCore has computed; called after a step with first tokens."""
        if self.prompt_turns is None or not self.prompt_turns.running:
            return
        states = self.output_processor.request_states.values()
        prefilling = {state.external_req_id for state in states if state.is_prefilling}
        known = {
            state.external_req_id for state in states
        }  # the others are not there yet, or end their turns themselves
        for request_id in self.prompt_turns.running & known - prefilling:
            self.prompt_turns.end(request_id)

    def _scored_tokens(self, prompt: Any, params: Any) -> int:
        """The tokens of a prompt whose log probabilities are asked for, of all its answers. Raises VLLMValidationError:
        too many are."""
        tokens = len(prompt.get("prompt_token_ids") or ()) if isinstance(prompt, dict) else 0
        entries = params.prompt_logprobs
        each = self.model_config.get_vocab_size() if entries == -1 else max(1, entries)
        if why := too_many_entries(tokens, each, params.n):
            raise VLLMValidationError(why, parameter="prompt_logprobs", value=entries)
        return tokens * int(params.n)

    async def check_grammar(self, constraint: StructuredOutputsParams | None) -> None:
        """Return when the engine may compile it. Raises VLLMValidationError: refused; the recorder has the reason."""
        recorder = recorder_of_request.get()
        if self.grammars is None or constraint is None or recorder is None:
            return
        try:
            grammar = grammar_of(constraint)
            if grammar is not None:
                await self.grammars.check(recorder.tenant, grammar)
        except ServeAppError as error:
            recorder.refused = error
            raise VLLMValidationError(error.message) from error
        except (ValueError, KeyError, TypeError) as error:
            raise VLLMValidationError(f"the grammar or schema cannot be built: {error}") from error

    async def _add_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        # Open bug upstream: a cancel during the hand-over of a request leaks its state.
        try:
            await super()._add_request(request, *args, **kwargs)
        except BaseException:
            await asyncio.shield(self.abort(request.request_id, internal=True))
            raise


class LiveStats(StatLoggerBase):
    """Keeps the load after the last engine step; vLLM calls `record` in our event loop, without RPC.

    Args:
        on_first_tokens: called after a step with the first token of a request.
    """

    def __init__(self, on_first_tokens: Callable[[], None] = lambda: None) -> None:
        self.load = EngineLoad()
        self._on_first_tokens = on_first_tokens

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        load = self.load
        found: dict[str, float] = {"steps": load.steps + 1}
        sequences = 0
        if scheduler_stats is not None:
            sequences = scheduler_stats.num_running_reqs
            found["running"] = scheduler_stats.num_running_reqs
            found["waiting"] = scheduler_stats.num_waiting_reqs
            found["kv_cache_usage"] = scheduler_stats.kv_cache_usage
            # of a continued sequence, `iteration_stats` has no prefill: `produced_tokens` takes it away
            cache = scheduler_stats.prefix_cache_stats
            looked_up = cache.queries + cache.preempted_queries
            prefilled = looked_up - cache.hits - cache.preempted_hits
            found["prefilled_tokens"] = load.prefilled_tokens + prefilled
        if iteration_stats is not None:
            found["generated_tokens"] = load.generated_tokens + iteration_stats.num_generation_tokens
            found["prompt_tokens"] = load.prompt_tokens + iteration_stats.num_prompt_tokens
            found["preemptions"] = load.preemptions + iteration_stats.num_preempted_reqs
            sequences += len(iteration_stats.finished_requests)  # in the step, and no longer among those that run
        found["sequence_steps"] = load.sequence_steps + sequences
        self.load = msgspec.structs.replace(load, **found)
        if iteration_stats is not None and iteration_stats.time_to_first_tokens_iter:
            self._on_first_tokens()

    def log_engine_initialized(self) -> None:
        """Log nothing: the replica logs its own start."""
