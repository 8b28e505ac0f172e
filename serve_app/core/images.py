"""How many pixels an image has, by the header of its file, without decoding it. Pure.

A file of a few kilobytes may be an image of gigabytes. Known are the formats that models' own processors read: PNG,
JPEG, GIF, WebP and BMP.

Invariant: for any text `data_url_pixels` returns a number of at least 0 and raises nothing, and it decodes at most
`HEADER_BYTES`.
"""

from __future__ import annotations

import base64
import binascii
import struct

HEADER_BYTES = 2**18  # of a file: a JPEG has its size behind profiles and previews, of up to 64 KiB each
PIXELS_PER_TOKEN = 784  # 28 x 28, as current models read an image
LEAST_TOKENS = 64  # of a small one, and its marks
_BASE64 = ";base64"
# Markers of a JPEG's frame, which has its size; the others of their range are tables.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_ALONE = frozenset((0x01, *range(0xD0, 0xD9)))  # markers without a segment


def data_url_pixels(url: str) -> int:
    """The pixels of an image in a data URL; 0: it is none, or does not say."""
    head, _, data = url[: 2 * HEADER_BYTES].partition(",")
    if head[:5].lower() != "data:" or not head.lower().endswith(_BASE64):
        return 0
    text = data[: HEADER_BYTES // 3 * 4].encode("ascii", "ignore")
    try:
        return image_pixels(base64.b64decode(text[: len(text) // 4 * 4]))
    except binascii.Error:
        return 0


def image_pixels(data: bytes) -> int:
    """The pixels of a file by its first bytes; 0: no image of a known format, or it is cut off before it says."""
    try:
        width, height = _size(data)
    except (struct.error, IndexError):
        return 0
    return width * height


def image_tokens(pixels: int) -> int:
    """About as many tokens as current models make of so many pixels."""
    return max(LEAST_TOKENS, -(-pixels // PIXELS_PER_TOKEN))


def _size(data: bytes) -> tuple[int, int]:
    if data[:8] == b"\x89PNG\r\n\x1a\n":
        width, height = struct.unpack_from(">II", data, 16)
    elif data[:4] == b"GIF8":
        width, height = struct.unpack_from("<HH", data, 6)
    elif data[:2] == b"BM":
        width, height = (abs(one) for one in struct.unpack_from("<ii", data, 18))
    elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return _webp(data)
    elif data[:3] == b"\xff\xd8\xff":
        return _jpeg(data)
    else:
        return 0, 0
    return width, height


def _webp(data: bytes) -> tuple[int, int]:
    kind = data[12:16]
    if kind == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if kind == b"VP8L":
        (packed,) = struct.unpack_from("<I", data, 21)
        return 1 + (packed & 0x3FFF), 1 + (packed >> 14 & 0x3FFF)
    width, height = struct.unpack_from("<HH", data, 26)
    return width & 0x3FFF, height & 0x3FFF


def _jpeg(data: bytes) -> tuple[int, int]:
    at = 2
    while True:
        if data[at] != 0xFF:
            return 0, 0
        marker = data[at + 1]
        if marker == 0xFF:  # a filler
            at += 1
        elif marker in _ALONE:
            at += 2
        elif marker in _FRAMES:
            height, width = struct.unpack_from(">HH", data, at + 5)
            return width, height
        else:
            (length,) = struct.unpack_from(">H", data, at + 2)
            at += 2 + length
