"""The form of a transcription or translation, as OpenAI's clients send it, as a body, with the values that
JSON would have.

Invariant: the file is bounded by `http.max_audio_bytes` while it arrives, and by what its headers say of its length,
rate and channels before anything decodes it (`check_file`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from serve_app.core.audio import FLAC, MAX_CHANNELS, MIN_HZ, audio_facts, claimed_s, decoded_bound
from serve_app.errors import BadRequest
from serve_app.http.body import BodyThread, HeaderMap, Receive, read_object
from serve_app.http.fields import SHOWN_NAME_CHARS
from serve_app.http.multipart import FormReader
from serve_app.settings import HttpSettings, ModelSettings
from serve_app.types import Operation

FILE = "file"
FORMATS = ("json", "text", "verbose_json")  # vLLM writes no subtitles
_SUBTITLES = ("srt", "vtt")
_LIST = "timestamp_granularities"
_FLAGS = {"true": True, "1": True, "false": False, "0": False}
_KNOWN_FORMATS = "a WAV, FLAC, Ogg, MP3, MP4 (M4A) or WebM file"


def _flag(text: str) -> bool:
    return _FLAGS[text.lower()]


def _class(text: str) -> str | int:
    return int(text) if text.isdecimal() else text


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return value


# How a field that is no text is read, and what is wanted of it.
_READ: Mapping[str, tuple[Callable[[str], Any], str]] = {
    **dict.fromkeys(
        ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
        (_finite, "a number"),
    ),
    **dict.fromkeys(("seed", "top_k", "max_completion_tokens", "n"), (int, "a whole number")),
    "priority": (_class, "a class"),
    **dict.fromkeys(
        ("stream", "use_beam_search", "stream_include_usage", "stream_continuous_usage_stats"), (_flag, "true or false")
    ),
}


async def read_sent(
    operation: Operation, headers: HeaderMap, receive: Receive, bounds: HttpSettings, thread: BodyThread
) -> tuple[dict[str, Any], bytes]:
    """The body of a request, of a form or of JSON, and the bytes that its repeats are known by. Raises as `read_audio`
    and `read_object`."""
    if operation.hears:
        return await read_audio(headers, receive, bounds)
    return await read_object(headers, receive, bounds, thread)


async def read_audio(headers: HeaderMap, receive: Receive, bounds: HttpSettings) -> tuple[dict[str, Any], bytes]:
    """The fields of a form with the bytes of its `file`, and these bytes.

    Raises:
        BadRequest: `param` is the field. BodyTooLarge, BodyTooSlow, UnsupportedContent: as `FormReader`.
    """
    form = FormReader(headers, receive, bounds.max_audio_bytes, setting="http.max_audio_bytes")
    body: dict[str, Any] = {}
    content: bytes | None = None
    while (part := await form.next_part()) is not None:
        name = part.name.removesuffix("[]")
        if part.name != FILE:
            text = await form.text(part.name[:SHOWN_NAME_CHARS])
            if name == _LIST:
                body.setdefault(name, []).append(text)
            elif text:
                body[name] = _value(name, text)
            continue
        if part.filename is None:
            raise BadRequest("`file` must be a file: its part of the form has no filename", param=FILE)
        if content is not None:
            raise BadRequest("`file` is in the form twice", param=FILE)
        content = b"".join([piece async for piece in form.file()])
    if not content:
        raise BadRequest("`file` is missing" if content is None else "`file` is empty", param=FILE)
    return {**body, FILE: content}, content


def check_file(operation: Operation, body: Mapping[str, Any], model: ModelSettings) -> None:
    """Refuse what cannot be transcribed, by the form and the headers of the file; other operations have none. Raises
    BadRequest: `param` is the field."""
    if not operation.hears:
        return
    wanted = body.get("response_format", "json")
    if wanted not in FORMATS:
        reason = " (ask for verbose_json, which has the times)" if wanted in _SUBTITLES else ""
        raise BadRequest(
            f"`response_format` must be {', '.join(FORMATS[:-1])} or {FORMATS[-1]}{reason}", param="response_format"
        )
    times = body.get(_LIST) or []
    if any(one not in ("segment", "word") for one in times):
        raise BadRequest(f"`{_LIST}` has segment alone", param=_LIST)
    if "word" in times:
        raise BadRequest(f"`{_LIST}`: no model here tells the times of words; segment is there", param=_LIST)
    if times and wanted != "verbose_json":
        raise BadRequest(f"`{_LIST}` needs a `response_format` of verbose_json", param=_LIST)
    if body.get("stream") and wanted != "json":
        raise BadRequest("a stream has a `response_format` of json", param="response_format")
    if body.get("n") not in (None, 1):
        raise BadRequest("`n` must be 1: a transcription is one text", param="n")
    _check_headers(body[FILE], model)


def _check_headers(content: bytes, model: ModelSettings) -> None:
    facts = audio_facts(content)
    if facts is None:
        raise BadRequest(f"`file` is no audio that is known here, or cut off: {_KNOWN_FORMATS} is wanted", param=FILE)
    if facts.seconds is None and content.startswith(FLAC):
        raise BadRequest("`file` is a FLAC file that does not say how long it is", param=FILE)
    if facts.rate and facts.rate < MIN_HZ:
        raise BadRequest(f"`file` has {facts.rate} samples a second, at least {MIN_HZ} are needed", param=FILE)
    for found, most, unit, setting in (
        (facts.seconds or 0, model.max_audio_s, "seconds", "models[].max_audio_s"),
        (facts.rate, model.max_audio_hz, "samples a second", "models[].max_audio_hz"),
    ):
        if found > most:
            raise BadRequest(f"`file` has {found:.10g} {unit}, {most:.10g} are allowed ({setting})", param=FILE)
    if facts.decoded_bytes > decoded_bound(model.max_audio_s):
        most = decoded_bound(model.max_audio_s)
        raise BadRequest(
            f"`file` has {facts.decoded_bytes:.0f} bytes once it is decoded, {most} are allowed (models[].max_audio_s)",
            param=FILE,
        )
    if facts.channels > MAX_CHANNELS:
        raise BadRequest(f"`file` has {facts.channels} channels, {MAX_CHANNELS} are allowed", param=FILE)


def audio_s(body: Mapping[str, Any], model: ModelSettings) -> float:
    """The seconds of the file, for its estimate, as `claimed_s`."""
    return claimed_s(body[FILE], model.max_audio_s)


def _value(name: str, text: str) -> Any:
    if name not in _READ:
        return text
    read, wanted = _READ[name]
    try:
        return read(text)
    except (ValueError, KeyError):
        raise BadRequest(f"`{name}` must be {wanted}", param=name) from None
