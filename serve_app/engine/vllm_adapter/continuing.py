"""Continues a stream of another engine: makes the outputs of its earlier runs again before the new ones come.

The request is registered with vLLM as always, but kept from EngineCore while the groups of its earlier runs go through
vLLM's own output processor again; then it goes to EngineCore with the tokens that they hold (`produced_tokens`).

Invariant: without any one of `private_names.NAMES`, or without the patches of EngineCore, nothing is patched here, and
`prepare` says so. No import of vLLM at the top: a name that has moved must break nothing else.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import hashlib
import heapq
import importlib
import itertools
import logging
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from serve_app.engine.continuation import ContinuedRuns
from serve_app.engine.token_recorder import TokenRecorder, recorder_of_request
from serve_app.engine.vllm_adapter.private_names import CLOCKS, IDS, MERGE, SIGNATURES, missing
from serve_app.engine.vllm_adapter.produced_tokens import ENGINE_HALF, PRODUCED
from serve_app.engine.vllm_adapter.wrapped import wrap
from serve_app.transport import TokenUsage, Unsent

logger = logging.getLogger("ray.serve")

TURN_GROUPS = 64  # made again in one turn of the event loop: 2 to 6 ms
GROUP_TOKENS = 64  # of an answer that is no stream, in one group; longer ones would hold up the event loop


async def prepare(llm: Any) -> bool:
    """Install the front half; returns whether this engine can continue streams, and logs why it cannot."""
    why = _unsupported(llm.vllm_config) or ", ".join(missing())
    if not why:
        try:
            await llm.engine_core.call_utility_async(ENGINE_HALF)
        except Exception as error:  # noqa: BLE001 - vLLM passes on what EngineCore raised, as a plain Exception
            why = f"EngineCore has no engine half: {error}"
    if why:
        logger.warning("vLLM cannot continue the streams of a lost replica, which end with an error: %s", why)
        return False
    for clock in CLOCKS:
        importlib.import_module(clock.module).time = AnswerTime()  # type: ignore[attr-defined]
    for ids in IDS:
        importlib.import_module(ids.module).random_uuid = answer_uuid  # type: ignore[attr-defined]
    importlib.import_module(SIGNATURES.module).uuid = AnswerUuids()  # type: ignore[attr-defined]
    serving = importlib.import_module(MERGE.module)
    wrap(serving, "merge_async_iterators", recorded_merge)
    send = llm.engine_core.add_request_async

    async def send_or_keep(request: Any) -> None:
        kept = _kept.get()
        if kept is None:
            await send(request)
        else:
            kept.append(request)

    llm.engine_core.add_request_async = send_or_keep
    llm.turns = ContinuedTurns()
    return True


def _unsupported(config: Any) -> str:
    """What keeps an engine of this configuration from it; empty: nothing."""
    if config.observability_config.otlp_traces_endpoint is not None:
        return "vLLM's tracing needs figures that outputs of continued runs lack"
    if config.speculative_config is not None:
        return "speculative decoding"
    on_cpu = config.device_config.device_type == "cpu" and config.parallel_config.distributed_executor_backend != "ray"
    return "" if config.use_v2_model_runner or on_cpu else "model runner V1 on a GPU, or in Ray's workers"


@dataclass(slots=True)
class AnswerIdentity:
    """What every run of a request must give its answer: the time (0: now), and ids."""

    request_id: str
    created: int
    ids: int = 0

    def next_id(self) -> str:
        self.ids += 1
        return hashlib.blake2b(f"{self.request_id} {self.ids}".encode(), digest_size=8).hexdigest()


identity_of_request: contextvars.ContextVar[AnswerIdentity | None] = contextvars.ContextVar("identity", default=None)
_kept: contextvars.ContextVar[list[Any] | None] = contextvars.ContextVar("kept", default=None)


class AnswerTime:
    """The module `time` for vLLM's serving objects."""

    def time(self) -> float:
        identity = identity_of_request.get()
        return time.time() if identity is None or not identity.created else identity.created

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


class AnswerUuids:
    """The module `uuid` for vLLM's serving object of messages, which reads the `hex` of what `uuid4` gives."""

    def uuid4(self) -> SimpleNamespace:
        return SimpleNamespace(hex=answer_uuid())


def answer_uuid() -> str:
    identity = identity_of_request.get()
    return secrets.token_hex(8) if identity is None else identity.next_id()


def recorded_merge(merge: Callable[..., AsyncGenerator[Any, None]], *iterators: Any) -> AsyncGenerator[Any, None]:
    """vLLM's merge of the outputs of several prompts, which pulls ahead: outputs are recorded as they leave it, and new
    ones wait until those of all continued runs have left."""
    recorder = recorder_of_request.get()
    if recorder is None or len(iterators) == 1:
        return merge(*iterators)
    recorder.is_merged = True
    return _recorded(merge(*iterators), recorder)


async def _recorded(outputs: AsyncGenerator[Any, None], recorder: TokenRecorder) -> AsyncGenerator[Any, None]:
    continued = recorder.continued
    held = list[tuple[int, Any]]()
    try:
        async for found in outputs:
            held.append(found)
            while (at := _ready(held, continued)) is not None:
                prompt, output = held.pop(at)
                recorder.record_output(prompt, output)
                yield prompt, output
        if continued is not None:
            continued.end()
    finally:
        await outputs.aclose()


def _ready(held: list[tuple[int, Any]], continued: ContinuedRuns | None) -> int | None:
    """The place of the output that can be passed on; None: there is none."""
    return next((at for at, (prompt, _) in enumerate(held) if continued is None or continued.is_next(prompt)), None)


async def continued_queue(
    llm: Any, add: Callable[[], Awaitable[Any]], params: Any, prompt: int, continued: ContinuedRuns
) -> ContinuedQueue:
    """Register a prompt of which continued runs have produced tokens. Raises `not_continuable`.

    Args:
        add: vLLM's `add_request` with the arguments of the request; gives its queue.
    """
    if params.prompt_logprobs is not None:
        raise continued.fail("the log probabilities of its prompt are not known here")
    groups = continued.groups_of(prompt)
    vocabulary = llm.model_config.get_vocab_size()
    if not all(0 <= token < vocabulary for _, *tokens in groups for token in tokens):
        raise continued.fail("its tokens are not those of this model")
    requests: list[Any] = []
    token = _kept.set(requests)
    try:
        queue = await add()
    finally:
        _kept.reset(token)
    for request in requests:
        llm.output_processor.request_states[request.request_id].num_cached_tokens = continued.cached_tokens_of(prompt)
    return ContinuedQueue(llm, queue, requests, groups, continued)


def produced(llm: Any, recorder: TokenRecorder) -> Unsent:
    """What a running answer that is no stream has produced since the start of this run: of a single choice without log
    probabilities, of which vLLM keeps no copy that could be taken on."""
    states = [one for one in llm.output_processor.request_states.values() if one.external_req_id in recorder.prompts]
    if len(recorder.prompts) != 1 or recorder.choices != 1 or len(states) != 1:
        return Unsent([])  # it has several, has not begun, or has just ended
    state = states[0]
    if state.logprobs_processor.num_logprobs is not None or state.logprobs_processor.num_prompt_logprobs is not None:
        return Unsent([])
    known = 0 if recorder.continued is None else recorder.continued.tokens_in_last(0, 0)
    tokens = state.detokenizer.output_token_ids[known:]
    groups = [[0, *tokens[at : at + GROUP_TOKENS]] for at in range(0, len(tokens), GROUP_TOKENS)]
    return Unsent(groups, TokenUsage(state.prompt_len, 0, state.num_cached_tokens))


def first_tokens(llm: Any, recorders: Mapping[str, TokenRecorder]) -> Iterator[tuple[str, TokenUsage]]:
    """The requests that have their first token now, each told once: those that await it, with their prompts' tokens."""
    awaiting = {
        one: request_id
        for request_id, recorder in recorders.items()
        if recorder.awaits_first_token
        for one in recorder.prompts
    }
    for state in llm.output_processor.request_states.values() if awaiting else ():
        request_id = None if state.is_prefilling else awaiting.get(state.external_req_id)
        if request_id is not None and recorders[request_id].awaits_first_token:
            recorders[request_id].awaits_first_token = False
            yield request_id, TokenUsage(state.prompt_len, 0, state.num_cached_tokens)


class ContinuedTurns:
    """Who makes outputs again next: who has the fewest left, one turn in each round of the event loop.

    A dead engine's streams come all at once. With turns for all of them they would reach EngineCore together, when the
    last is made; so it computes the first meanwhile, and what else runs here waits for one turn and not for twenty.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    async def wait(self, left: int) -> None:
        """Until it is the turn of one that has so many outputs left."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._give)
        turn = loop.create_future()
        heapq.heappush(self._waiting, (left, next(self._numbers), turn))
        await turn

    def _give(self) -> None:
        while self._waiting:
            turn = heapq.heappop(self._waiting)[-1]
            if not turn.done():  # else its request was cancelled
                turn.set_result(None)
                break
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._give)


class ContinuedQueue:
    """The queue of a continued request, as `AsyncLLM.generate` reads it: first the outputs of its continued runs, made
    again as they are read, one for each group; then it goes to EngineCore, and vLLM's own queue takes over."""

    def __init__(
        self, llm: Any, queue: Any, requests: list[Any], groups: list[list[int]], continued: ContinuedRuns
    ) -> None:
        self.request_id = queue.request_id
        self.close = queue.close
        self._llm = llm
        self._queue = queue
        self._requests = requests
        self._continued = continued
        self._states = llm.output_processor.request_states
        self._groups = len(groups)
        self._produced: dict[int, list[int]] = defaultdict(list)  # by choice
        for choice, *tokens in groups:
            self._produced[choice] += tokens
        self._outputs = self._outputs_of(groups)
        self._made = 0

    def get_nowait(self) -> Any:
        if self._made % TURN_GROUPS == 0:
            return None  # `get` is awaited next
        return self._make_next()

    async def get(self) -> Any:
        await self._turn()
        output = self._make_next()
        while output is None and self._made < self._groups:
            await self._turn()  # an answer that is no stream has no output yet
            output = self._make_next()
        if output is not None:
            return output
        await self._begin()
        return await self._queue.get()

    async def _turn(self) -> None:
        await self._llm.turns.wait(self._groups - self._made)

    def _make_next(self) -> Any:
        """The output of the next group; None: there is no other, or it makes none yet."""
        output = next(self._outputs, None)
        if output is None:
            return None
        self._made += 1
        self._llm.output_processor.process_outputs([output])  # without statistics: this engine did not produce it
        made = self._queue.get_nowait()
        if made is None and self._continued.is_stream:
            raise self._continued.fail("a choice continues after its end")
        return made

    def _outputs_of(self, groups: list[list[int]]) -> Iterator[Any]:
        """EngineCore's outputs, as it made them; the log probabilities are made up, for their events are dropped."""
        import numpy
        from vllm.v1.engine import EngineCoreOutput
        from vllm.v1.outputs import LogprobsLists

        left = Counter(choice for choice, *_ in groups)
        for choice, *tokens in groups:
            left[choice] -= 1
            request = self._requests[choice]
            finish_reason, stop_reason = (None, None) if left[choice] else self._finish_of(choice)
            logprobs = None
            if request.sampling_params.num_logprobs is not None:
                ids = numpy.array(tokens)
                logprobs = LogprobsLists(ids[:, None], numpy.zeros((len(ids), 1)), numpy.ones_like(ids))
            yield EngineCoreOutput(
                request.request_id,
                tokens,
                new_logprobs=logprobs,
                finish_reason=finish_reason,
                stop_reason=stop_reason,
            )

    def _finish_of(self, choice: int) -> tuple[Any, Any]:
        """Why a choice has ended in a continued run; a stop string is found by the output processor."""
        from vllm.v1.core.sched.utils import check_stop
        from vllm.v1.request import Request

        request = Request.from_engine_core_request(self._requests[choice], None)
        request.append_output_token_ids(self._produced[choice])
        has_ended = check_stop(request, self._llm.model_config.max_model_len)
        return (request.get_finished_reason(), request.stop_reason) if has_ended else (None, None)

    async def _begin(self) -> None:
        """Hand the choices that continue to EngineCore."""
        self.get_nowait = self._queue.get_nowait  # type: ignore[method-assign]
        self.get = self._queue.get  # type: ignore[method-assign]
        for choice, request in enumerate(self._requests):
            state = self._states.get(request.request_id)
            if state is None:
                continue  # it has ended
            if self._produced[choice]:
                state.is_prefilling = True  # its next output is the first one of this engine
                params = copy.copy(request.sampling_params)
                params.extra_args = {**(params.extra_args or {}), PRODUCED: self._produced[choice]}
                request.sampling_params = params
            await self._llm.engine_core.add_request_async(request)
