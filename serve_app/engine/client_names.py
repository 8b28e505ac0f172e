"""Names the field at fault in the client's own words: vLLM's errors have its names, and paths through its classes.

Invariant: a name returned here is a path into the client's body, or what vLLM said where no such path is known.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from serve_app.core.score_inputs import INPUT_FIELDS

# vLLM's name of a field, and the client's fields that become it. Of those in the body, the one with the longest text
# counts, else the first: vLLM does not say whether the query or a document of a score is too long.
_CLIENT_FIELDS = {
    "max_tokens": ("max_completion_tokens", "max_output_tokens"),
    "logprobs": ("top_logprobs",),
    "prompt_logprobs": ("prompt_logprobs", "logprobs"),  # the latter with `echo`
    "input_tokens": ("messages", "prompt", "input", *sorted(set().union(*INPUT_FIELDS.values()))),
}
_FIELD_WORD = re.compile(r"(?:^|; )`?([a-z_]+)")  # the first word of the message, or of a part of it
_APPENDED_PARAMETER = re.compile(r" \(parameter=.*\)$", re.DOTALL)


def field_path(location: Sequence[str | int], body: Mapping[str, Any], *, is_missing: bool) -> str | None:
    """The dotted path of a validation error; None: it concerns the whole body.

    Args:
        location: pydantic's `loc`, with the names of union branches between those of fields.
        is_missing: the last part is a field that the body lacks.
    """
    node: Any = body
    path: list[str] = []
    for number, part in enumerate(location):
        children = dict(enumerate(node)) if isinstance(node, list) else node
        if isinstance(children, Mapping) and part in children:
            node = children[part]
        elif not (is_missing and number == len(location) - 1):
            continue
        path.append(str(part))
    return ".".join(path) or None


def in_client_words(message: str, param: str | None, body: Mapping[str, Any]) -> tuple[str, str | None]:
    """vLLM's message and parameter with the client's name of the field."""
    message = _APPENDED_PARAMETER.sub("", message)
    if param is None:
        return message, next((word for word in _FIELD_WORD.findall(message) if word in body), None)
    fields = [field for field in _CLIENT_FIELDS.get(param, ()) if body.get(field) is not None]
    name = max(fields, key=lambda field: _longest_text(body[field]), default=param)
    return re.sub(rf"\b{re.escape(param)}\b", name, message), name


def _longest_text(value: Any) -> int:
    """The characters of the longest text in a field; 0: it has none."""
    return max((len(one) for one in (value if isinstance(value, list) else [value]) if isinstance(one, str)), default=0)
