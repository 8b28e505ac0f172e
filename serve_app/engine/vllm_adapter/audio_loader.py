"""Decodes audio files in place of vLLM's own loader, of transcriptions and of content parts: as one channel, by one
library for each container.

vLLM has FFmpeg try all of its formats, some of which open files and connections that the content names, and compares
the result with its bounds after a resampling that multiplies its size.

Invariant: FFmpeg reads Matroska and MP4 alone, and libsndfile the rest. Nothing is resampled before its rate, channels
and length are compared with the bounds, and no more is decoded than a file's headers claim, or its size where they
claim nothing.
"""

from __future__ import annotations

import functools
import io
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np
import soundfile
from vllm.entrypoints.speech_to_text.base import serving as speech_serving
from vllm.multimodal.audio import resample_audio_pyav
from vllm.multimodal.media import audio as media_audio

from serve_app.core.audio import EBML, MAX_CHANNELS, MIN_HZ, MP4, claimed_s, most_s
from serve_app.engine.vllm_adapter.private_names import AUDIO_NAMES, missing
from serve_app.engine.vllm_adapter.wrapped import wrap
from serve_app.errors import ConfigError

logger = logging.getLogger("ray.serve")

BLOCK_SAMPLES = 65_536  # that libsndfile decodes at once
MAX_FRAMES_PER_S = 1000  # Opus has 400; a frame takes as long as its bookkeeping, however short it is
_LOADER = "load_audio"
_MATROSKA = "matroska"  # FFmpeg's names of what reads the containers
_MP4 = "mov"

Samples = np.ndarray[Any, np.dtype[np.float32]]


class RefusedAudio(ValueError):
    """A file is beyond the bounds; the message has the reason for the client."""


def install(max_hz: int, is_needed: bool) -> None:
    """Decode audio in this process so.

    Args:
        max_hz: `models[].max_audio_hz`.
        is_needed: whether the model hears by itself.

    Raises:
        ConfigError: it is needed, and this vLLM decodes in another way, which nothing here would bound.
    """
    if lacking := missing(AUDIO_NAMES):
        if is_needed:
            raise ConfigError(f"this vLLM has changed how it decodes audio: {lacking}", param="models.task")
        logger.warning("vLLM has changed and lacks %s; audio in content parts is decoded within vLLM's bounds", lacking)
        return
    for module in (media_audio, speech_serving):
        wrap(module, _LOADER, functools.partial(_loaded, max_hz))


def _loaded(
    max_hz: int,
    _original: Callable[..., Any],
    path: io.BytesIO | Path | str,
    *,
    sr: float | None = None,
    max_duration_s: float | None = None,
    **_others: Any,
) -> tuple[Samples, int]:
    data = path.getvalue() if isinstance(path, io.BytesIO) else Path(path).read_bytes()
    return decoded(data, None if sr is None else int(sr), max_hz, max_duration_s or float("inf"))


def decoded(data: bytes, rate: int | None, max_hz: int, max_s: float) -> tuple[Samples, int]:
    """The samples of a file, its channels mixed to one, and their rate.

    Args:
        rate: that is wanted, in hertz; None: the file's own.

    Raises:
        RefusedAudio: it is beyond these bounds. ValueError: it cannot be read.
    """
    bounds = _Bounds(max_hz, min(most_s(claimed_s(data, max_s)), max_s))
    try:
        if data[:4] == EBML or data[4:8] == MP4:
            return _by_ffmpeg(data, _MATROSKA if data[:4] == EBML else _MP4, rate, bounds)
        return _by_libsndfile(data, rate, bounds)
    except (soundfile.LibsndfileError, av.error.FFmpegError) as error:
        raise ValueError("no audio can be read") from error


@dataclass(frozen=True, slots=True)
class _Bounds:
    max_hz: int
    max_s: float

    def check_form(self, rate: int, channels: int) -> None:
        if not MIN_HZ <= rate <= self.max_hz:
            raise RefusedAudio(
                f"it has {rate} samples a second, {MIN_HZ} to {self.max_hz} are allowed (models[].max_audio_hz)"
            )
        if not 1 <= channels <= MAX_CHANNELS:
            raise RefusedAudio(f"it has {channels} channels, 1 to {MAX_CHANNELS} are allowed")

    def check_length(self, seconds: float) -> None:
        if seconds > self.max_s:
            raise RefusedAudio(
                "it holds more audio than its headers or its size say, or than is allowed (models[].max_audio_s)"
            )


def _by_libsndfile(data: bytes, rate: int | None, bounds: _Bounds) -> tuple[Samples, int]:
    pieces = list[Samples]()
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        own = file.samplerate
        bounds.check_form(own, file.channels)
        samples = 0
        while len(block := file.read(BLOCK_SAMPLES, dtype="float32", always_2d=True)):
            samples += len(block)
            bounds.check_length(samples / own)
            pieces.append(block.mean(axis=1))
    whole = _joined(pieces)
    if rate is None or rate == own:
        return whole, own
    return resample_audio_pyav(whole, orig_sr=own, target_sr=rate), rate


def _by_ffmpeg(data: bytes, container_format: str, rate: int | None, bounds: _Bounds) -> tuple[Samples, int]:
    with av.open(io.BytesIO(data), mode="r", format=container_format) as container:
        if not container.streams.audio:
            raise RefusedAudio("there is no sound in it")
        stream = container.streams.audio[0]
        bounds.check_form(stream.rate or 0, stream.channels)
        wanted = rate or stream.rate
        resampler = av.AudioResampler(format="fltp", layout="mono", rate=wanted)
        frames = _checked(container.decode(stream), bounds)
        pieces = [made.to_ndarray()[0] for frame in frames for made in resampler.resample(frame)]
        if pieces:
            pieces += [made.to_ndarray()[0] for made in resampler.resample(None)]
    return _joined(pieces), wanted


def _checked(frames: Iterator[av.AudioFrame], bounds: _Bounds) -> Iterator[av.AudioFrame]:
    seconds = 0.0
    for number, frame in enumerate(frames):
        bounds.check_form(frame.sample_rate, frame.layout.nb_channels)
        seconds += frame.samples / frame.sample_rate
        bounds.check_length(seconds)
        if number > MAX_FRAMES_PER_S * (seconds + 1):
            raise RefusedAudio(f"it has more than {MAX_FRAMES_PER_S} frames a second")
        yield frame


def _joined(pieces: list[Samples]) -> Samples:
    if not sum(len(piece) for piece in pieces):
        raise ValueError("no audio was found")
    return np.concatenate(pieces)
