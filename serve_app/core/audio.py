"""How long an audio file is, and its rate and channels, by its headers, without decoding it. Pure.

A file of a few kilobytes may be hours of silence. Known are the containers that OpenAI's API takes: WAV, FLAC, Ogg
(Vorbis, Opus), MP3, MP4 (M4A) and WebM. What a header says is a claim, which decides the
charge and the slots of a request: the engine decodes no more (`most_s`). A file that claims nothing has its size.

Invariant: for any bytes `audio_facts` raises nothing and looks at O(`MAX_STEPS`) headers; None means that the file is
of no known format. A duration of None: the file is of one, and does not say.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

# Whisper's frames of sound, as vLLM counts them in a prompt; other models make 12 to 25 tokens of a second.
TOKENS_PER_S = 100
TEXT_TOKENS_PER_S = 8  # of fast speech, in a vocabulary that has few of its words; slow speech has 3
DECODED_BYTES_PER_S = 2 * 48_000 * 4  # of two channels at the rate of video, as floats
CHUNK_S = 30.0  # of audio in one engine request: Whisper's
MIN_HZ = 4000  # telephones have 8,000; a file of kilobytes with 1 would be gigabytes at the rate that models hear
MIN_BITS_PER_S = 6000  # of Opus, the lowest that speech is recorded with
MAX_CHANNELS = 8  # 7.1; each is decoded, and they are mixed to one
CLAIM_SLACK_S = 1.0  # that encoders add, and players cut off
CLAIM_SLACK = 1.1  # of an estimate by a bit rate
FLAC = b"fLaC"
EBML = b"\x1a\x45\xdf\xa3"  # Matroska, WebM
MP4 = b"ftyp"  # behind the size of the box
MAX_STEPS = 4096  # chunks, boxes or elements of a file that are looked at
_OGG_HEAD_BYTES = 64  # more than what is read of one
_TAIL_BYTES = 2**16  # an Ogg page has at most 65,307
_FRAMED = frozenset((1, 3, 6, 7, 0xFFFE))  # WAV's codes of samples one by one; others have blocks of many
_NO_LENGTHS = (0, 2**32 - 1, 2**64 - 1)  # an MP4 that was written while it was recorded
_MP3_RATES = (44_100, 48_000, 32_000)
_MP3_KBITS_1 = (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
_MP3_KBITS_2 = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)
_OPUS_RATE = 48_000  # of its positions, whatever was recorded
# EBML: Segment, Info, TimecodeScale, Duration, Tracks, TrackEntry, Audio, SamplingFrequency, Channels
_MASTERS = frozenset((0x18538067, 0x1549A966, 0x1654AE6B, 0xAE, 0xE1))
_SCALE = 0x2AD7B1
_DURATION = 0x4489
_FREQUENCY = 0xB5
_CHANNELS = 0x9F
_CLUSTER = 0x1F43B675  # the sound itself; what is behind it describes nothing
_SOUNDS = frozenset((b"mp4a", b"Opus", b"alac", b"fLaC", b".mp3"))  # kinds of a track; others are pictures
_BOXES = frozenset((b"moov", b"trak", b"mdia", b"minf", b"stbl"))


@dataclass(frozen=True, slots=True)
class AudioFacts:
    """Of one file. `rate` in hertz; 0 in `rate` or `channels`: it does not say."""

    seconds: float | None
    rate: int
    channels: int

    @property
    def decoded_bytes(self) -> float:
        """When it is decoded at its own rate; 0: it does not say."""
        return (self.seconds or 0.0) * self.rate * self.channels * 4


def audio_facts(data: bytes) -> AudioFacts | None:
    """What the headers of a file say; None: no audio of a known format."""
    try:
        facts = _facts(data)
    except (struct.error, IndexError, ZeroDivisionError, OverflowError, ValueError):
        return None  # it is cut off before it says
    if facts is None or facts.seconds is None or (math.isfinite(facts.seconds) and facts.seconds >= 0):
        return facts
    return None


def claimed_s(data: bytes, most: float) -> float:
    """The seconds that a file claims; of one that does not say, those that its size allows. At most `most`."""
    facts = audio_facts(data)
    claimed = None if facts is None else facts.seconds
    return min(most, len(data) * 8 / MIN_BITS_PER_S if claimed is None else claimed)


def most_s(claimed: float) -> float:
    """The seconds that a file may have which claims so many."""
    return max(claimed + CLAIM_SLACK_S, claimed * CLAIM_SLACK)


def chunks_of(seconds: float) -> int:
    """The engine requests that so much audio becomes; at least one."""
    return max(1, math.ceil(seconds / CHUNK_S))


def prompt_tokens(seconds: float) -> int:
    """About as many tokens as are read of so much audio, at least one."""
    return max(1, math.ceil(seconds * TOKENS_PER_S))


def text_tokens(seconds: float) -> int:
    """About as many as the text of so much speech has, at least one."""
    return max(1, math.ceil(seconds * TEXT_TOKENS_PER_S))


def decoded_bound(seconds: float) -> int:
    """The bytes that a file may have when it is decoded at its own rate, if it may have so many seconds."""
    return math.ceil(seconds * DECODED_BYTES_PER_S)


def _facts(data: bytes) -> AudioFacts | None:
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return _wav(data)
    if data[:4] == FLAC:
        return _flac(data)
    if data[:4] == b"OggS":
        return _ogg(data)
    if data[4:8] == MP4:
        return _mp4(data)
    if data[:4] == EBML:
        return _webm(data)
    return _mp3(data)


def _wav(data: bytes) -> AudioFacts | None:
    at = 12
    rate = channels = bytes_per_s = 0
    for _ in range(MAX_STEPS):
        kind, size = struct.unpack_from("<4sI", data, at)
        if kind == b"fmt ":
            code, channels, rate, bytes_per_s, frame = struct.unpack_from("<HHIIH", data, at + 8)
            if code in _FRAMED:
                bytes_per_s = frame * rate
        elif kind == b"data" and bytes_per_s:
            return AudioFacts(min(size, len(data) - at - 8) / bytes_per_s, rate, channels)
        at += 8 + size + size % 2
    return None


def _flac(data: bytes) -> AudioFacts:
    (packed,) = struct.unpack_from(">Q", data, 18)  # 20 bits of rate, 3 of channels, 5 of depth, 36 of samples
    rate = packed >> 44
    samples = packed & (2**36 - 1)
    return AudioFacts(samples / rate if samples else None, rate, (packed >> 41 & 7) + 1)


def _ogg(data: bytes) -> AudioFacts | None:
    start = 27 + data[26]
    head = data[start : start + _OGG_HEAD_BYTES]
    if head[:8] == b"OpusHead":
        channels, skipped = struct.unpack_from("<BH", head, 9)
        rate = _OPUS_RATE
    elif head[:7] == b"\x01vorbis":
        skipped = 0
        channels, rate = struct.unpack_from("<BI", head, 11)
    else:
        return None
    last = data.rfind(b"OggS", max(0, len(data) - _TAIL_BYTES))
    (position,) = struct.unpack_from("<q", data, last + 6) if last >= 0 else (-1,)
    return AudioFacts((position - skipped) / rate if position > skipped else None, rate, channels)


def _mp3(data: bytes) -> AudioFacts | None:
    at = 0
    if data[:3] == b"ID3":
        size = data[6] << 21 | data[7] << 14 | data[8] << 7 | data[9]
        at = 10 + size
    head: int
    (head,) = struct.unpack_from(">I", data, at)
    version = head >> 19 & 3
    layer = head >> 17 & 3
    bits = head >> 12 & 15
    rated = head >> 10 & 3
    if head >> 21 != 0x7FF or version == 1 or layer != 1 or bits in (0, 15) or rated == 3:
        return None
    rate = _MP3_RATES[rated] >> (0 if version == 3 else 1 if version == 2 else 2)
    is_mono = head >> 6 & 3 == 3
    samples = 1152 if version == 3 else 576
    tag = at + 4 + ((17 if is_mono else 32) if version == 3 else (9 if is_mono else 17))
    if data[tag : tag + 4] in (b"Xing", b"Info"):
        flags, frames = struct.unpack_from(">II", data, tag + 4)
        if flags & 1:
            return AudioFacts(frames * samples / rate, rate, 1 if is_mono else 2)
    if data[at + 36 : at + 40] == b"VBRI":
        (frames,) = struct.unpack_from(">I", data, at + 50)
        return AudioFacts(frames * samples / rate, rate, 1 if is_mono else 2)
    kbits = (_MP3_KBITS_1 if version == 3 else _MP3_KBITS_2)[bits]
    return AudioFacts((len(data) - at) * 8 / kbits / 1000, rate, 1 if is_mono else 2)


def _mp4(data: bytes) -> AudioFacts | None:
    seconds: float | None = None
    rate = channels = 0
    is_movie = False
    for kind, start in _boxes(data):
        if kind == b"mvhd":
            is_long = data[start] == 1
            scale, length = struct.unpack_from(">IQ" if is_long else ">II", data, start + (20 if is_long else 12))
            seconds = None if length in _NO_LENGTHS else length / scale
            is_movie = True
        elif kind == b"stsd" and data[start + 12 : start + 16] in _SOUNDS:
            channels, _, _, rate = struct.unpack_from(">HHIH", data, start + 32)
    return AudioFacts(seconds, rate, channels) if is_movie else None


def _boxes(data: bytes) -> Iterator[tuple[bytes, int]]:
    """The kind of each box of an MP4, and where its content starts."""
    at = 0
    for _ in range(MAX_STEPS):
        if at + 8 > len(data):
            return
        size, kind = struct.unpack_from(">I4s", data, at)
        start = at + 8
        if size == 1:
            (size,) = struct.unpack_from(">Q", data, start)
            start += 8
        yield kind, start
        if kind in _BOXES:
            at = start
        elif size < 8:
            return
        else:
            at += size


def _webm(data: bytes) -> AudioFacts | None:
    found = dict(_elements(data))
    if _FREQUENCY not in found and _DURATION not in found:
        return None
    scale = int.from_bytes(found.get(_SCALE, b"")) or 1_000_000  # nanoseconds of one unit
    length = _number(found, _DURATION)
    rate = _number(found, _FREQUENCY)
    return AudioFacts(length * scale / 1e9 if length else None, int(rate), int.from_bytes(found.get(_CHANNELS, b"\1")))


def _number(found: Mapping[int, bytes], name: int) -> float:
    value = found.get(name, b"")
    return float(struct.unpack(">f" if len(value) == 4 else ">d", value)[0]) if value else 0.0


def _elements(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The ids and values of a WebM's elements before its sound; of those with elements in them, these."""
    at = 0
    for _ in range(MAX_STEPS):
        if at >= len(data):
            return
        width = 9 - data[at].bit_length()
        name = int.from_bytes(data[at : at + width])
        at += width
        width = 9 - data[at].bit_length()
        size = int.from_bytes(data[at : at + width]) & (1 << 7 * width) - 1
        at += width
        if name == _CLUSTER:
            return
        if name in _MASTERS:
            continue
        if size <= 8:
            yield name, data[at : at + size]
        at += size
