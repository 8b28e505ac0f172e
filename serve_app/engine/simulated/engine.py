"""The simulated engine: `SimulatedScheduler` in real time behind `EngineBackend`.

Invariant: one task drives all steps, and a request has no timer or task of its own; closing a request's iterator frees
its slots and KV tokens before the close returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from prometheus_client.metrics_core import Metric

from serve_app.engine.continuation import not_continuable
from serve_app.engine.simulated import requests
from serve_app.engine.simulated.messages import MessageWriter
from serve_app.engine.simulated.requests import Generation, Prompts, Scoring
from serve_app.engine.simulated.responses import ResponseWriter
from serve_app.engine.simulated.scheduler import Sequence, SequenceState, SimulatedScheduler
from serve_app.engine.simulated.script import PLAYED, scripted
from serve_app.engine.simulated.script_writers import ScriptWriter, dialect_of
from serve_app.engine.simulated.text import (
    WordTokenizer,
    Writer,
    count_tokens,
    embedding,
    embedding_document,
    rerank_document,
    score,
    score_document,
    token_group,
    tokens_made,
)
from serve_app.engine.simulated.transcripts import TranscriptWriter, parse_transcription
from serve_app.errors import BadRequest, ConfigError, EngineFailed, EngineUnreachable
from serve_app.settings import ModelSettings
from serve_app.transport import (
    FINISH_STOP,
    EngineInfo,
    EngineLoad,
    FirstTokenReport,
    Frame,
    Submit,
    TokenUsage,
    Unsent,
)
from serve_app.types import Operation

DEFAULT_MAX_MODEL_LEN = 8192  # tokens; as the built-in model `tiny`
NOT_SIMULATED = frozenset((Operation.TOKENIZER_INFO, Operation.EMBED, Operation.POOLING, Operation.CLASSIFY))
AnyWriter = Writer | MessageWriter | ResponseWriter | ScriptWriter | TranscriptWriter
KV_BYTES_PER_TOKEN = 131_072  # an 8B model's: 32 layers x 8 KV heads x 128 x 2 (K and V) x 2 bytes


@dataclass(slots=True, eq=False)
class _SimulatedRequest:
    """A request's sequences, and the event on which its consumer waits."""

    sequences: list[Sequence]
    progress: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None

    async def wait_for_progress(self) -> None:
        """Return once a sequence has progressed since the last return; raises `error` if it is set."""
        await self.progress.wait()
        self.progress.clear()
        if self.error is not None:
            raise self.error


class _WholeAnswer(NamedTuple):
    """An answer that is not streamed. `sent`: the tokens of each choice that continued runs have made."""

    generation: Generation
    request: _SimulatedRequest
    sent: list[int]


@dataclass(eq=False)
class SimulatedEngine:
    """An `EngineBackend` without a model. Not thread-safe: one event loop.

    Args:
        settings: the model; `settings.simulated` has rates, KV size and seed.
        clock: seconds, monotonic; `sleep` must let it pass.
        wall_clock: seconds since the epoch, for the responses' `created`.
        sleep: as `asyncio.sleep`.
    """

    settings: ModelSettings
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep

    def __post_init__(self) -> None:
        settings = self.settings
        kv_tokens = settings.simulated.kv_cache_tokens
        self._max_model_len = settings.max_model_len or min(DEFAULT_MAX_MODEL_LEN, kv_tokens)
        self._scheduler = SimulatedScheduler(
            slots=settings.engine_seqs,
            kv_tokens=kv_tokens,
            prefill_tokens_per_s=settings.simulated.prefill_tokens_per_s,
            decode_step_s=settings.simulated.decode_step_s,
        )
        self._tokenizer = WordTokenizer()
        self._requests: dict[Sequence, _SimulatedRequest] = {}
        self._whole_answers: dict[str, _WholeAnswer] = {}  # those being made of requests that are not streamed, by id
        self._report_first_token: FirstTokenReport = lambda request_id, prompt: None
        self._work = asyncio.Event()
        self._loop_task: asyncio.Task[None] | None = None

    async def start(self) -> EngineInfo:
        """Start the step loop.

        Raises:
            ConfigError: one sequence of `max_model_len` would not fit into the KV cache.
        """
        kv_tokens = self._scheduler.kv_tokens
        if self._max_model_len > kv_tokens:
            raise ConfigError(
                f"max_model_len ({self._max_model_len}) is above simulated.kv_cache_tokens ({kv_tokens})",
                param="max_model_len",
            )
        await self.sleep(self.settings.simulated.start_s)
        self._loop_task = asyncio.create_task(self._run_steps(), name="simulated-engine-steps")
        self._loop_task.add_done_callback(self._fail_requests)
        return EngineInfo(
            model=self.settings.name,
            tasks=[self.settings.task],
            max_model_len=self._max_model_len,
            slots=self.settings.max_num_seqs,
            kv_cache_tokens=kv_tokens,
            kv_cache_bytes=kv_tokens * KV_BYTES_PER_TOKEN,
            continues=True,
        )

    def run(self, submit: Submit) -> AsyncGenerator[Frame, None]:
        """Run one request; see `EngineBackend.run`.

        Raises:
            EngineFailed: the engine is not running, or stopped during the request.
        """
        self._require_running()
        try:
            return self._frames(submit)
        except BadRequest as error:
            return self._answer(submit, error.body(), error.status)

    def produced(self, submit: Submit) -> Unsent:
        """See `EngineBackend.produced`."""
        answer = self._whole_answers.get(submit.request_id)
        if answer is None:
            return Unsent([])
        generation, request, sent = answer
        made = zip(generation.choices, sent, request.sequences, strict=True)
        groups = [token_group(choice, start, sequence.produced) for choice, start, sequence in made]
        return Unsent([group for group in groups if len(group) > 1], TokenUsage(generation.prompt_tokens))

    def report_first_tokens(self, report: FirstTokenReport) -> None:
        """See `EngineBackend.report_first_tokens`."""
        self._report_first_token = report

    def own_metrics(self) -> list[Metric]:
        """None: what this engine counts is in its load."""
        return []

    def load(self) -> EngineLoad:
        """The load after the last step."""
        scheduler = self._scheduler
        return EngineLoad(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kv_cache_usage=scheduler.kv_used / scheduler.kv_tokens,
            steps=scheduler.steps,
            generated_tokens=scheduler.generated_tokens,
            prompt_tokens=scheduler.prompt_tokens,
            prefilled_tokens=scheduler.prefilled_tokens,
            preemptions=scheduler.preemptions,
            sequence_steps=scheduler.sequence_steps,
        )

    @property
    def alive(self) -> bool:
        """False once the step loop has crashed."""
        task = self._loop_task
        return task is None or not task.done() or task.cancelled()

    async def check_health(self) -> None:
        """Raises EngineFailed when no step loop runs, or a step is overdue by more than `health_stall_s`."""
        task = self._loop_task
        if task is not None and task.done() and not task.cancelled():
            raise _stopped(task)
        self._require_running()
        due = self._scheduler.due
        overdue_s = 0.0 if due is None else self.clock() - due
        if overdue_s > self.settings.health_stall_s:
            raise EngineFailed(f"the simulated engine is frozen: a step is {overdue_s:.1f} s overdue")

    def kill(self) -> None:
        """Do nothing: the engine has no other process."""

    async def shutdown(self) -> None:
        """End the step loop; requests still running raise EngineFailed."""
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.wait([self._loop_task])

    def _require_running(self) -> None:
        if self._loop_task is None or self._loop_task.done():
            raise EngineUnreachable("the simulated engine does not run")

    async def _run_steps(self) -> None:
        while True:
            due = self._scheduler.due
            if due is None:
                self._work.clear()
                await self._work.wait()
                continue
            await self.sleep(max(0.0, due - self.clock()))
            for sequence in self._scheduler.advance(self.clock()):
                self._requests[sequence].progress.set()

    def _fail_requests(self, task: asyncio.Task[None]) -> None:
        for request in set(self._requests.values()):
            request.error = _stopped(task)
            request.progress.set()

    def _frames(self, submit: Submit) -> AsyncGenerator[Frame, None]:
        """The frames of a request; raises BadRequest if its body is invalid."""
        operation = submit.operation
        body = submit.body
        if operation is Operation.TOKENIZE:
            ids = self._tokenizer.encode(requests.parse_tokenize(body))
            found = {"count": len(ids), "max_model_len": self._max_model_len, "tokens": ids, "token_strs": None}
            return self._answer(submit, found)
        if operation is Operation.DETOKENIZE:
            return self._answer(submit, {"prompt": self._tokenizer.decode(requests.parse_detokenize(body))})
        if operation is Operation.MESSAGE_TOKENS:
            return self._answer(submit, {"input_tokens": count_tokens(requests.parse_tokenize(body))})
        if operation is Operation.INPUT_TOKENS:
            counted = count_tokens(requests.parse_tokenize(requests.chat_of_response(body)))
            return self._answer(submit, {"object": "response.input_tokens", "input_tokens": counted})
        if self.settings.simulated.script and operation in PLAYED:
            return self._play(submit)
        pools = self.settings.task == "embed"
        hears = self.settings.task == "transcribe"
        if operation in NOT_SIMULATED or (pools, hears) != (operation.is_pooling, operation.hears):
            raise BadRequest(f"{self.settings.name} does not answer {operation.value} requests", param="model")
        if operation.is_scoring:
            return self._score(submit, requests.parse_scoring(operation, body, max_model_len=self._max_model_len))
        if pools:
            return self._embed(submit, *requests.parse_embedding(body, max_model_len=self._max_model_len))
        if hears:
            return self._transcribe(submit)
        seed = self.settings.simulated.seed
        generation = requests.parse_generation(operation, body, seed=seed, max_model_len=self._max_model_len)
        created = self._created(submit)
        stream = generation.stream
        ignored = generation.ignored
        if operation is Operation.MESSAGES:
            messages = MessageWriter(submit.request_id, self._name(submit), generation.stops)
            return (self._stream if stream else self._generate)(submit, generation, messages)
        if operation is Operation.RESPONSES:
            response = ResponseWriter(submit.request_id, self._name(submit), created, body)
            return (self._stream if stream else self._generate)(submit, generation, response)
        writer = Writer(operation, submit.request_id, self._name(submit), created, stream=stream, ignored=ignored)
        return (self._stream if stream else self._generate)(submit, generation, writer)

    def _transcribe(self, submit: Submit) -> AsyncGenerator[Frame, None]:
        """The frames of the text of an audio file; raises BadRequest if it is none."""
        seed = self.settings.simulated.seed
        length = self._max_model_len
        generation = parse_transcription(submit.operation, submit.body, seed=seed, max_model_len=length)
        answer = submit.request_id, self._name(submit), self._created(submit), submit.body
        writer = TranscriptWriter(submit.operation, *answer)
        return (self._stream if generation.stream else self._generate)(submit, generation, writer)

    def _play(self, submit: Submit) -> AsyncGenerator[Frame, None]:
        """The frames of an answer by script; raises BadRequest if the body is invalid."""
        settings = self.settings.simulated
        operation = submit.operation
        generation, parts = scripted(
            operation, submit.body, settings.script, seed=settings.seed, max_model_len=self._max_model_len
        )
        dialect = dialect_of(operation, submit.request_id, self._name(submit), self._created(submit))
        writer = ScriptWriter(dialect, parts)
        return (self._stream if generation.stream else self._generate)(submit, generation, writer)

    async def _stream(self, submit: Submit, generation: Generation, writer: AnyWriter) -> AsyncGenerator[Frame, None]:
        """One frame per wake-up, with the tokens made since the last one; one event and one group per choice in it."""
        sent = _continued_at(submit, generation)
        status = 200
        media = "sse"
        prompt: TokenUsage | None = TokenUsage(generation.prompt_tokens)
        open_choices = sum(made < choice.max_tokens for made, choice in zip(sent, generation.choices, strict=True))
        with self._admitted(submit, generation.sizes, sent) as request:
            while open_choices:
                await request.wait_for_progress()
                body = b""
                groups = []
                for choice, sequence in zip(generation.choices, request.sequences, strict=True):
                    start = sent[choice.index]
                    stop = sequence.produced
                    if start == stop:
                        continue
                    sent[choice.index] = stop
                    text, group = writer.tokens(choice, start, stop)
                    body += text
                    groups.append(group)
                    open_choices -= stop == choice.max_tokens
                if not groups:
                    continue
                if not open_choices:
                    body += writer.end(generation.usage if generation.include_usage else None)
                usage = None if open_choices else _usage(generation)
                yield Frame(submit.number, body, status, media, groups, len(groups), usage, prompt=prompt)
                status = 0
                media = ""
                prompt = None

    async def _generate(self, submit: Submit, generation: Generation, writer: AnyWriter) -> AsyncGenerator[Frame, None]:
        sent = _continued_at(submit, generation)
        with self._admitted(submit, generation.sizes, sent) as request:
            answer = self._whole_answers[submit.request_id] = _WholeAnswer(generation, request, sent)
            try:
                if not any(sent):
                    await self._begin(request)
                    self._report_first_token(submit.request_id, TokenUsage(generation.prompt_tokens))
                await self._finish(request)
            finally:
                if self._whole_answers.get(submit.request_id) is answer:
                    del self._whole_answers[submit.request_id]
        document = writer.document(generation.choices, generation.usage)
        made = zip(generation.choices, sent, strict=True)
        groups = [token_group(choice, start, choice.max_tokens) for choice, start in made]
        media = "text" if submit.operation.hears and submit.body.get("response_format") == "text" else "json"
        yield Frame(submit.number, document, 200, media, groups, 1, _usage(generation))

    async def _embed(self, submit: Submit, inputs: Prompts, packed: bool) -> AsyncGenerator[Frame, None]:
        with self._admitted(submit, [(tokens, 0) for _, tokens in inputs]) as request:
            await self._finish(request)
        vectors = [embedding(self.settings.simulated.seed, text) for text, _ in inputs]
        tokens = sum(tokens for _, tokens in inputs)
        document = embedding_document(self._name(submit), vectors, tokens, packed=packed)
        usage = TokenUsage(tokens, 0, 0, FINISH_STOP)
        yield Frame(submit.number, document, 200, "json", events=1, usage=usage)

    async def _score(self, submit: Submit, asked: Scoring) -> AsyncGenerator[Frame, None]:
        with self._admitted(submit, [(tokens, 0) for _, tokens in [*asked.queries, *asked.documents]]) as request:
            await self._finish(request)
        scores = [score(self.settings.simulated.seed, *pair) for pair in asked.pairs]
        request_id = submit.request_id
        model = self._name(submit)
        tokens = asked.prompt_tokens
        if submit.query_counted:
            tokens -= sum(size for _, size in asked.queries)
        if submit.operation is Operation.SCORE:
            document = score_document(request_id, model, self._created(submit), scores, tokens)
        else:
            texts = [text for text, _ in asked.documents]
            document = rerank_document(request_id, model, texts, scores, asked.top_n, tokens)
        usage = TokenUsage(tokens, 0, 0, FINISH_STOP)
        yield Frame(submit.number, document, 200, "json", events=1, usage=usage)

    def _name(self, submit: Submit) -> str:
        """`model` of the answer."""
        return submit.shown_model or self.settings.name

    async def _answer(self, submit: Submit, value: object, status: int = 200) -> AsyncGenerator[Frame, None]:
        yield Frame(submit.number, json.dumps(value).encode(), status, "json", events=1, usage=TokenUsage())

    async def _begin(self, request: _SimulatedRequest) -> None:
        while not any(one.produced or one.state is SequenceState.DONE for one in request.sequences):
            await request.wait_for_progress()

    async def _finish(self, request: _SimulatedRequest) -> None:
        for sequence in request.sequences:
            while sequence.state is not SequenceState.DONE and sequence.produced < max(1, sequence.max_tokens):
                await request.wait_for_progress()

    def _created(self, submit: Submit) -> int:
        return submit.created or int(self.wall_clock())

    @contextlib.contextmanager
    def _admitted(
        self, submit: Submit, sizes: Iterable[tuple[int, int]], made: list[int] | None = None
    ) -> Iterator[_SimulatedRequest]:
        """Sequences of the given (prompt, output) tokens in the scheduler, during the context. `made`: output tokens of
        each that continued runs have produced."""
        request = _SimulatedRequest([Sequence(prompt, output, submit.priority) for prompt, output in sizes])
        try:
            for sequence, produced in zip(request.sequences, made or [0] * len(request.sequences), strict=True):
                sequence.produced = produced
                if produced and produced == sequence.max_tokens:
                    continue  # it has ended in a continued run
                self._requests[sequence] = request
                self._scheduler.add(sequence, self.clock())
            self._work.set()
            yield request
        finally:
            for sequence in request.sequences:
                self._scheduler.cancel(sequence)
                self._requests.pop(sequence, None)


def _continued_at(submit: Submit, generation: Generation) -> list[int]:
    """The tokens of each choice that continued runs have made; raises `not_continuable`."""
    made = tokens_made(generation.choices, submit.groups)
    if made is None or submit.events != (len(submit.groups) if generation.stream else 0):
        raise not_continuable("its tokens are not those of this engine")
    if made == [choice.max_tokens for choice in generation.choices]:
        raise not_continuable("it has ended")
    return made


def _stopped(task: asyncio.Task[None]) -> EngineFailed:
    """The error of an engine whose step loop has ended."""
    cause = None if task.cancelled() else task.exception()
    return EngineFailed(f"the simulated engine stopped: {cause or 'it was shut down'}")


def _usage(generation: Generation) -> TokenUsage:
    usage = generation.usage
    reason = FINISH_STOP if all(choice.ends_by_itself for choice in generation.choices) else "length"
    return TokenUsage(usage["prompt_tokens"], usage["completion_tokens"], 0, reason)
