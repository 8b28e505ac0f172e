"""vLLM's own OpenAI serving objects: their arguments, the calls of them, and their errors in our format."""

from __future__ import annotations

import functools
import logging
from argparse import Namespace
from collections.abc import AsyncGenerator
from dataclasses import fields
from typing import Any

import msgspec
import vllm.envs
from pydantic import BaseModel, ValidationError
from starlette.datastructures import State
from starlette.requests import Request
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import FrontendArgs
from vllm.entrypoints.openai.chat_completion import serving as chat_serving
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion import serving as completion_serving
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import VLLMError
from vllm.v1.engine.exceptions import EngineGenerateError

from serve_app.core.anthropic import client_words, error_event
from serve_app.core.grammar_bounds import too_complex
from serve_app.core.schemas import SchemaBudget, TooManyParts, small_budget, with_enforced_schemas
from serve_app.core.score_inputs import score_inputs
from serve_app.engine.client_names import MESSAGES, client_path, field_path, grammar_field, in_client_words
from serve_app.engine.responses_input import as_vllm_reads
from serve_app.engine.token_recorder import TokenRecorder, recorder_of_request
from serve_app.engine.trusted_models import trusted
from serve_app.engine.vllm_adapter import cut_calls, messages, transcriptions
from serve_app.engine.vllm_adapter.body_models import fault_of, validated
from serve_app.engine.vllm_adapter.large_requests import LargeRequests
from serve_app.engine.vllm_adapter.messages import ERROR_EVENT
from serve_app.engine.vllm_adapter.recorded import RecordedLLM
from serve_app.engine.vllm_adapter.rendered import rendered_of_request
from serve_app.engine.vllm_adapter.response_entries import MakeEntries, event_body
from serve_app.engine.vllm_adapter.shown_model import shown_model
from serve_app.errors import BadRequest, NotFound, RequestFailed, ServeAppError
from serve_app.settings import ModelSettings
from serve_app.transport import Frame, Submit, TokenUsage
from serve_app.types import Operation

logger = logging.getLogger("ray.serve")

_CHUNK = 'data: {"id":'
_DATA = "data: {"
# The Responses API's events before the first output: held back until it comes, since an error after them is no status.
_EARLY_EVENTS = ("response.created", "response.in_progress")
_COMPLETED = "response.completed"
_ITEM_DONE = "response.output_item.done"
_DONE_EVENTS = ("response.content_part.done", _ITEM_DONE)  # those that repeat all log probabilities

TOO_LONG = "maximum context length"  # part of vLLM's message for a prompt that is too long

TYPE = "type"
# What vLLM names in errors that may come of a wrong type elsewhere: of a tool's name, of a part of an item.
MAY_BE_A_WRONG_TYPE = (TYPE, MESSAGES, "input", "tool_choice")

_SERVING_OBJECTS = {  # by operation: its name in the state, and what a model without it does not support
    Operation.CHAT: ("openai_serving_chat", "chat completions"),
    Operation.COMPLETION: ("openai_serving_completion", "completions"),
    Operation.RESPONSES: ("openai_serving_responses", "responses"),
    Operation.INPUT_TOKENS: ("openai_serving_responses", "responses"),
    Operation.MESSAGES: ("anthropic_serving_messages", "messages"),
    Operation.MESSAGE_TOKENS: ("anthropic_serving_messages", "messages"),
    Operation.EMBEDDING: ("serving_embedding", "embeddings"),
    Operation.EMBED: ("serving_embedding", "embeddings"),
    Operation.POOLING: ("serving_pooling", "pooling"),
    Operation.CLASSIFY: ("serving_classification", "classification"),
    Operation.SCORE: ("serving_scores", "scores"),
    Operation.RERANK: ("serving_scores", "scores"),
    Operation.TRANSCRIPTION: ("openai_serving_transcription", "transcriptions"),
    Operation.TRANSLATION: ("openai_serving_translation", "translations"),
}


def reduce_per_token_cost() -> None:
    """Remove two needless costs per token of vLLM's front end: each access to a setting reads the environment again
    (EngineCore caches them, the front end does not), and the chunks it makes itself are validated like client input. A
    third one, that of its metrics, is smaller (`own_metrics`)."""
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
    llm: RecordedLLM, state: State, submit: Submit, tool_strict: bool, large: LargeRequests | None = None
) -> BaseModel | bytes | AsyncGenerator[str, None]:
    """The answer of vLLM's serving object: a body, vLLM's error, or a stream of SSE events. Raises vLLM's errors.

    Args:
        tool_strict: as for `request_of`.
        large: reads and renders large requests; None: all are read here.
    """
    serving = _serving_object(state, submit.operation)
    raw = _raw_request(submit.request_id)
    shown_model.set(submit.shown_model)
    if submit.operation.is_anthropic:
        submit = await messages.as_model_takes(serving, submit)
    read = None if large is None else await large.read(submit)
    if read is None and submit.operation.takes_slot:
        try:
            request = request_of(submit, tool_strict, None if large is None else small_budget())
        except TooManyParts:
            read = None if large is None else await large.read(submit, even_small=True)
            if read is None:
                raise
    if isinstance(read, ErrorResponse | bytes):
        return read
    if not submit.operation.takes_slot:
        return await answer_unqueued(state, submit)
    if read is not None:
        request = read.request
        rendered_of_request.set(read)
    match submit.operation:
        case Operation.CHAT:
            # here, since with tools the grammar is tried before `add_request`
            await llm.check_grammar(request.extract_structured_outputs())
            answered = cut_calls.with_finish_reasons(await serving.create_chat_completion(request, raw))
            return with_tier(answered, submit.service_tier)
        case Operation.MESSAGES:
            await llm.check_grammar(request.extract_structured_outputs())
            answered = cut_calls.with_finish_reasons(await serving.create_chat_completion(request, raw))
            return messages.anthropic_answer(serving, answered)
        case Operation.COMPLETION:
            return with_tier(await serving.create_completion(request, raw), submit.service_tier)
        case Operation.RESPONSES:
            await llm.check_grammar(request.extract_structured_outputs())  # its stream begins before `add_request`
            responses = await serving.create_responses(request, raw)
            if isinstance(responses, BaseModel):
                return _not_stored(responses)
            make_entries = functools.partial(llm.make_entries, submit.cache_salt or "")
            return responses_events(responses, make_entries, recorder_of_request.get())
        case Operation.TRANSCRIPTION | Operation.TRANSLATION:
            return await transcriptions.answer(serving, submit, request, raw)
    return bytes((await serving(request, raw)).body)


def request_of(submit: Submit, tool_strict: bool, budget: SchemaBudget | None = None) -> Any:
    """vLLM's model of a request that takes slots. Raises vLLM's errors, and BadRequest: of a schema.

    Args:
        tool_strict: calls that the request demands have arguments that satisfy the tool's schema.
        budget: of its schemas, see `with_enforced_schemas`.
    """
    if submit.operation.hears:
        return transcriptions.request_model(submit.operation, submit.body)
    body = dict(submit.body)
    if submit.operation.generates:
        body["priority"] = submit.priority
    if submit.cache_salt is not None:  # pooling finds cached prefixes, too
        body["cache_salt"] = submit.cache_salt
    if submit.operation is Operation.RESPONSES:
        body |= {"request_id": f"resp_{submit.request_id}", "store": False}
        if submit.service_tier is not None:
            body["service_tier"] = submit.service_tier
        body = as_vllm_reads(body)
    elif submit.operation.has_chat_body and isinstance(body.get("messages"), list):
        # vLLM changes messages in place, and errors name what the client sent
        body["messages"] = [dict(one) if isinstance(one, dict) else one for one in body["messages"]]
    if submit.operation.generates:
        body = with_enforced_schemas(body, tool_strict, budget)
    return validated(submit.operation, body)


async def answer_unqueued(state: State, submit: Submit) -> BaseModel | bytes:
    """The answer to work that takes no slot; vLLM's error. Raises vLLM's errors."""
    body = submit.body
    raw = _raw_request(submit.request_id)
    tokenization = state.serving_tokenization
    answered: BaseModel | bytes
    match submit.operation:
        case Operation.TOKENIZE:
            answered = await tokenization.create_tokenize(validated(submit.operation, body), raw)
        case Operation.INPUT_TOKENS:
            answered = await _count_input(state, validated(submit.operation, as_vllm_reads(body)))
        case Operation.MESSAGE_TOKENS:
            answered = await _count_messages(state, request_of(submit, tool_strict=False))
        case Operation.DETOKENIZE:
            answered = await tokenization.create_detokenize(validated(submit.operation, body), raw)
        case _:
            answered = await tokenization.get_tokenizer_info()
    return answered


async def _count_input(state: State, asked: ResponsesRequest) -> BaseModel | bytes:
    """OpenAI's count of the input tokens that a response would have."""
    rendered = await state.online_renderer.render_responses(asked)
    if isinstance(rendered, ErrorResponse):
        return rendered
    tokens = len(rendered.engine_input["prompt_token_ids"])
    return msgspec.json.encode({"object": "response.input_tokens", "input_tokens": tokens})


async def _count_messages(state: State, asked: ChatCompletionRequest) -> BaseModel | bytes:
    """Anthropic's count of the input tokens that an answer would have."""
    rendered = await state.online_renderer.render_chat(asked)
    if isinstance(rendered, ErrorResponse):
        return rendered
    _, inputs = rendered
    return msgspec.json.encode({"input_tokens": sum(len(one["prompt_token_ids"]) for one in inputs)})


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
    has_begun = False
    try:
        async for text in events:
            if not has_begun and text.startswith(_CHUNK):
                text = f'data: {{"service_tier":"{tier}",{text.removeprefix(_DATA)}'
            has_begun = True
            yield text
    finally:
        await events.aclose()


def _not_stored(response: BaseModel) -> BaseModel:
    """The response with OpenAI's `store`, which vLLM leaves out: nothing is stored here, whatever was asked for; and
    with the status of an item that was cut."""
    if isinstance(response, ErrorResponse):
        return response
    made: Any = response.model_copy(update={"store": False})
    if made.status == cut_calls.INCOMPLETE and made.output:
        cut_calls.mark_incomplete(made.output[-1])
    return made  # type: ignore[no-any-return]


def _serving_object(state: State, operation: Operation) -> Any:
    """vLLM's serving object of an operation; None: it has none. Raises BadRequest: the model does not support it."""
    name, ability = _SERVING_OBJECTS.get(operation, ("", ""))
    serving = getattr(state, name, None)
    if name and serving is None:
        raise BadRequest(f"this model does not support {ability}", param="model")
    return serving


def _raw_request(request_id: str) -> Request:
    """The part of an HTTP request that the serving objects read: the id. Headers of the client are not passed on."""
    return Request({"type": "http", "method": "POST", "path": "/", "headers": [(b"x-request-id", request_id.encode())]})


async def _event_text(event: Any, make_entries: MakeEntries) -> str:
    """vLLM calls an answer that was cut off complete, and leaves out OpenAI's `store`: nothing is stored here."""
    has_response = getattr(event, "response", None) is not None
    if not has_response and event.type not in _DONE_EVENTS:
        return f"event: {event.type}\ndata: {event.model_dump_json(by_alias=True)}\n\n"
    body = await event_body(event, make_entries)
    if has_response:
        body["response"]["store"] = False
        if body["response"]["status"] == "incomplete":
            body["type"] = "response.incomplete"
    return f"event: {body['type']}\ndata: {msgspec.json.encode(body).decode()}\n\n"


async def responses_events(
    events: AsyncGenerator[Any, None], make_entries: MakeEntries, recorder: TokenRecorder | None = None
) -> AsyncGenerator[str, None]:
    """Responses API events as SSE, with their type in an `event:` line. `make_entries`: as `RecordedLLM`'s, of its
    tenant. The last item of a response that was cut is marked when nothing but the response's end comes after it."""
    early = ""
    held: Any = None
    try:
        async for event in events:
            if held is not None:
                if event.type == _COMPLETED:
                    cut_calls.mark_incomplete(held.item)
                yield await _event_text(held, make_entries)
                held = None
            if event.type == _ITEM_DONE and recorder is not None and recorder.cut:
                held = event
                continue
            text = await _event_text(event, make_entries)
            if event.type in _EARLY_EVENTS:
                early += text
                continue
            yield early + text
            early = ""
        if held is not None:
            yield await _event_text(held, make_entries)
    finally:
        await events.aclose()


def without_query(body: bytes, submit: Submit, recorder: TokenRecorder) -> bytes:
    """The answer to a part of a score without the tokens of its query, in its usage and in the recorder's."""
    query = recorder.drop_query(len(score_inputs(submit.operation, submit.body).documents))
    answered = msgspec.json.decode(body)
    for name in ("prompt_tokens", "total_tokens"):
        answered["usage"][name] -= query
    return msgspec.json.encode(answered) if query else body


def refusal(error: ErrorResponse, submit: Submit) -> Frame:
    """vLLM's error in OpenAI's format: vLLM puts the HTTP status where OpenAI has a machine-readable code or null. One
    with a status of 500 and above is a `RequestFailed`: the engine lives."""
    details = error.error
    status = error.error.code
    code = RequestFailed.code
    if status == NotFound.status:
        code = "model_not_found"
    elif TOO_LONG in details.message:
        code = "context_length_exceeded"
    elif status < 500:
        code = BadRequest.code
    kind = BadRequest.type if status < 500 else RequestFailed.type
    message, param = in_client_words(details.message, details.param, submit.body)
    if status >= 500:
        message = f"the engine could not handle this request: {message}"
    body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    return _last_frame(submit, status, body)


def event_refusal(text: str, submit: Submit) -> Frame | None:
    """The refusal that an event of vLLM's stream carries; None: the event is a part of the answer."""
    if not text.startswith(ERROR_EVENT):
        return None
    return refusal(ErrorResponse.model_validate_json(text.removeprefix("data:")), submit)


def refusal_event(refused: Frame, submit: Submit) -> str:
    """A refusal as the last event of a stream that has begun."""
    if submit.operation.is_anthropic:
        return error_event(refused.status, msgspec.json.decode(refused.body)).decode()
    return f"data: {refused.body.decode()}\n\n"


def our_refusal(error: ServeAppError, submit: Submit) -> Frame:
    """An error of ours, in place of an answer."""
    frame = _last_frame(submit, error.status, error.body())
    return msgspec.structs.replace(frame, retry_after_s=error.retry_after_s)


def _last_frame(submit: Submit, status: int, body: dict[str, Any]) -> Frame:
    if submit.operation.is_anthropic:
        error = body["error"]
        param = error["param"]
        error |= {"message": client_words(error["message"]), "param": param and client_words(param)}
    return Frame(submit.number, msgspec.json.encode(body), status, "json", events=1, usage=TokenUsage())


def refused(recorder: TokenRecorder, submit: Submit) -> Frame | None:
    """Our refusal of the request's grammar, in place of vLLM's error, with its field in `param`; None: the grammar was
    not refused."""
    if recorder.refused is None and recorder.finish_reason == "error" and grammar_field(submit.body):
        recorder.refused = too_complex("its masks take more CPU than the tokens of the answer may")
    error = recorder.refused
    if error is None:
        return None
    error.param = error.param or grammar_field(submit.body)
    return our_refusal(error, submit)


def error_response(error: Exception, submit: Submit) -> ErrorResponse:
    """The response to an error before the first output: vLLM's own errors unchanged; other errors of a request with a
    grammar become client errors, and so does text in it that is nested deeper than a parser goes (the arguments of an
    earlier tool call are JSON in a string)."""
    if isinstance(error, RecursionError):
        return create_error_response("JSON in a string of the request is nested too deep")
    response = create_error_response(error)
    # A value of a wrong type, at which checks before validation fail, or rendering, since a lenient model has taken it;
    # a content part whose type such a model has dropped; what a chat template could not render.
    has_failed = isinstance(error, TypeError | LookupError | AttributeError)
    if has_failed or response.error.param in MAY_BE_A_WRONG_TYPE:
        found = _fault(submit)
        if found is None and (has_failed or response.error.param in (TYPE, MESSAGES)):
            found = _fault(submit, by_kind=True)
        if found is not None:
            return found
    if response.error.code < 500 or isinstance(error, EngineGenerateError):
        return response
    field = grammar_field(submit.body)
    if field is None:
        logger.exception(
            "Request %s failed in vLLM before its first output. Report this traceback",
            submit.request_id,
            exc_info=error,
        )
        return response
    return create_error_response(f"{field}: the grammar or schema cannot be built: {error}", param=field)


def validation_error(error: ValidationError, submit: Submit) -> ErrorResponse:
    """The first validation error in OpenAI's format, with the field's path in the client's body in `param`."""
    found = _fault(submit)
    if found is not None:
        return found
    first = error.errors(include_url=False, include_context=False)[0]
    field = field_path(first["loc"], first["input"], submit.body, is_missing=first["type"] == "missing")
    return _refusal_of(field, first["msg"])


def _fault(submit: Submit, *, by_kind: bool = False) -> ErrorResponse | None:
    """The first fault of a body that was refused; None: vLLM's models have none. `by_kind`: as for `fault_of`."""
    is_response = submit.operation in (Operation.RESPONSES, Operation.INPUT_TOKENS)
    body = as_vllm_reads(submit.body) if is_response else submit.body
    try:
        fault = fault_of(submit.operation, body, by_kind=by_kind)
    except VLLMError as error:
        return create_error_response(error)
    if fault is None:
        return None
    return _refusal_of(client_path(fault.path, submit.body, is_missing=fault.is_missing), fault.message)


def _refusal_of(field: str | None, message: str) -> ErrorResponse:
    return create_error_response(f"{field}: {message}" if field else message, param=field)
