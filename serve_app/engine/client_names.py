"""Names the field at fault as a path in the client's body: vLLM's errors have its own names, or none.

Invariant: a name returned here is a path into the client's body, or what vLLM said where no such path is known.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from serve_app.core.body_bounds import EMBED_FIELDS, MEDIA, text_bytes
from serve_app.core.score_inputs import INPUT_FIELDS

MESSAGES = "messages"  # vLLM's name of what is rendered
_PROMPTS = (MESSAGES, "prompt", "input", "tokens", *EMBED_FIELDS, *sorted(set().union(*INPUT_FIELDS.values())))
# vLLM's name of a field, and the client's fields that become it. Of those in the body, the one with the longest text
# counts, else the first: vLLM does not say whether the query or a document of a score is too long.
_CLIENT_FIELDS = {
    "max_tokens": ("max_completion_tokens", "max_output_tokens"),
    "dimensions": ("output_dimension",),
    "logprobs": ("top_logprobs",),
    "prompt_logprobs": ("prompt_logprobs", "logprobs"),  # the latter with `echo`
    "input_tokens": _PROMPTS,
    "input_text": _PROMPTS,
}
_OLD_NAMES: dict[str | int, str] = {"reasoning": "reasoning_content"}  # that vLLM reads as the new ones
_FIELD_WORD = re.compile(r"(?:(?:^|; )`?|`)([a-z_]+)")  # the first word of the message or of a part of it; one quoted
# Fields that become a grammar; vLLM passes errors of the grammar's builder through unchanged.
_GRAMMAR_FIELDS = ("structured_outputs", "response_format", "tools", "text")
_APPENDED_PARAMETER = re.compile(r" \(parameter=[^,)]*(?:, value=(.*))?\)$", re.DOTALL)
_OWN_VALUES = re.compile(r": \{'json': .*\}$", re.DOTALL)  # the attributes of a class of vLLM, in Python
MAX_SEARCHED = 20_000  # values of a body, in the event loop: 5 ms

Path = tuple[str | int, ...]
Body = Mapping[str, Any]


def dotted(path: Sequence[str | int]) -> str:
    """A path as clients read it."""
    return ".".join(map(str, path))


def field_path(location: Sequence[str | int], value: Any, body: Body, *, is_missing: bool) -> str | None:
    """The dotted path of a validation error, of the body or of a part that was read by itself: the first place from
    which the error's location leads to its value. None: it concerns the whole body.

    Args:
        location: pydantic's `loc`, with the names of union branches between those of fields.
        value: pydantic's `input`, that at the location; of a missing field the object that lacks it.
        is_missing: the last part is a field that the body lacks.
    """
    for place, node in _nodes(body):
        path, found = _followed(location, node, is_missing)
        if path and found == value:
            return dotted((*place, *path))
    return client_path(location, body, is_missing=is_missing)


def client_path(location: Sequence[str | int], body: Body, *, is_missing: bool) -> str | None:
    """The dotted path of a location in the body, in the client's names. None: the whole body."""
    return dotted(_followed(location, body, is_missing)[0]) or None


def _followed(location: Sequence[str | int], node: Any, is_missing: bool) -> tuple[Path, Any]:
    """The path to which a location leads from a node, and the value there."""
    path: list[str | int] = []
    for number, part in enumerate(location):
        children = dict(enumerate(node)) if isinstance(node, list) else node
        if isinstance(children, Mapping) and part not in children and _OLD_NAMES.get(part) in children:
            part = _OLD_NAMES[part]
        if isinstance(children, Mapping) and part in children:
            node = children[part]
        elif not (is_missing and number == len(location) - 1):
            continue
        path.append(part)
    return tuple(path), node


def with_new_names(messages: Any) -> Any:
    """The messages of a chat with the names that vLLM gives to fields with old ones."""
    if not isinstance(messages, list):
        return messages
    return [_with_new_names(one) if isinstance(one, Mapping) else one for one in messages]


def _with_new_names(message: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(message)
    for new, old in _OLD_NAMES.items():
        value = found.pop(old, None)
        if value is not None and found.get(str(new)) is None:
            found[str(new)] = value
    return found


def grammar_field(body: Body) -> str | None:
    """The path of what becomes a grammar in a body; None: there is nothing."""
    name = next((name for name in _GRAMMAR_FIELDS if body.get(name)), None)
    if name == "structured_outputs":
        kinds = [kind for kind, value in body[name].items() if value is not None]
        return f"{name}.{kinds[0]}" if len(kinds) == 1 else name
    return name


def in_client_words(message: str, param: str | None, body: Body) -> tuple[str, str | None]:
    """vLLM's message and parameter with the client's name of the field."""
    if param is not None and message.startswith(f"{param}: ") and param.partition(".")[0] in body:
        return message, param  # told by the client's path already
    appended = _APPENDED_PARAMETER.search(message)
    if appended:
        message = message[: appended.start()]
    message = _OWN_VALUES.sub("", message)
    place = _place_named_in(message, body)
    if place is None and param == MESSAGES:
        place = next(((name,) for name in _PROMPTS if name in body), None)
    if place is None and param is not None and param not in body and param not in _CLIENT_FIELDS:
        place = _place_of(param, appended and appended[1], body)
    if place is not None:
        return f"{dotted(place)}: {message}", dotted(place)
    if param is None:
        return message, next((word for word in _FIELD_WORD.findall(message) if word in body), None)
    fields = [field for field in _CLIENT_FIELDS.get(param, ()) if body.get(field) is not None]
    name = max(fields, key=lambda field: _longest_text(body[field]), default=param)
    message = re.sub(rf"\b{re.escape(param)}\b", name, message)
    return message, dotted(_longest_entry(name, body[name])) if fields and _CLIENT_FIELDS[param] is _PROMPTS else name


def _place_named_in(message: str, body: Body) -> Path | None:
    """Where the value is that a message of vLLM speaks of; None: it speaks of none that is known here."""
    for pattern, find in _PLACES:
        found = pattern.search(message)
        if found:
            return find(body, *found.groups())
    return None


def _place_of(name: str, value: str | None, body: Body) -> Path | None:
    """The first field of this name in the objects of a body, and with this value if it is given."""
    for path, node in _objects(body):
        if name in node and (value is None or str(node[name]) == value):
            return (*path, name)
    return None


def _token(body: Body, number: str) -> Path | None:
    token = int(number)
    for path, ids in _prompts(body):
        if isinstance(ids, list) and token in ids:
            return (*path, ids.index(token))
    return None


def _empty_prompt(body: Body) -> Path | None:
    return next((path for path, prompt in _prompts(body) if prompt in ("", [])), None)


def _no_turns(body: Body) -> Path | None:
    return next(((name,) for name in ("messages", "input") if body.get(name) == []), None)


def _constraint(body: Body) -> Path | None:
    return ("structured_outputs",) if "structured_outputs" in body else None


def _given(name: str, body: Body) -> Path | None:
    return (name,) if name in body else None


def _medium(body: Body) -> Path | None:
    """The first content part that is an image, audio or video; of texts to compare, the first that is an object."""
    for path, node in _objects(body):
        is_part = len(path) > 1 and isinstance(path[-1], int)
        if is_part and any(node.get("type") in MEDIA[name] for name in MEDIA.keys() & node):
            return path
    compared = {field for fields in INPUT_FIELDS.values() for field in fields}
    return next((path for path, _ in _objects(body) if path[0] in compared), None)


def _untyped_part(body: Body) -> Path | None:
    """The type of the first content part that has none."""
    for path, node in _objects(body):
        if path[-2:-1] == ("content",) and node.get("type") is None:
            return (*path, "type")
    return None


_PLACES: tuple[tuple[re.Pattern[str], Callable[..., Path | None]], ...] = (
    (re.compile(r"^Missing 'type' field"), _untyped_part),
    (re.compile(r"^Token id (-?\d+) is out of vocabulary"), _token),
    (re.compile(r"prompt cannot be empty"), _empty_prompt),
    (re.compile(r"to an empty conversation"), _no_turns),
    (re.compile(r"^Unsupported input item type: (.+)$"), lambda body, kind: _place_of("type", kind, body)),
    (re.compile(r"^Encrypted content is not supported"), lambda body: _place_of("encrypted_content", None, body)),
    (re.compile(r"kind of (?:structured outputs constraint|constraints for structured)"), _constraint),
    (re.compile(r"^Unsupported input_type '"), lambda body: _given("input_type", body)),
    (re.compile(r"exceeds max_tokens=\d+ with truncate=NONE"), lambda body: _given("max_tokens", body)),
    (re.compile(r"not a multimodal model|^MultiModalParam is not supported|^At most \d+ \w+\(s\) may be"), _medium),
)


def _objects(body: Body) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """The objects in a body with their paths, in its order, up to a bound."""
    return ((path, node) for path, node in _nodes(body) if path and isinstance(node, Mapping))


def _nodes(body: Body) -> Iterator[tuple[Path, Any]]:
    """The body, and the objects and lists in it with their paths, in its order, up to a bound."""
    left: list[tuple[Path, Any]] = [((), body)]
    for _ in range(MAX_SEARCHED):
        if not left:
            return
        path, node = left.pop()
        if isinstance(node, Mapping):
            children: Any = node.items()
        elif isinstance(node, list):
            children = enumerate(itertools.islice(node, MAX_SEARCHED))
        else:
            continue
        yield path, node
        left += reversed([((*path, name), child) for name, child in children])


def _prompts(body: Body) -> Iterator[tuple[Path, Any]]:
    """The texts and lists of token ids in a body, each a prompt, with their paths."""
    for field in _PROMPTS:
        value = body.get(field)
        if isinstance(value, list) and value and isinstance(value[0], str | list):
            yield from (((field, number), one) for number, one in enumerate(value))
        elif value is not None:
            yield (field,), value


def _longest_text(value: Any) -> int:
    """The bytes of the longest text in a field; 0: it has none."""
    return max(map(_size, value if isinstance(value, list) else [value]), default=0)


def _longest_entry(field: str, value: Any) -> Path:
    """The path of the longest prompt in a field that may have several."""
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        return field, max(range(len(value)), key=lambda number: _size(value[number]))
    return (field,)


def _size(prompt: Any) -> int:
    """The bytes of a text; of a list, its entries."""
    if isinstance(prompt, str):
        return text_bytes(prompt)
    return len(prompt) if isinstance(prompt, list) else 0
