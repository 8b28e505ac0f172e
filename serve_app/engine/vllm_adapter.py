"""vLLM behind our engine protocol: the only module that imports vllm (0.32.0; what is private: docs/decisions.md).

`AsyncLLM` runs the model; vLLM's own OpenAI serving objects turn its output into OpenAI's wire format. What is ours:
the token ids behind each piece of output are recorded on their way through, aborts are certain, and health sees a
frozen engine too.

Invariant: when `VllmEngine.run` ends, in whatever way, EngineCore holds nothing of that request.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
from argparse import Namespace
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import fields
from typing import Any

import psutil
import vllm.envs
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.datastructures import State
from starlette.requests import Request
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.cli_args import FrontendArgs
from vllm.entrypoints.openai.chat_completion import serving as chat_serving
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion import serving as completion_serving
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.pooling.embed.protocol import EmbeddingRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest, TokenizeRequest
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.executor import Executor
from vllm.v1.metrics.loggers import StatLoggerBase

from serve_app.engine import environment
from serve_app.engine.engine_args import engine_arguments
from serve_app.engine.live_load import LoadSink
from serve_app.engine.liveness import StallDetector
from serve_app.engine.openai_errors import error_body
from serve_app.engine.protocol import EngineInfo, EngineLoad, Piece, Submit, Usage
from serve_app.engine.recorder import Recorder
from serve_app.engine.trusted_models import trusted
from serve_app.errors import EngineFailed, EngineUnreachable
from serve_app.settings import ModelSettings
from serve_app.types import Operation

logger = logging.getLogger("ray.serve")

PROBE_TIMEOUT_S = 2.0  # a round trip to an idle EngineCore takes 1 ms; a busy one answers between two steps
SHUTDOWN_TIMEOUT_S = 10.0  # EngineCore frees GPU memory within seconds; then it is ended by force

FATAL = (EngineDeadError,)  # not EngineGenerateError: that request failed, the engine goes on
# Fields that become a grammar; vLLM lets errors of the grammar's builder through as they are.
GRAMMAR_FIELDS = ("structured_outputs", "response_format", "tools", "text")

_recorder: contextvars.ContextVar[Recorder | None] = contextvars.ContextVar("recorder", default=None)


class _RecordedLLM(AsyncLLM):
    """AsyncLLM whose outputs pass the recorder of the request that asked for them."""

    def __del__(self) -> None:
        """Nothing: `VllmEngine.shutdown` has ended it, and at the interpreter's exit vLLM's own finaliser fails."""

    def generate(self, *args: Any, **kwargs: Any) -> AsyncGenerator[RequestOutput, None]:
        outputs = super().generate(*args, **kwargs)
        recorder = _recorder.get()
        return outputs if recorder is None else recorder.record(outputs)

    def encode(self, *args: Any, **kwargs: Any) -> AsyncGenerator[PoolingRequestOutput, None]:
        outputs = super().encode(*args, **kwargs)
        recorder = _recorder.get()
        return outputs if recorder is None else recorder.record_pooling(outputs)

    async def _add_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        # Open upstream: a cancel while the request is handed over leaves its state behind for ever.
        try:
            await super()._add_request(request, *args, **kwargs)
        except BaseException:
            await asyncio.shield(self.abort(request.request_id, internal=True))
            raise


class _LiveStats(StatLoggerBase):
    """Keeps the newest figures of each engine step; vLLM calls `record` in our event loop, no RPC."""

    def __init__(self, sink: LoadSink) -> None:
        self._sink = sink

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        sink = self._sink
        sink.steps += 1
        if scheduler_stats is not None:
            sink.running = scheduler_stats.num_running_reqs
            sink.waiting = scheduler_stats.num_waiting_reqs
            sink.kv_cache_usage = scheduler_stats.kv_cache_usage
            sink.prefix_queries += scheduler_stats.prefix_cache_stats.queries
            sink.prefix_hits += scheduler_stats.prefix_cache_stats.hits
        if iteration_stats is not None:
            sink.generated += iteration_stats.num_generation_tokens
            sink.prompted += iteration_stats.num_prompt_tokens
            sink.preempted += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        """Nothing to say: the replica logs its own start."""


class VllmEngine:
    """`EngineBackend` on vLLM. `environment.prepare` must have run before this module was imported."""

    def __init__(self, settings: ModelSettings, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self._sink = LoadSink()
        self._llm: _RecordedLLM | None = None
        self._state = State()
        self._stall = StallDetector(settings.health_stall_s)
        self._probe: asyncio.Task[bool] | None = None

    async def start(self) -> EngineInfo:
        """Load the model and build vLLM's serving objects; blocks the loop until EngineCore answers (as vLLM does)."""
        arguments = AsyncEngineArgs(**engine_arguments(self._settings, environment.platform()))
        config = arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)
        if config.parallel_config.distributed_executor_backend == "ray":
            from ray.util import get_current_placement_group

            # The spawned EngineCore does not see the actor's group by itself.
            config.parallel_config.placement_group = get_current_placement_group()
        llm = _RecordedLLM(
            vllm_config=config,
            executor_class=Executor.get_class(config),
            log_requests=False,
            log_stats=False,
            usage_context=UsageContext.OPENAI_API_SERVER,
            stat_loggers=[lambda *_: _LiveStats(self._sink)],
        )
        self._llm = llm
        _spare_the_event_loop()
        tasks = await llm.get_supported_tasks()
        await init_app_state(llm, self._state, _frontend_arguments(arguments, self._settings), tasks)
        cache = llm.vllm_config.cache_config
        blocks = cache.num_gpu_blocks or 0
        return EngineInfo(
            model=self._settings.name,
            tasks=sorted(tasks),
            max_model_len=llm.model_config.max_model_len,
            slots=config.scheduler_config.max_num_seqs,
            kv_cache_tokens=getattr(cache, "kv_cache_size_tokens", None) or blocks * cache.block_size,
            kv_cache_bytes=(cache.kv_cache_memory_bytes or 0) * self._settings.ranks,
        )

    async def run(self, submit: Submit) -> AsyncIterator[Piece]:
        """See `EngineBackend.run`."""
        if not self.alive:
            raise EngineUnreachable("the engine is dead")
        recorder = Recorder(_choices(submit), FATAL)
        _recorder.set(recorder)
        try:
            answer = await self._answer(submit)
        except EngineDeadError as error:
            raise EngineFailed(f"the engine died: {error}") from error
        except ValidationError as error:
            yield _refusal(_validation_error(error))
            return
        except Exception as error:
            if recorder.failure is not None:
                raise EngineFailed(f"the engine died: {error}") from error
            yield _refusal(_error_response(error, submit))
            return
        if isinstance(answer, ErrorResponse):
            yield _refusal(answer)
            return
        if isinstance(answer, BaseModel):
            body = answer.model_dump_json(by_alias=True).encode()
            yield Piece(body=body, status=200, media="json", groups=recorder.take(), usage=recorder.usage())
            return
        if isinstance(answer, bytes):
            yield Piece(body=answer, status=200, media="json", usage=recorder.usage())
            return
        status, media = 200, "sse"
        try:
            async for text in answer:
                if recorder.failure is not None:
                    raise EngineFailed(f"the engine died: {recorder.failure}") from recorder.failure
                yield Piece(body=text.encode(), status=status, media=media, groups=recorder.take())
                status, media = 0, ""
        finally:
            await answer.aclose()
        yield Piece(body=b"", groups=recorder.take(), usage=recorder.usage())

    async def _answer(self, submit: Submit) -> BaseModel | bytes | AsyncGenerator[str, None]:
        state, body = self._state, dict(submit.body)
        raw = _raw_request(submit.request_id)
        if submit.operation.generates:
            body["priority"] = submit.priority
            if submit.cache_salt is not None:
                body["cache_salt"] = submit.cache_salt
        match submit.operation:
            case Operation.CHAT:
                serving = _wanted(state, "openai_serving_chat", "chat completions")
                return await serving.create_chat_completion(ChatCompletionRequest.model_validate(body), raw)
            case Operation.COMPLETION:
                serving = _wanted(state, "openai_serving_completion", "completions")
                return await serving.create_completion(CompletionRequest.model_validate(body), raw)
            case Operation.RESPONSES:
                serving = _wanted(state, "openai_serving_responses", "responses")
                body |= {"request_id": f"resp_{submit.request_id}", "store": False}
                answer = await serving.create_responses(ResponsesRequest.model_validate(body), raw)
                return answer if isinstance(answer, BaseModel) else _responses_events(answer)
            case Operation.EMBEDDING:
                serving = _wanted(state, "serving_embedding", "embeddings")
                response = await serving(TypeAdapter(EmbeddingRequest).validate_python(body), raw)
                return bytes(response.body)
            case Operation.TOKENIZE:
                return await state.serving_tokenization.create_tokenize(_TOKENIZE.validate_python(body), raw)
            case Operation.DETOKENIZE:
                return await state.serving_tokenization.create_detokenize(DetokenizeRequest.model_validate(body), raw)

    def load(self) -> EngineLoad:
        """See `EngineBackend.load`."""
        return self._sink.snapshot()

    @property
    def alive(self) -> bool:
        """See `EngineBackend.alive`."""
        return self._llm is not None and not self._llm.errored

    async def check_health(self) -> None:
        """Raise when EngineCore is dead, or neither answers, steps nor uses CPU for `health_stall_s`."""
        llm = self._running()
        await llm.check_health()
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(llm.is_paused())
        done, _ = await asyncio.wait({self._probe}, timeout=PROBE_TIMEOUT_S)
        if done:
            self._probe.result()
        stalled_s = self._stall.observe(bool(done), (self._sink.steps, self._cpu_time_s()), self._clock())
        if stalled_s is not None:
            raise EngineFailed(f"the engine is frozen: no answer, no step and no CPU time for {stalled_s:.0f} s")

    def _cpu_time_s(self) -> float:
        """CPU time of EngineCore and its workers: a long prefill answers no probe, but it computes."""
        total = 0.0
        for child in psutil.Process().children(recursive=True):
            try:
                times = child.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += times.user + times.system
        return total

    def kill(self) -> None:
        """See `EngineBackend.kill`."""
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()

    async def shutdown(self) -> None:
        """See `EngineBackend.shutdown`."""
        if self._llm is None:
            return
        llm, self._llm = self._llm, None
        if llm.output_handler is not None:
            llm.output_handler.cancel()  # else it reports the intended end of EngineCore as a crash
        children = psutil.Process().children(recursive=True)
        await asyncio.to_thread(llm.shutdown, SHUTDOWN_TIMEOUT_S)
        for child in psutil.wait_procs(children, timeout=1)[1]:
            child.kill()

    def _running(self) -> _RecordedLLM:
        if self._llm is None:
            raise EngineFailed("the engine is not running")
        return self._llm


_TOKENIZE: TypeAdapter[Any] = TypeAdapter(TokenizeRequest)


def _spare_the_event_loop() -> None:
    """Two costs per token of vLLM's front end that buy nothing here: every look at a setting asks the environment anew
    (EngineCore caches them, the front end does not), and the chunks it makes itself are validated as a client's."""
    vllm.envs.enable_envs_cache()
    for module, names in (
        (chat_serving, ("ChatCompletionStreamResponse", "ChatCompletionResponseStreamChoice", "DeltaMessage")),
        (completion_serving, ("CompletionStreamResponse", "CompletionResponseStreamChoice")),
    ):
        for name in names:
            setattr(module, name, trusted(getattr(module, name)))


def _frontend_arguments(arguments: AsyncEngineArgs, settings: ModelSettings) -> Namespace:
    """The namespace vLLM's `init_app_state` reads, as its own command line would have made it."""
    values = {field.name: getattr(FrontendArgs(), field.name) for field in fields(FrontendArgs)}
    values |= vars(arguments)
    values["chat_template"] = settings.chat_template
    values["tool_call_parser"] = settings.tool_parser
    values["enable_auto_tool_choice"] = settings.tool_parser is not None
    values["enable_prompt_tokens_details"] = True
    return Namespace(**values)


def _choices(submit: Submit) -> int:
    n = submit.body.get("n")
    return n if isinstance(n, int) and n > 0 else 1


def _wanted(state: State, name: str, what: str) -> Any:
    serving = getattr(state, name, None)
    if serving is None:
        raise ValueError(f"this model does not support {what}")
    return serving


def _raw_request(request_id: str) -> Request:
    """What the serving objects read of an HTTP request: the id. No header of the client comes through."""
    return Request({"type": "http", "method": "POST", "path": "/", "headers": [(b"x-request-id", request_id.encode())]})


async def _responses_events(events: AsyncGenerator[Any, None]) -> AsyncGenerator[str, None]:
    """Responses API events as SSE; these name their type in an `event:` line."""
    try:
        async for event in events:
            yield f"event: {event.type}\ndata: {event.model_dump_json(by_alias=True)}\n\n"
    finally:
        await events.aclose()


def _refusal(error: ErrorResponse) -> Piece:
    said, status = error.error, error.error.code
    return Piece(
        body=error_body(said.message, status, said.type, said.param), status=status, media="json", usage=Usage()
    )


def _error_response(error: Exception, submit: Submit) -> ErrorResponse:
    """An error before the first output: vLLM's own as they are, others the client's where its grammar is at fault."""
    response = create_error_response(error)
    if response.error.code < 500 or isinstance(error, EngineGenerateError):
        return response
    field = next((name for name in GRAMMAR_FIELDS if submit.body.get(name)), None)
    if field is None:
        logger.exception("request %s failed before its first output", submit.request_id, exc_info=error)
        return response
    return create_error_response(f"{field}: the grammar or schema cannot be built: {error}", param=field)


def _validation_error(error: ValidationError) -> ErrorResponse:
    """The first thing wrong, in OpenAI's format, with the field in `param`."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    message = f"{field}: {first['msg']}" if field else first["msg"]
    return create_error_response(message, param=field or None)
