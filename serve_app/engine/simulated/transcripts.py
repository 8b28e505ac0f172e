"""Transcriptions and translations of the simulated engine: the text is noise that file, language and task determine, as
long as fast speech of the file's length. Pure."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

from serve_app.core.audio import audio_facts, prompt_tokens, text_tokens
from serve_app.engine.simulated.requests import Generation
from serve_app.engine.simulated.text import TOKEN_CHARS, SimulatedChoice, text_key, text_of, token_group
from serve_app.errors import BadRequest
from serve_app.types import Operation

LANGUAGE = "en"  # that is heard where none is named


def parse_transcription(operation: Operation, body: dict[str, Any], *, seed: int, max_model_len: int) -> Generation:
    """The text to produce. Raises BadRequest: the file is no audio."""
    seconds = duration(body)
    asked = [operation, body.get("language", LANGUAGE), hashlib.blake2b(body["file"]).hexdigest()]
    whole = min(text_tokens(seconds), max_model_len // 2)
    length = min(whole, body.get("max_completion_tokens", whole))
    prompt = prompt_tokens(seconds)
    cut = length * TOKEN_CHARS if length == whole else None
    choice = SimulatedChoice(0, text_key(seed, 0, json.dumps(asked)), min(prompt, max_model_len // 2), length, cut)
    stream = bool(body.get("stream"))
    return Generation((choice,), prompt, stream, stream and bool(body.get("stream_include_usage")))


def duration(body: dict[str, Any]) -> float:
    """The seconds of the file in a body. Raises BadRequest: it is no audio."""
    facts = audio_facts(body["file"])
    if facts is None or facts.seconds is None:
        raise BadRequest("`file`: no audio can be read from it", param="file")
    return facts.seconds


class TranscriptWriter:
    """The bytes of one answer, as `vllm_adapter.transcriptions` has them."""

    def __init__(self, operation: Operation, request_id: str, model: str, created: int, body: dict[str, Any]) -> None:
        kind = f"{operation.value}.chunk"
        self._fields = {"id": f"trsc-{request_id}", "object": kind, "created": created, "model": model}
        self._operation = operation
        self._body = body
        self._text = ""

    def tokens(self, choice: SimulatedChoice, start: int, stop: int) -> tuple[bytes, list[int]]:
        """The events of the tokens `start` to `stop`, and the token group behind them."""
        events = b""
        for at in range(start, stop):
            text = text_of(choice.key, at, at + 1)
            self._text += text
            chunk: dict[str, Any] = {"delta": {"content": text}}
            if at + 1 == choice.max_tokens:
                chunk["finish_reason"] = choice.finish_reason
            events += _event({"type": "transcript.text.delta", "delta": text} | self._fields | {"choices": [chunk]})
        return events, token_group(choice, start, stop)

    def end(self, usage: dict[str, int] | None) -> bytes:
        """The end of the stream, with `usage` if the client requested it."""
        counted = b"" if usage is None else _event(self._fields | {"choices": [], "usage": usage})
        nothing = {"choices": [{"delta": {"content": ""}}]}
        done = _event({"type": "transcript.text.done", "text": self._text} | nothing)
        return counted + done + b"data: [DONE]\n\n"

    def document(self, choices: Sequence[SimulatedChoice], usage: dict[str, int]) -> bytes:
        """The whole answer, in the format that was asked for."""
        text = "".join(text_of(choice.key, 0, choice.max_tokens) for choice in choices).strip()
        wanted = self._body.get("response_format", "json")
        if wanted == "text":
            return text.encode()
        seconds = duration(self._body)
        if wanted == "verbose_json":
            segment = {"id": 0, "start": 0.0, "end": seconds, "text": text}
            language = self._body.get("language", LANGUAGE)
            return _json({"text": text, "language": language, "duration": seconds, "segments": [segment]})
        if self._operation is Operation.TRANSLATION:  # vLLM gives it no usage
            return _json({"text": text})
        return _json({"text": text, "usage": {"type": "duration", "seconds": math.ceil(seconds)}})


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + _json(body) + b"\n\n"


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
