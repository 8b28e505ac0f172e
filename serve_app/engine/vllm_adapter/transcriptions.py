"""Transcriptions and translations by vLLM's own serving objects: their errors in the words of the form, the tokens of
the audio in the usage, and streams that OpenAI's clients read, too.

Invariant: no prefix of a decoder that reads the audio as a prompt is shared by two tenants; an encoder's states are
those of one request.
"""

from __future__ import annotations

import functools
import io
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

import msgspec
from fastapi import UploadFile
from pydantic import BaseModel
from starlette.datastructures import State
from starlette.requests import Request
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.speech_to_text.transcription.protocol import TranscriptionRequest
from vllm.entrypoints.speech_to_text.translation.protocol import TranslationRequest

from serve_app.engine.token_recorder import recorder_of_request
from serve_app.engine.vllm_adapter.audio_loader import RefusedAudio
from serve_app.engine.vllm_adapter.messages import ERROR_EVENT
from serve_app.engine.vllm_adapter.private_names import SPEECH_NAMES, missing
from serve_app.errors import BadRequest
from serve_app.transport import Submit
from serve_app.types import Operation

logger = logging.getLogger("ray.serve")

SERVING_OBJECTS = ("openai_serving_transcription", "openai_serving_translation")
_TIMES = "timestamp_granularities"
_TEXT = "text"  # a format, and what an answer holds of it
_DATA = "data: "
_DONE = "data: [DONE]"
_ENCODER_DECODER = "enc_dec"


def install(state: State) -> None:
    """Have vLLM's serving objects, if the model has them, refuse and count as described above."""
    if lacking := missing(SPEECH_NAMES):
        logger.warning(
            "vLLM has changed and lacks %s; audio has vLLM's own errors, and no tokens in the usage", lacking
        )
        return
    for name in SERVING_OBJECTS:
        serving = getattr(state, name, None)
        if serving is not None:
            serving._decode_and_chunk_speech_async = functools.partial(_decoded, serving._decode_and_chunk_speech_async)
            serving._get_verbose_segments = functools.partial(_segments, serving, serving._get_verbose_segments)
            serving._preprocess_speech_to_text = functools.partial(
                _prepared, serving, serving._preprocess_speech_to_text
            )


def request_model(operation: Operation, body: Mapping[str, Any]) -> TranscriptionRequest | TranslationRequest:
    """vLLM's model of a form; the model's name is left to vLLM, which knows the one that the client sent. Raises
    pydantic's ValidationError, and what vLLM's own checks raise."""
    fields = {name: value for name, value in body.items() if name not in ("model", _TIMES)}
    fields["file"] = UploadFile(io.BytesIO())  # the serving object gets the bytes beside it
    if operation is Operation.TRANSLATION:
        return TranslationRequest.model_validate(fields)
    return TranscriptionRequest.model_validate(fields | {f"{_TIMES}[]": body.get(_TIMES, [])})


async def answer(
    serving: Any, submit: Submit, request: TranscriptionRequest | TranslationRequest, raw: Request
) -> BaseModel | bytes | AsyncGenerator[str, None]:
    """vLLM's answer; of the format `text`, the text alone. Raises BadRequest: of the file or a language."""
    for field in ("language", "to_language"):
        if (language := getattr(request, field, None)) is not None:
            try:
                serving.model_cls.validate_language(language)
            except ValueError as error:
                raise BadRequest(f"`{field}`: {error}", param=field) from None
    is_translation = submit.operation is Operation.TRANSLATION
    make = serving.create_translation if is_translation else serving.create_transcription
    answered = await make(submit.body["file"], request, raw)
    if isinstance(answered, ErrorResponse):
        return answered
    if isinstance(answered, BaseModel):
        return str(getattr(answered, _TEXT)).encode() if is_plain_text(submit) else answered
    return _openai_events(answered)


def is_plain_text(submit: Submit) -> bool:
    """Whether the answer is a text, and no JSON."""
    return submit.operation.hears and submit.body.get("response_format") == _TEXT


async def _decoded(decode: Callable[[bytes], Awaitable[Any]], data: bytes) -> Any:
    """The audio of a file, in chunks."""
    try:
        return await decode(data)
    except RefusedAudio as error:
        raise BadRequest(f"`file`: {error}", param="file") from error
    except ValueError as error:
        raise BadRequest("`file`: no audio can be read from it", param="file") from error


def _segments(serving: Any, make: Callable[..., list[Any]], *, tokens: tuple[int, ...], **named: Any) -> list[Any]:
    """The segments of a clip; of one without a text, none."""
    return make(tokens=tokens, **named) if any(token != serving.tokenizer.eos_token_id for token in tokens) else []


async def _prepared(
    serving: Any,
    prepare: Callable[..., Awaitable[tuple[Any, float, Any]]],
    request: Any,
    audio_data: bytes,
    request_id: str,
) -> tuple[Any, float, Any]:
    """The prompts of a file, with the salt of their tenant; the tokens of the audio are counted."""
    prompts, seconds, starts = await prepare(request=request, audio_data=audio_data, request_id=request_id)
    recorder = recorder_of_request.get()
    if recorder is None:
        return prompts, seconds, starts
    if prompts[0].get("type") == _ENCODER_DECODER:  # its prompt is that of the decoder
        counted = serving.model_cls.get_num_audio_tokens(seconds, serving.asr_config, serving.model_config)
        recorder.audio_tokens = counted or 0
    elif recorder.tenant:
        for prompt in prompts:
            prompt["cache_salt"] = recorder.tenant
    return prompts, seconds, starts


async def _openai_events(events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    """vLLM's events with the fields of OpenAI's beside its own: a text that is added, and the whole text at the end. To
    a client of vLLM the last event is one more that adds nothing."""
    whole = ""
    has_failed = False
    last: dict[str, Any] = {"choices": [{"delta": {"content": ""}}]}
    try:
        async for text in events:
            has_failed = has_failed or text.startswith(ERROR_EVENT)
            if has_failed or not text.startswith(_DATA):
                yield text
            elif text.startswith(_DONE):
                yield _event({"type": "transcript.text.done", _TEXT: whole} | last) + text
            else:
                body = msgspec.json.decode(text.removeprefix(_DATA))
                added = "".join(choice["delta"].get("content") or "" for choice in body["choices"])
                whole += added
                if body["choices"] and "usage" in body:  # as each event has where that is asked for
                    last["usage"] = body["usage"]
                yield _event({"type": "transcript.text.delta", "delta": added} | body)
    finally:
        await events.aclose()


def _event(body: dict[str, Any]) -> str:
    return f"{_DATA}{msgspec.json.encode(body).decode()}\n\n"
