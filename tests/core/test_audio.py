"""The length, rate and channels of an audio file, by its headers; libraries that read the files make them."""

from __future__ import annotations

import io
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.audio import (
    CHUNK_S,
    MIN_BITS_PER_S,
    TEXT_TOKENS_PER_S,
    TOKENS_PER_S,
    AudioFacts,
    audio_facts,
    chunks_of,
    claimed_s,
    most_s,
    prompt_tokens,
    text_tokens,
)

RATE = 48_000  # Opus has no other
SECONDS = 2.5
MAX_SAMPLES = 1_000_000  # more than a file here has: some codes cannot be read to an end that they do not know
PADDING_S = 0.1  # that encoders add: a frame or two


def by_soundfile(kind: str, subtype: str | None = None, channels: int = 2) -> bytes:
    import numpy as np
    import soundfile

    file = io.BytesIO()
    frames = np.zeros((round(RATE * SECONDS), channels), dtype=np.float32)
    soundfile.write(file, frames, RATE, format=kind, subtype=subtype)
    return file.getvalue()


def by_ffmpeg(kind: str, codec: str) -> bytes:
    import av
    import numpy as np

    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=RATE)
        stream.layout = "stereo"
        left = round(RATE * SECONDS)
        while left:
            size = min(left, 960)
            frame = av.AudioFrame.from_ndarray(np.zeros((2, size), dtype=np.float32), format="fltp", layout="stereo")
            frame.sample_rate = RATE
            container.mux(stream.encode(frame))
            left -= size
        container.mux(stream.encode(None))
    return file.getvalue()


FILES = {
    "wav": ("WAV", "PCM_16"),
    "wav of floats": ("WAV", "FLOAT"),
    "flac": ("FLAC", None),
    "ogg vorbis": ("OGG", "VORBIS"),
    "ogg opus": ("OGG", "OPUS"),
    "mp3": ("MP3", None),
}


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    made = {name: by_soundfile(*how) for name, how in FILES.items()}
    return made | {"m4a": by_ffmpeg("ipod", "aac"), "webm": by_ffmpeg("webm", "libopus")}


@pytest.mark.parametrize("name", [*FILES, "m4a", "webm"])
def test_a_file_of_each_format_says_its_length_rate_and_channels(files: dict[str, bytes], name: str) -> None:
    facts = audio_facts(files[name])
    assert facts is not None
    assert facts.seconds == pytest.approx(SECONDS, abs=PADDING_S)
    assert (facts.rate, facts.channels) == (RATE, 2)


@pytest.mark.parametrize("name", [*FILES, "m4a", "webm"])
def test_a_file_that_is_cut_off_anywhere_raises_nothing(files: dict[str, bytes], name: str) -> None:
    whole = files[name]
    for size in {*range(min(len(whole), 600)), len(whole) // 2}:
        audio_facts(whole[:size])


@given(
    st.binary(max_size=200),
    st.sampled_from([b"RIFF....WAVE", b"fLaC", b"OggS", b"....ftyp", b"\x1a\x45\xdf\xa3", b"ID3", b""]),
)
def test_no_bytes_raise_anything(content: bytes, head: bytes) -> None:
    facts = audio_facts(head + content)
    assert facts is None or facts.seconds is None or facts.seconds >= 0


BLOCKS = (
    "IMA_ADPCM",
    "MS_ADPCM",
    "GSM610",
    "G721_32",
    "NMS_ADPCM_16",
    "NMS_ADPCM_24",
    "NMS_ADPCM_32",
    "ULAW",
    "ALAW",
    "PCM_U8",
    "PCM_24",
    "DOUBLE",
)


@pytest.mark.parametrize("subtype", BLOCKS)
def test_a_wav_of_each_code_claims_what_is_decoded_of_it(subtype: str) -> None:
    import soundfile

    data = by_soundfile("WAV", subtype, channels=1)
    facts = audio_facts(data)
    assert facts is not None
    assert facts.seconds is not None
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        found = len(file.read(MAX_SAMPLES)) / file.samplerate
    assert found == pytest.approx(facts.seconds, abs=PADDING_S)
    assert found <= most_s(facts.seconds)


def mp4(length: int, is_long: bool) -> bytes:
    """A movie of thousandths of a second."""
    times = struct.pack(">QQIQ" if is_long else ">IIII", 0, 0, 1000, length)
    head = struct.pack(">I4s", 12 + len(times), b"mvhd") + bytes([is_long, 0, 0, 0]) + times
    return struct.pack(">I4s4sI", 16, b"ftyp", b"isom", 0) + struct.pack(">I4s", 8 + len(head), b"moov") + head


@pytest.mark.parametrize(("length", "is_long"), [(0, False), (2**32 - 1, False), (0, True), (2**64 - 1, True)])
def test_an_mp4_that_was_not_finished_says_no_length(length: int, is_long: bool) -> None:
    assert audio_facts(mp4(1500, is_long)) == AudioFacts(1.5, 0, 0)
    assert audio_facts(mp4(length, is_long)) == AudioFacts(None, 0, 0)


def test_a_file_that_says_no_length_is_as_long_as_its_size_allows() -> None:
    data = mp4(0, False)
    data += bytes(MIN_BITS_PER_S - len(data))
    assert claimed_s(data, 600) == 8
    assert claimed_s(data, 5) == 5
    assert claimed_s(mp4(1500, False), 600) == 1.5
    assert (most_s(1), most_s(100)) == (2, pytest.approx(110))


def test_an_mp3_with_a_table_of_fraunhofer_s_is_as_long_as_its_frames() -> None:
    frame = struct.pack(">I", 0xFFFB9000) + bytes(32) + struct.pack(">4sHHHII", b"VBRI", 1, 0, 0, 0, 100)
    assert audio_facts(frame + bytes(100)) == AudioFacts(100 * 1152 / 44_100, 44_100, 2)


def test_a_wav_that_claims_more_than_it_has_is_as_long_as_its_bytes() -> None:
    head = b"RIFF" + struct.pack("<I4s4sIHHIIHH", 0, b"WAVE", b"fmt ", 16, 1, 1, 16_000, 32_000, 2, 16)
    assert audio_facts(head + b"data" + struct.pack("<I", 2**32 - 1) + bytes(64_000)) == AudioFacts(2.0, 16_000, 1)


def test_an_mp3_without_a_table_is_as_long_as_its_bit_rate_says() -> None:
    frame = struct.pack(">I", 0xFFFB9000)  # MPEG 1, layer 3, 128 kbit/s, 44,100 Hz, stereo
    facts = audio_facts(frame + bytes(16_000 - 4))
    assert facts == AudioFacts(1.0, 44_100, 2)


def test_text_and_images_are_no_audio() -> None:
    assert audio_facts(b"a text that somebody uploads") is None
    assert audio_facts(b"\x89PNG\r\n\x1a\n" + bytes(100)) is None
    assert audio_facts(b"") is None


def test_the_estimates_grow_with_the_seconds_and_are_at_least_one() -> None:
    assert (chunks_of(0), prompt_tokens(0), text_tokens(0)) == (1, 1, 1)
    assert (chunks_of(CHUNK_S), chunks_of(CHUNK_S + 0.1)) == (1, 2)
    assert (prompt_tokens(10), text_tokens(10)) == (10 * TOKENS_PER_S, 10 * TEXT_TOKENS_PER_S)
