"""Images with more pixels than the model's settings allow are refused by their path, in every form of a request."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from serve_app.core.body_bounds import BYTES_PER_TOKEN
from serve_app.core.images import image_tokens
from serve_app.errors import BadRequest
from serve_app.http.media_bounds import check_media
from serve_app.http.request_size import MEDIA_TOKENS, prompt_bytes
from serve_app.settings import ModelSettings
from serve_app.types import Operation
from tests.core.test_images import data_url

MODEL = ModelSettings(name="v", max_image_pixels=1_000_000)


def png(width: int, height: int) -> str:
    head = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", width, height)
    return data_url(head + bytes(9))


SMALL = png(1000, 1000)
LARGE = png(1000, 1001)


def part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def message(*urls: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": "a"}, *map(part, urls)]}


@pytest.mark.parametrize(
    ("operation", "body", "path"),
    [
        (Operation.CHAT, {"messages": [message(SMALL), message(SMALL, LARGE)]}, "messages.1.content.2.image_url"),
        (
            Operation.RESPONSES,
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": LARGE}]}]},
            "input.0.content.0.image_url",
        ),
        (Operation.EMBEDDING, {"messages": [[message()], [message(LARGE)]]}, "messages.1.0.content.1.image_url"),
        (Operation.EMBED, {"images": [SMALL, LARGE]}, "images.1"),
        (Operation.EMBED, {"inputs": [{"content": [part(LARGE)]}]}, "inputs.0.content.0.image_url"),
        (
            Operation.SCORE,
            {"queries": "a", "documents": [{"content": [part(LARGE)]}]},
            "documents.0.content.0.image_url",
        ),
    ],
)
def test_an_image_with_too_many_pixels_is_refused_by_its_path(
    operation: Operation, body: dict[str, Any], path: str
) -> None:
    with pytest.raises(BadRequest, match="1001000 pixels") as caught:
        check_media(operation, body, MODEL)
    assert caught.value.param == path
    check_media(operation, body, ModelSettings(name="v"))


@pytest.mark.parametrize("url", [SMALL, "https://images.example/a.png", "data:image/png;base64,AAAA"])
def test_what_is_small_enough_or_does_not_say_passes(url: str) -> None:
    check_media(Operation.CHAT, {"messages": [message(url), {"role": "user", "content": "a"}, 5]}, MODEL)


def test_an_image_counts_in_the_estimate_by_its_pixels_where_it_says_them() -> None:
    def tokens(*urls: str) -> int:
        return prompt_bytes(Operation.CHAT, {"messages": [message(*urls)]}) // BYTES_PER_TOKEN

    bare = tokens()
    assert tokens(SMALL) - bare == pytest.approx(image_tokens(1_000_000), abs=1)
    assert tokens(png(28, 28)) - bare == pytest.approx(image_tokens(784), abs=1)
    assert tokens("https://images.example/a.png") - bare == pytest.approx(MEDIA_TOKENS, abs=1)
    two = prompt_bytes(Operation.EMBED, {"images": [SMALL, SMALL]})
    assert two == 2 * BYTES_PER_TOKEN * image_tokens(1_000_000)
