"""vLLM's errors in OpenAI's format: vLLM puts the HTTP status where OpenAI has a machine-readable code or null."""

from __future__ import annotations

import msgspec

from serve_app.errors import NotFound

_TOO_LONG = "maximum context length"  # part of vLLM's message for a prompt that is too long


def error_body(message: str, status: int, type_: str, param: str | None) -> bytes:
    """The JSON body of an error that vLLM made."""
    code = None
    if status == NotFound.status:
        code = "model_not_found"
    elif _TOO_LONG in message:
        code = "context_length_exceeded"
    kind = "invalid_request_error" if status < 500 else type_
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})
