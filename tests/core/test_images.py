"""The pixels of an image, by the header of its file."""

from __future__ import annotations

import base64
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.images import HEADER_BYTES, data_url_pixels, image_pixels, image_tokens

WIDTH = 640
HEIGHT = 480


def segment(marker: int, content: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, 2 + len(content)) + content


def riff(kind: bytes, content: bytes) -> bytes:
    return struct.pack("<4sI4s4sI", b"RIFF", 22, b"WEBP", kind, len(content)) + content


FRAME = segment(0xC2, struct.pack(">BHHB", 8, HEIGHT, WIDTH, 3) + bytes(9))
PNG = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", WIDTH, HEIGHT) + bytes(9)
PREVIEW = segment(0xE1, b"Exif\0\0\xff\xc0" + bytes(60_000)) * 3
IMAGES = {
    "png": PNG,
    "gif": b"GIF89a" + struct.pack("<HH", WIDTH, HEIGHT) + bytes(8),
    "bmp": b"BM" + bytes(16) + struct.pack("<ii", WIDTH, -HEIGHT),
    "jpeg": b"\xff\xd8" + segment(0xE0, b"JFIF\0" + bytes(9)) + segment(0xC4, bytes(30)) + b"\xff" + FRAME,
    "jpeg with previews": b"\xff\xd8" + PREVIEW + FRAME,
    "webp": riff(b"VP8 ", bytes(6) + struct.pack("<HH", 1 << 14 | WIDTH, HEIGHT)),
    "webp, lossless": riff(b"VP8L", b"\x2f" + struct.pack("<I", (HEIGHT - 1) << 14 | WIDTH - 1)),
    "webp, extended": riff(b"VP8X", bytes(4) + (WIDTH - 1).to_bytes(3, "little") + (HEIGHT - 1).to_bytes(3, "little")),
}


def data_url(data: bytes) -> str:
    return "data:image/x;base64," + base64.b64encode(data).decode()


@pytest.mark.parametrize("kind", IMAGES)
def test_the_header_of_each_format_says_its_size(kind: str) -> None:
    assert image_pixels(IMAGES[kind]) == data_url_pixels(data_url(IMAGES[kind])) == WIDTH * HEIGHT


def test_no_more_than_the_header_is_decoded() -> None:
    far = b"\xff\xd8" + segment(0xE1, bytes(65_000)) * (HEADER_BYTES // 65_000 + 1) + FRAME
    assert data_url_pixels(data_url(far)) == 0
    assert data_url_pixels(data_url(PNG + bytes(10 * HEADER_BYTES))) == WIDTH * HEIGHT


@pytest.mark.parametrize(
    "url", ["", "https://a/b.png", "data:image/png,abc", "data:image/png;base64,!", "data:;base64"]
)
def test_what_says_nothing_has_no_pixels(url: str) -> None:
    assert data_url_pixels(url) == 0


@given(st.sampled_from([one[:size] for one in IMAGES.values() for size in (3, 13, 20)]), st.binary(max_size=60))
def test_any_bytes_and_any_text_have_a_number(begins: bytes, rest: bytes) -> None:
    assert image_pixels(begins + rest) >= 0
    assert data_url_pixels(data_url(begins + rest)) >= 0
    assert data_url_pixels("data:image/png;base64," + rest.decode("latin-1")) >= 0


@pytest.mark.parametrize(("pixels", "tokens"), [(1, 64), (640 * 480, 392), (2048 * 2048, 5350)])
def test_a_larger_image_is_more_tokens(pixels: int, tokens: int) -> None:
    assert image_tokens(pixels) == tokens
