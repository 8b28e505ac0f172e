"""vLLM behind our engine protocol.

`AsyncLLM` runs the model; vLLM's own OpenAI serving objects convert its output to OpenAI's format. This package adds:
the token ids of each piece of output are recorded, aborts always reach EngineCore, and health checks detect a frozen
engine, too.

Invariant: when `VllmEngine.run` ends, in any way, EngineCore has no state of that request.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import pickle
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any
from weakref import WeakValueDictionary

import psutil
from prometheus_client.metrics_core import Metric
from pydantic import BaseModel, ValidationError
from starlette.datastructures import State
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import Executor

from serve_app.core.continuation import why_not_continued
from serve_app.engine.continuation import ContinuedRuns, is_continued, require_continuable
from serve_app.engine.engine_failure import how_ended
from serve_app.engine.grammar_compiler import Compiler
from serve_app.engine.grammar_queue import GrammarQueue
from serve_app.engine.helper_process import RENDER_PROCESS, HelperProcess
from serve_app.engine.prompt_turns import PrefillTurns
from serve_app.engine.stall_detector import StallDetector
from serve_app.engine.start import engine_args, environment
from serve_app.engine.token_recorder import TokenRecorder, recorder_of_request
from serve_app.engine.vllm_adapter import (
    audio_loader,
    continuing,
    cut_calls,
    log_probabilities,
    media_connector,
    own_metrics,
    render_process,
    response_entries,
    serving,
    shown_model,
    transcriptions,
)
from serve_app.engine.vllm_adapter.grammar import BACKEND, tokenizer_description
from serve_app.engine.vllm_adapter.kv_cache import block_bytes
from serve_app.engine.vllm_adapter.large_requests import LargeRequests
from serve_app.engine.vllm_adapter.media_cache import keep_in_front
from serve_app.engine.vllm_adapter.messages import ERROR_EVENT
from serve_app.engine.vllm_adapter.private_names import END_NAMES, missing
from serve_app.engine.vllm_adapter.recorded import LiveStats, RecordedLLM
from serve_app.engine.vllm_adapter.render_turns import take_turns
from serve_app.engine.vllm_adapter.rendered import name_what_is_refused, take_rendered
from serve_app.errors import BadRequest, EngineFailed, EngineUnreachable, Unavailable
from serve_app.settings import ModelSettings
from serve_app.transport import EngineInfo, EngineLoad, FirstTokenReport, Frame, Submit, Unsent

logger = logging.getLogger("ray.serve")

KILLED_S = 1.0  # only the kernel remains to wait for
# For EngineCore's own exit: its interpreter takes seconds to finalize and saves nothing; the kernel frees its memory,
# and the resource tracker its files in /dev/shm. With several ranks it must also end its workers.
SHUTDOWN_TIMEOUT_S = 0.5
RANKS_SHUTDOWN_TIMEOUT_S = 5.0
RESOURCE_TRACKER = "multiprocessing.resource_tracker"  # part of its command line

FATAL = (EngineDeadError,)  # not EngineGenerateError: that request failed, the engine goes on


class VllmEngine:
    """`EngineBackend` on vLLM. `environment.prepare` must have run before this module was imported."""

    def __init__(self, settings: ModelSettings, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self._stats = LiveStats(self._on_first_tokens)
        self._report_first_token: FirstTokenReport | None = None
        self._llm: RecordedLLM | None = None
        self._state = State()
        self._large: LargeRequests | None = None
        self._stall = StallDetector(settings.health_stall_s)
        self._probe: asyncio.Task[bool] | None = None
        self._continues = False
        self._recorders = WeakValueDictionary[str, TokenRecorder]()  # of running requests, by id

    async def start(self) -> EngineInfo:
        """Load the model and build vLLM's serving objects; blocks the loop until EngineCore answers (as vLLM does)."""
        arguments = AsyncEngineArgs(**engine_args.engine_arguments(self._settings, environment.platform()))
        config = arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)
        _set_for_all_requests(config)
        llm = RecordedLLM(
            vllm_config=config,
            executor_class=_executor_class(config, self._settings),
            log_requests=False,
            log_stats=False,
            usage_context=UsageContext.OPENAI_API_SERVER,
            stat_loggers=[lambda *_: self._stats, own_metrics.VllmMetrics],
        )
        self._llm = llm
        if llm.vllm_config.structured_outputs_config.backend == BACKEND and self._settings.task == "generate":
            compiler = Compiler(
                tokenizer_description(llm.vllm_config, llm.get_tokenizer()), self._settings.grammar_cpu_s
            )
            llm.grammars = GrammarQueue(lambda grammar: asyncio.to_thread(compiler.compile, grammar))
        serving.reduce_per_token_cost()
        if log_probabilities.install():
            llm.prompt_turns = PrefillTurns(config.scheduler_config.max_num_batched_tokens)
        _change_vllm(llm, self._settings)
        tasks = await llm.get_supported_tasks()
        frontend = serving.frontend_arguments(arguments, self._settings)
        await init_app_state(llm, self._state, frontend, tasks)
        shown_model.install(self._state.openai_serving_models)
        transcriptions.install(self._state)
        if self._settings.task == "generate":
            setup = pickle.dumps(render_process.RenderSetup(llm.vllm_config, frontend, self._settings.tool_strict))
            self._large = LargeRequests(
                lambda: HelperProcess("reads large requests", RENDER_PROCESS, setup).ask,
                reads_media=llm.vllm_config.model_config.is_multimodal_model,
            )
            take_rendered(self._state.online_renderer)
        self._continues = self._settings.task == "generate" and await continuing.prepare(llm)
        cache = llm.vllm_config.cache_config
        blocks = cache.num_gpu_blocks or 0
        return EngineInfo(
            model=self._settings.name,
            tasks=sorted(tasks),
            max_model_len=llm.model_config.max_model_len,
            slots=max(1, config.scheduler_config.max_num_seqs - self._settings.effective_session_slots),
            kv_cache_tokens=getattr(cache, "kv_cache_size_tokens", None) or blocks * cache.block_size,
            kv_cache_bytes=blocks * block_bytes(llm.vllm_config),
            kv_block_tokens=cache.block_size,
            continues=self._continues,
        )

    def run(self, submit: Submit) -> AsyncGenerator[Frame, None]:
        """See `EngineBackend.run`."""
        n = submit.body.get("n")
        choices = n if isinstance(n, int) and n > 0 else 1
        continued = ContinuedRuns(submit, choices) if is_continued(submit) else None
        recorder = TokenRecorder(choices, FATAL, submit.cache_salt or "", continued)
        recorder.priority = submit.priority
        is_whole = submit.operation.generates and not submit.body.get("stream")
        recorder.awaits_first_token = is_whole and continued is None
        self._recorders[submit.request_id] = recorder
        return answer_frames(functools.partial(self._answer, submit, recorder), recorder, submit)

    def produced(self, submit: Submit) -> Unsent:
        """See `EngineBackend.produced`."""
        recorder = self._recorders.get(submit.request_id)
        why = why_not_continued(submit.operation, submit.body, engine_continues=self._continues)
        if recorder is None or submit.body.get("stream") or why is not None:
            return Unsent([])
        return continuing.produced(self._running(), recorder)

    def report_first_tokens(self, report: FirstTokenReport) -> None:
        """See `EngineBackend.report_first_tokens`."""
        lacking = missing()
        if lacking:
            logger.warning(
                "vLLM has changed and lacks %s; answers without stream report their first token at their end", lacking
            )
            return
        self._report_first_token = report

    def _on_first_tokens(self) -> None:
        if self._llm is None:
            return
        self._llm.end_prompt_turns()
        if self._report_first_token is None:
            return
        for request_id, prompt in continuing.first_tokens(self._llm, self._recorders):
            self._report_first_token(request_id, prompt)

    async def _answer(self, submit: Submit, recorder: TokenRecorder) -> Frame | AsyncGenerator[str, None]:
        """The events of a stream; the only frame of a whole answer or a refusal."""
        if not self.alive:
            raise EngineUnreachable("the engine is dead")
        if recorder.continued is not None:
            require_continuable(submit, engine_continues=self._continues)
        recorder_of_request.set(recorder)
        entries = log_probabilities.keep_entries(not submit.body.get("stream"))
        continuing.identity_of_request.set(continuing.AnswerIdentity(submit.request_id, submit.created))
        try:
            llm = self._running()
            strict = self._settings.tool_strict
            answer = await serving.answer(llm, self._state, submit, strict, self._large)
        except EngineFailed:  # as the recorder has seen it; no error of `LargeRequests`, though an `Unavailable`, too
            raise
        except EngineDeadError as error:
            raise self._died() from error
        except ValidationError as error:
            return serving.refusal(serving.validation_error(error, submit), submit)
        except (BadRequest, Unavailable) as error:  # ours, before vLLM has it: the engine lives
            return serving.our_refusal(error, submit)
        except Exception as error:
            if recorder.failed is not None:
                raise recorder.failed from error
            if not self.alive:
                raise self._died() from error
            return serving.refused(recorder, submit) or serving.refusal(serving.error_response(error, submit), submit)
        if isinstance(answer, ErrorResponse):
            return serving.refused(recorder, submit) or serving.refusal(answer, submit)
        if isinstance(answer, BaseModel | bytes):
            await self._running().make_entries(recorder.tenant, entries)
            body = answer if isinstance(answer, bytes) else response_entries.encoded(answer, entries)
            if submit.query_counted:
                body = serving.without_query(body, submit, recorder)
            media = "text" if transcriptions.is_plain_text(submit) else "json"
            return Frame(submit.number, body, 200, media, recorder.take_groups(), 1, recorder.usage())
        return answer

    def load(self) -> EngineLoad:
        """See `EngineBackend.load`."""
        return self._stats.load

    def own_metrics(self) -> list[Metric]:
        """See `EngineBackend.own_metrics`."""
        return own_metrics.families()

    @property
    def alive(self) -> bool:
        """See `EngineBackend.alive`."""
        return self._llm is not None and not self._llm.errored

    async def check_health(self) -> None:
        """Raise when EngineCore is dead, or neither answers, steps nor uses CPU for `health_stall_s`. It waits for
        nothing: it looks whether the probe of the check before was answered, and then sends the next one."""
        llm = self._running()
        answered = self._probe is not None and self._probe.done()
        try:
            await llm.check_health()
            if self._probe is not None and answered:
                self._probe.result()
        except EngineDeadError as error:
            raise self._died() from error
        if self._probe is None or answered:
            self._probe = asyncio.create_task(llm.is_paused())
        progress = () if answered else (self._stats.load.steps, self._cpu_time_s())
        stalled_s = self._stall.observe(answered, progress, self._clock())
        if stalled_s is not None:
            raise EngineFailed(f"the engine is frozen: no answer, no step and no CPU time for {stalled_s:.0f} s")

    def _died(self) -> EngineFailed:
        """The error of an engine whose EngineCore has ended."""
        core: Any = self._running().engine_core
        ends = {} if missing(END_NAMES) else core.resources.engine_manager.finished_procs()
        return EngineFailed(f"the engine died: {how_ended(ends.values()) or 'EngineCore has ended'}")

    def _cpu_time_s(self) -> float:
        """CPU time of EngineCore and its workers: during a long prefill EngineCore answers no probe, but computes."""
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
        if self._probe is not None:
            self._probe.cancel()  # EngineCore that has ended does not answer it
        if llm.output_handler is not None:
            llm.output_handler.cancel()  # else it logs the intended end of EngineCore as a crash
        children = psutil.Process().children(recursive=True)
        timeout_s = SHUTDOWN_TIMEOUT_S if self._settings.ranks == 1 else RANKS_SHUTDOWN_TIMEOUT_S
        await asyncio.to_thread(llm.shutdown, timeout_s)
        await asyncio.to_thread(_end, [child for child in children if not _is_resource_tracker(child)])

    def _running(self) -> RecordedLLM:
        if self._llm is None:
            raise EngineFailed("the engine is not running")
        return self._llm


async def answer_frames(
    start: Callable[[], Awaitable[Frame | AsyncGenerator[str, None]]], recorder: TokenRecorder, submit: Submit
) -> AsyncGenerator[Frame, None]:
    """The frames of an answer. An error before the first event of a stream is a status, a later one an event in our
    format. `start`: starts the request; gives the only frame, or the events."""
    number = submit.number
    status = 200
    media = "sse"
    events = await start()
    if isinstance(events, Frame):
        yield events
        return
    try:
        async for text in events:
            if recorder.failed is not None:
                raise recorder.failed from recorder.failure
            if recorder.continued is not None and not recorder.continued.is_over:
                if text.startswith(ERROR_EVENT):
                    raise recorder.continued.fail("vLLM cannot make its beginning again")
                recorder.continued.drop_event()
                continue
            if status or text.startswith(ERROR_EVENT):
                refusal = serving.refused(recorder, submit) or serving.event_refusal(text, submit)
                if refusal is not None and status:
                    yield refusal
                    return
                text = text if refusal is None else serving.refusal_event(refusal, submit)
            prompt = recorder.usage() if status else None
            yield Frame(number, text.encode(), status, media, recorder.take_groups(), 1, prompt=prompt)
            status = 0
            media = ""
    except EngineFailed:
        raise
    except Exception as error:
        if recorder.failed is not None:
            raise recorder.failed from error
        if not status:
            raise
        yield serving.refused(recorder, submit) or serving.refusal(serving.error_response(error, submit), submit)
        return
    finally:
        await events.aclose()
    if recorder.failed is not None:
        raise recorder.failed from recorder.failure
    yield Frame(number, b"", status, media, groups=recorder.take_groups(), usage=recorder.usage())


def _change_vllm(llm: RecordedLLM, settings: ModelSettings) -> None:
    """Have vLLM's front end do what this package needs beside its own; no serving object is there yet."""
    response_entries.install()
    cut_calls.install()
    media_connector.install(settings.media_domains)
    audio_loader.install(settings.max_audio_hz, settings.task == "transcribe")
    take_turns(llm.renderer)
    name_what_is_refused(llm.renderer)


def _set_for_all_requests(config: VllmConfig) -> None:
    """What would else depend on which request comes first."""
    if config.structured_outputs_config.backend == "auto":
        config.structured_outputs_config.backend = BACKEND  # EngineCore has one, which the first request would choose
    keep_in_front(config)


def _is_resource_tracker(process: psutil.Process) -> bool:
    """Whether it is Python's resource tracker, which ends with us and unlinks the files of killed processes."""
    try:
        return any(RESOURCE_TRACKER in part for part in process.cmdline())
    except psutil.NoSuchProcess:
        return False


def _end(processes: list[psutil.Process]) -> None:
    """Kill the processes that still run; returns once they are gone."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=KILLED_S)


def _executor_class(config: VllmConfig, settings: ModelSettings) -> type[Executor]:
    if config.parallel_config.distributed_executor_backend != "ray":
        chosen: type[Executor] = Executor.get_class(config)
        return chosen
    from serve_app.engine.vllm_adapter.staged_executor import ray_executor_class

    return ray_executor_class(config, staged=engine_args.one_bundle_per_stage(settings, environment.platform()))
