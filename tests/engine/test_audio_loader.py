"""Audio files are decoded as long as they claim to be, by the library of their container alone, within the bounds."""

from __future__ import annotations

import io
import struct
from typing import Any, Literal

import pytest

from tests.requires import requires

requires("vllm")

import av  # noqa: E402
import numpy as np  # noqa: E402
from vllm.entrypoints.speech_to_text.base import serving as speech_serving  # noqa: E402
from vllm.multimodal.media import audio as media_audio  # noqa: E402

from serve_app.core.audio import EBML, MAX_CHANNELS, MIN_HZ, MP4, audio_facts  # noqa: E402
from serve_app.engine.vllm_adapter import audio_loader  # noqa: E402
from serve_app.engine.vllm_adapter.audio_loader import RefusedAudio, decoded  # noqa: E402
from serve_app.errors import ConfigError  # noqa: E402
from tests.core.test_audio import PADDING_S, RATE, SECONDS, by_ffmpeg, by_soundfile  # noqa: E402

MODEL_HZ = 16_000
MAX_HZ = 192_000
MAX_S = 60.0


def of_samples(rate: int, seconds: float, frame: int = 1000, channels: int = 1) -> bytes:
    """A Matroska file of 16-bit silence."""
    file = io.BytesIO()
    layout = "mono" if channels == 1 else f"{channels} channels"
    with av.open(file, "w", format="matroska") as container:
        stream = container.add_stream("pcm_s16le", rate=rate)
        stream.layout = layout
        for _ in range(round(rate * seconds / frame)):
            sound = av.AudioFrame.from_ndarray(
                np.zeros((1, frame * channels), dtype=np.int16), format="s16", layout=layout
            )
            sound.sample_rate = rate
            container.mux(stream.encode(sound))
        container.mux(stream.encode(None))
    return file.getvalue()


def seconds_of(data: bytes, rate: int | None = MODEL_HZ, max_s: float = MAX_S) -> float:
    samples, found = decoded(data, rate, MAX_HZ, max_s)
    assert samples.ndim == 1
    return len(samples) / found


@pytest.mark.parametrize(
    "data",
    [
        by_soundfile("WAV", "PCM_16"),
        by_soundfile("FLAC"),
        by_soundfile("OGG", "OPUS"),
        by_soundfile("MP3"),
        by_ffmpeg("ipod", "aac"),
        by_ffmpeg("webm", "libopus"),
    ],
    ids=["wav", "flac", "opus", "mp3", "m4a", "webm"],
)
def test_a_file_of_each_container_is_as_long_as_it_is_at_the_rate_that_is_wanted(data: bytes) -> None:
    assert seconds_of(data) == pytest.approx(SECONDS, abs=PADDING_S)
    assert seconds_of(data, rate=None) == pytest.approx(SECONDS, abs=PADDING_S)


def test_a_tone_is_the_same_sound_in_either_library() -> None:
    import soundfile

    tone = np.sin(np.arange(RATE) * 2 * np.pi * 440 / RATE).astype(np.float32) / 2
    file = io.BytesIO()
    soundfile.write(file, tone, RATE, format="WAV", subtype="FLOAT")
    whole, rate = decoded(file.getvalue(), None, MAX_HZ, MAX_S)
    assert rate == RATE
    assert np.abs(whole - tone).max() < 1e-6
    resampled, _ = decoded(file.getvalue(), MODEL_HZ, MAX_HZ, MAX_S)
    assert np.sqrt(np.mean(resampled**2)) == pytest.approx(0.5 / np.sqrt(2), rel=0.01)


@pytest.mark.parametrize("rate", [1, MIN_HZ - 1])
def test_a_rate_that_resampling_would_multiply_is_refused_before_it_does(
    rate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(audio_loader.av, "AudioResampler")
    with pytest.raises(RefusedAudio, match="max_audio_hz"):
        decoded(of_samples(rate, 1.0, frame=1), MODEL_HZ, MAX_HZ, MAX_S)


def test_more_channels_frames_or_seconds_than_are_allowed_are_refused() -> None:
    with pytest.raises(RefusedAudio, match="channels"):
        decoded(of_samples(MODEL_HZ, 1.0, channels=MAX_CHANNELS + 1), MODEL_HZ, MAX_HZ, MAX_S)
    with pytest.raises(RefusedAudio, match="frames"):
        decoded(of_samples(MODEL_HZ, 0.2, frame=1), MODEL_HZ, MAX_HZ, MAX_S)
    with pytest.raises(RefusedAudio, match="max_audio_s"):
        seconds_of(of_samples(MODEL_HZ, 3.0), max_s=2.0)
    with pytest.raises(RefusedAudio, match="max_audio_s"):
        seconds_of(by_soundfile("FLAC"), max_s=2.0)
    with pytest.raises(RefusedAudio, match="max_audio_hz"):
        decoded(by_soundfile("FLAC"), MODEL_HZ, RATE - 1, MAX_S)


def test_ffmpeg_looks_for_no_other_format_than_that_of_the_magic(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str | None]()

    def recorded(file: io.BytesIO, mode: Literal["r"], format: str | None = None) -> Any:
        asked.append(format)
        return opened(file, mode=mode, format=format)

    opened = av.open
    monkeypatch.setattr(audio_loader.av, "open", recorded)
    session = b"\nv=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=audio 5004 RTP/AVP 0\n"
    for head in (EBML, bytes(4) + MP4):
        with pytest.raises(ValueError, match=r"no (audio|sound)"):
            seconds_of(head + session)
    assert asked == ["matroska", "mov"]


def lying(name: str) -> bytes:
    """A file that is longer than it claims to be."""
    if name == "adpcm":
        data = bytearray(by_soundfile("WAV", "IMA_ADPCM"))
        at = data.find(b"fmt ") + 16
        struct.pack_into("<I", data, at, struct.unpack_from("<I", data, at)[0] * 10)
        return bytes(data)
    if name == "ogg":
        data = bytearray(by_soundfile("OGG", "VORBIS"))
        page = data[data.rfind(b"OggS") :][:26] + b"\1\0"  # of another stream
        struct.pack_into("<q", page, 6, RATE // 2)
        return bytes(data + page)
    data = bytearray(by_ffmpeg("ipod", "aac"))
    at = data.find(b"mvhd") + 16  # units of a second, then their number
    struct.pack_into(">I", data, at + 4, struct.unpack_from(">I", data, at)[0] // 2)
    return bytes(data)


@pytest.mark.parametrize("name", ["adpcm", "ogg", "mp4"])
def test_a_file_that_is_longer_than_it_claims_is_refused(name: str) -> None:
    data = lying(name)
    facts = audio_facts(data)
    assert facts is not None
    assert facts.seconds is not None
    assert facts.seconds < 1
    with pytest.raises(RefusedAudio, match="more audio than its headers"):
        seconds_of(data)


def test_an_mp3_that_claims_few_frames_gives_no_more() -> None:
    data = bytearray(by_soundfile("MP3"))
    at = max(data.find(b"Xing"), data.find(b"Info"))
    struct.pack_into(">I", data, at + 8, 30)
    facts = audio_facts(bytes(data))
    assert facts is not None
    assert facts.seconds is not None
    assert seconds_of(bytes(data)) <= facts.seconds < 1


def test_vllm_s_own_callers_decode_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (media_audio, speech_serving):
        monkeypatch.setattr(module, "load_audio", module.load_audio)
    audio_loader.install(MAX_HZ, is_needed=True)
    audio_loader.install(MAX_HZ, is_needed=True)
    slow = of_samples(1, 10.0, frame=1)
    with pytest.raises(RefusedAudio):
        media_audio.AudioMediaIO().load_bytes(slow)
    with pytest.raises(RefusedAudio):
        speech_serving.load_audio(io.BytesIO(slow), sr=MODEL_HZ, mono=True, max_duration_s=60, max_decode_bytes=2**30)
    samples, rate = media_audio.AudioMediaIO().load_bytes(by_soundfile("WAV", "PCM_16"))
    assert len(samples) / rate == SECONDS


def test_a_vllm_that_decodes_in_another_way_hears_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(speech_serving, "load_audio")
    with pytest.raises(ConfigError, match="load_audio"):
        audio_loader.install(MAX_HZ, is_needed=True)
    audio_loader.install(MAX_HZ, is_needed=False)
    assert "load_audio" in caplog.text
