"""vLLM's own OpenAI serving objects: their arguments, the calls of them, and their errors in our format."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import AsyncGenerator
from dataclasses import fields
from typing import Any

import msgspec
import vllm.envs
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.datastructures import State
from starlette.requests import Request
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import FrontendArgs
from vllm.entrypoints.openai.chat_completion import serving as chat_serving
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion import serving as completion_serving
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.pooling.embed.protocol import EmbeddingRequest
from vllm.entrypoints.pooling.scoring import protocol as scoring
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest, TokenizeRequest
from vllm.tool_parsers.structural_tag_registry import resolve_tool_strictness
from vllm.tool_parsers.tool_strict_level import ToolStrictLevel
from vllm.v1.engine.exceptions import EngineGenerateError
from vllm.v1.metrics.loggers import PrometheusStatLogger

from serve_app.core.continuation import is_continuable
from serve_app.core.grammar_bounds import too_complex
from serve_app.engine.client_names import field_path, in_client_words
from serve_app.engine.responses_input import as_vllm_reads
from serve_app.engine.token_recorder import TokenRecorder
from serve_app.engine.trusted_models import trusted
from serve_app.engine.vllm_adapter.recorded import RecordedLLM
from serve_app.errors import BadRequest, NotFound, RequestFailed
from serve_app.settings import ModelSettings
from serve_app.transport import Frame, Submit, TokenUsage
from serve_app.types import Operation

logger = logging.getLogger("ray.serve")

# Fields that become a grammar; vLLM passes errors of the grammar's builder through unchanged.
GRAMMAR_FIELDS = ("structured_outputs", "response_format", "tools", "text")

# How vLLM's streams say that the request failed: in place of the first event when nothing of the answer came before.
ERROR_EVENT = 'data: {"error":'
_CHUNK, _DATA = 'data: {"id":', "data: {"
# The Responses API's events before the first output: held back until it comes, since an error after them is no status.
_EARLY_EVENTS = ("response.created", "response.in_progress")

TOO_LONG = "maximum context length"  # part of vLLM's message for a prompt that is too long

# An adapter that is freed while a validated body still has a lazy iterator of it panics in Rust: none is made per call.
_TOKENIZE: TypeAdapter[Any] = TypeAdapter(TokenizeRequest)
_EMBEDDING: TypeAdapter[Any] = TypeAdapter(EmbeddingRequest)


def reduce_per_token_cost(llm: RecordedLLM) -> None:
    """Remove three needless costs per token of vLLM's front end: each access to a setting reads the environment again
    (EngineCore caches them, the front end does not), the chunks it makes itself are validated like client input, and
    each step is recorded in Prometheus metrics of this process, which nothing reads."""
    if llm.logger_manager is not None:
        loggers = llm.logger_manager.stat_loggers
        loggers[:] = [one for one in loggers if not isinstance(one, PrometheusStatLogger)]
    vllm.envs.enable_envs_cache()
    for module, names in (
        (chat_serving, ("ChatCompletionStreamResponse", "ChatCompletionResponseStreamChoice", "DeltaMessage")),
        (chat_serving, ("ChatCompletionLogProbs", "ChatCompletionLogProbsContent", "ChatCompletionLogProb")),
        (completion_serving, ("CompletionStreamResponse", "CompletionResponseStreamChoice", "CompletionLogProbs")),
    ):
        for name in names:
            setattr(module, name, trusted(getattr(module, name)))


def frontend_arguments(arguments: AsyncEngineArgs, settings: ModelSettings) -> Namespace:
    """The namespace that vLLM's `init_app_state` reads, as vLLM's command line would make it."""
    values = {field.name: getattr(FrontendArgs(), field.name) for field in fields(FrontendArgs)}
    values |= vars(arguments)
    values["chat_template"] = settings.chat_template
    values["tool_call_parser"] = settings.tool_parser
    values["enable_auto_tool_choice"] = settings.tool_parser is not None
    values["enable_prompt_tokens_details"] = True
    return Namespace(**values)


async def answer(
    llm: RecordedLLM, state: State, submit: Submit, tool_strict: bool
) -> BaseModel | bytes | AsyncGenerator[str, None]:
    """The answer of vLLM's serving object: a body, vLLM's error, or a stream of SSE events. Raises vLLM's errors.

    Args:
        tool_strict: calls that the request demands have arguments that satisfy the tool's schema.
    """
    body = dict(submit.body)
    raw = _raw_request(submit.request_id)
    if submit.operation.generates:
        body["priority"] = submit.priority
    if submit.operation.takes_slot and submit.cache_salt is not None:  # pooling finds cached prefixes, too
        body["cache_salt"] = submit.cache_salt
    answered: BaseModel | bytes | AsyncGenerator[str, None]
    match submit.operation:
        case Operation.CHAT:
            serving = _serving_object(state, "openai_serving_chat", "chat completions")
            chat = ChatCompletionRequest.model_validate(body)
            if tool_strict:
                enforce_tool_schemas(chat)
            # here, since with tools the grammar is tried before `add_request`
            await llm.check_grammar(chat.extract_structured_outputs())
            answered = with_tier(await serving.create_chat_completion(chat, raw), submit.service_tier)
        case Operation.COMPLETION:
            serving = _serving_object(state, "openai_serving_completion", "completions")
            completion = CompletionRequest.model_validate(body)
            answered = with_tier(await serving.create_completion(completion, raw), submit.service_tier)
        case Operation.RESPONSES:
            serving = _serving_object(state, "openai_serving_responses", "responses")
            body |= {"request_id": f"resp_{submit.request_id}", "store": False}
            if submit.service_tier is not None:
                body["service_tier"] = submit.service_tier
            asked = ResponsesRequest.model_validate(as_vllm_reads(body))
            if tool_strict:
                enforce_tool_schemas(asked)
            await llm.check_grammar(asked.extract_structured_outputs())  # its stream begins before `add_request`
            responses = await serving.create_responses(asked, raw)
            answered = _not_stored(responses) if isinstance(responses, BaseModel) else responses_events(responses)
        case Operation.EMBEDDING:
            serving = _serving_object(state, "serving_embedding", "embeddings")
            response = await serving(_EMBEDDING.validate_python(body), raw)
            answered = bytes(response.body)
        case Operation.SCORE | Operation.RERANK:
            serving = _serving_object(state, "serving_scores", "scores")
            response = await serving(_scoring_model(submit.operation, body).model_validate(body), raw)
            answered = bytes(response.body)
        case Operation.TOKENIZE:
            answered = await state.serving_tokenization.create_tokenize(_TOKENIZE.validate_python(body), raw)
        case Operation.INPUT_TOKENS:
            answered = await _count_input(state, ResponsesRequest.model_validate(as_vllm_reads(body)))
        case Operation.TOKENIZER_INFO:
            answered = await state.serving_tokenization.get_tokenizer_info()
        case Operation.DETOKENIZE:
            answered = await state.serving_tokenization.create_detokenize(DetokenizeRequest.model_validate(body), raw)
    return answered


def _scoring_model(operation: Operation, body: dict[str, Any]) -> type[BaseModel]:
    """vLLM's model of the body, by the form that its documents have; of vLLM's union, an error would name the fields of
    another form."""
    if operation is Operation.RERANK:
        return scoring.RerankRequest
    by_documents: dict[str, type[BaseModel]] = {
        "items": scoring.ScoreQueriesItemsRequest,
        "text_2": scoring.ScoreTextRequest,
        "data_2": scoring.ScoreDataRequest,
    }
    found = (model for name, model in by_documents.items() if body.get(name) is not None)
    return next(found, scoring.ScoreQueriesDocumentsRequest)


async def _count_input(state: State, asked: ResponsesRequest) -> BaseModel | bytes:
    """OpenAI's count of the input tokens that a response would have."""
    serving = _serving_object(state, "openai_serving_responses", "responses")
    rendered = await serving.online_renderer.render_responses(
        asked, previous_messages=None, previous_response_outputs=None, tool_server=None
    )
    if isinstance(rendered, ErrorResponse):
        return rendered
    tokens = len(rendered.engine_input["prompt_token_ids"])
    return msgspec.json.encode({"object": "response.input_tokens", "input_tokens": tokens})


def enforce_tool_schemas(asked: ChatCompletionRequest | ResponsesRequest) -> None:
    """Make every tool of a request that demands a call strict: vLLM else lets its arguments be any JSON value."""
    choice = asked.tool_choice
    if asked.tools and choice not in (None, "none", "auto") and getattr(choice, "mode", None) != "auto":
        for tool in asked.tools:  # without a schema any JSON value would do, and clients read an object
            function: Any = getattr(tool, "function", tool)
            if getattr(function, "parameters", {}) is None:
                function.parameters = {"type": "object", "properties": {}}
        strict: Any = resolve_tool_strictness(asked.tools, choice, ToolStrictLevel.PARAMETER)
        asked.tools = strict


def why_not_continued(submit: Submit) -> str | None:
    """What keeps any engine from continuing this request exactly; None: nothing known."""
    if submit.body.get("use_beam_search"):
        return "beams fork inside the engine"
    if not is_continuable(submit.operation, submit.body):
        return "its last event repeats all log probabilities, and the earlier ones are not known here"
    return None


def with_tier(
    answered: BaseModel | AsyncGenerator[str, None], tier: str | None
) -> BaseModel | AsyncGenerator[str, None]:
    """The answer with the tier that served it, in a stream in its first event. None: the client named none."""
    if tier is None or isinstance(answered, ErrorResponse):
        return answered
    if isinstance(answered, BaseModel):
        return answered.model_copy(update={"service_tier": tier})
    return _tier_first(answered, tier)


async def _tier_first(events: AsyncGenerator[str, None], tier: str) -> AsyncGenerator[str, None]:
    told = False
    try:
        async for text in events:
            if not told and text.startswith(_CHUNK):
                text = f'data: {{"service_tier":"{tier}",{text.removeprefix(_DATA)}'
            told = True
            yield text
    finally:
        await events.aclose()


def _not_stored(response: BaseModel) -> BaseModel:
    """The response with OpenAI's `store`, which vLLM leaves out: nothing is stored here, whatever was asked for."""
    return response if isinstance(response, ErrorResponse) else response.model_copy(update={"store": False})


def _serving_object(state: State, name: str, what: str) -> Any:
    serving = getattr(state, name, None)
    if serving is None:
        raise ValueError(f"this model does not support {what}")
    return serving


def _raw_request(request_id: str) -> Request:
    """The part of an HTTP request that the serving objects read: the id. Headers of the client are not passed on."""
    return Request({"type": "http", "method": "POST", "path": "/", "headers": [(b"x-request-id", request_id.encode())]})


def _event_text(event: Any) -> str:
    """vLLM calls an answer that was cut off complete, and leaves out OpenAI's `store`: nothing is stored here."""
    if getattr(event, "response", None) is None:
        return f"event: {event.type}\ndata: {event.model_dump_json(by_alias=True)}\n\n"
    body = event.model_dump(mode="json", by_alias=True)
    body["response"]["store"] = False
    if body["response"]["status"] == "incomplete":
        body["type"] = "response.incomplete"
    return f"event: {body['type']}\ndata: {msgspec.json.encode(body).decode()}\n\n"


async def responses_events(events: AsyncGenerator[Any, None]) -> AsyncGenerator[str, None]:
    """Responses API events as SSE, with their type in an `event:` line."""
    early = ""
    try:
        async for event in events:
            text = _event_text(event)
            if event.type in _EARLY_EVENTS:
                early += text
                continue
            yield early + text
            early = ""
    finally:
        await events.aclose()


def refusal(error: ErrorResponse, submit: Submit) -> Frame:
    """vLLM's error in OpenAI's format: vLLM puts the HTTP status where OpenAI has a machine-readable code or null. One
    with a status of 500 and above is a `RequestFailed`: the engine lives."""
    said, status, code = error.error, error.error.code, RequestFailed.code
    if status == NotFound.status:
        code = "model_not_found"
    elif TOO_LONG in said.message:
        code = "context_length_exceeded"
    elif status < 500:
        code = BadRequest.code
    kind = BadRequest.type if status < 500 else RequestFailed.type
    message, param = in_client_words(said.message, said.param, submit.body)
    if status >= 500:
        message = f"the engine could not handle this request: {message}"
    body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    return _last_frame(submit, status, body)


def event_refusal(text: str, submit: Submit) -> Frame | None:
    """The refusal that an event of vLLM's stream carries; None: the event is a part of the answer."""
    if not text.startswith(ERROR_EVENT):
        return None
    return refusal(ErrorResponse.model_validate_json(text.removeprefix("data:")), submit)


def _last_frame(submit: Submit, status: int, body: dict[str, Any]) -> Frame:
    return Frame(submit.number, msgspec.json.encode(body), status, "json", events=1, usage=TokenUsage())


def grammar_field(submit: Submit) -> str | None:
    """The field of a request that becomes a grammar; None: there is none."""
    return next((name for name in GRAMMAR_FIELDS if submit.body.get(name)), None)


def refused(recorder: TokenRecorder, submit: Submit) -> Frame | None:
    """Our refusal of the request's grammar, in place of vLLM's error, with its field in `param`; None: the grammar was
    not refused."""
    if recorder.refused is None and recorder.finish_reason == "error" and grammar_field(submit):
        recorder.refused = too_complex("its masks take more CPU than the tokens of the answer may")
    error = recorder.refused
    if error is None:
        return None
    error.param = error.param or grammar_field(submit)
    return _last_frame(submit, error.status, error.body())


def error_response(error: Exception, submit: Submit) -> ErrorResponse:
    """The response to an error before the first output: vLLM's own errors unchanged; other errors of a request with a
    grammar become client errors."""
    response = create_error_response(error)
    if response.error.code < 500 or isinstance(error, EngineGenerateError):
        return response
    field = grammar_field(submit)
    if field is None:
        logger.exception("request %s failed before its first output", submit.request_id, exc_info=error)
        return response
    return create_error_response(f"{field}: the grammar or schema cannot be built: {error}", param=field)


def validation_error(error: ValidationError, submit: Submit) -> ErrorResponse:
    """The first validation error in OpenAI's format, with the field in `param`."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = field_path(first["loc"], submit.body, is_missing=first["type"] == "missing")
    message = f"{field}: {first['msg']}" if field else first["msg"]
    return create_error_response(message, param=field)
