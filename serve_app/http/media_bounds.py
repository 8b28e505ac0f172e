"""Refuses media that are larger than a model's settings allow, by what their files say, before anything decodes them.

An image behind a link is bounded by the engine that fetches it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from serve_app.core.body_bounds import EMBED_FIELDS
from serve_app.core.images import data_url_pixels
from serve_app.core.queue import RefusalReason
from serve_app.core.score_inputs import INPUT_FIELDS
from serve_app.errors import BadRequest
from serve_app.settings import ModelSettings
from serve_app.types import Operation

_IMAGE = "image_url"  # of a part of a chat, where it may be an object, or of an item of Responses


def check_media(operation: Operation, body: Mapping[str, Any], model: ModelSettings) -> None:
    """O(messages and parts). Raises BadRequest: `param` is the path of the medium."""
    for name in ("messages", "input", *EMBED_FIELDS, *INPUT_FIELDS.get(operation, ())):
        for path, url in _images(name, body.get(name)):
            pixels = data_url_pixels(url)
            if pixels > model.max_image_pixels:
                raise BadRequest(
                    f"`{path}` has {pixels} pixels, {model.max_image_pixels} are allowed (models[].max_image_pixels)",
                    param=path,
                    code=RefusalReason.TOO_LARGE.value,
                )


def image_url(part: Mapping[str, Any]) -> str | None:
    """The address of the image in a content part; None: it has none."""
    value = part.get(_IMAGE)
    url = value.get("url") if type(value) is dict else value
    return url if type(url) is str else None


def _images(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """The images of messages, of lists of them, or of a list of addresses, each with its path."""
    if type(value) is list:
        for number, item in enumerate(value):
            if type(item) in (dict, list):
                yield from _images(f"{path}.{number}", item)
            elif path == "images" and type(item) is str:
                yield f"{path}.{number}", item
    content = value.get("content") if type(value) is dict else None
    for index, part in enumerate(content if type(content) is list else ()):
        if type(part) is dict and (url := image_url(part)) is not None:
            yield f"{path}.content.{index}.{_IMAGE}", url
