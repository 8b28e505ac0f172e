"""Sounds for tests, and the text that the `transformers` library's Whisper makes of them."""

from __future__ import annotations

import io
import math
import struct
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RATE = 16_000
PEAK = 16_000  # of 32,767
TOKENS = 128  # of a text with its marks: `write_whisper`'s longest


def samples(hertz: float, seconds: float) -> list[int]:
    """A tone, as integers of 16 bits."""
    return [round(PEAK * math.sin(2 * math.pi * hertz * at / RATE)) for at in range(round(RATE * seconds))]


def wav(*tones: list[int], rate: int = RATE) -> bytes:
    """A file with these tones, one after the other."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(rate)
        for tone in tones:
            out.writeframes(struct.pack(f"<{len(tone)}h", *tone))
    return file.getvalue()


class Listener:
    """The library's own model, greedy, float32, on one thread."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import WhisperForConditionalGeneration, WhisperProcessor

        torch.set_num_threads(1)
        self._torch = torch
        self._processor: Any = WhisperProcessor.from_pretrained(folder)
        self._model: Any = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()

    def text(self, tone: Sequence[int], *, task: str = "transcribe", language: str = "en") -> str:
        """What it hears in one clip."""
        import numpy as np

        sound = np.asarray(tone, dtype=np.float32) / 2**15
        features = self._processor(audio=sound, sampling_rate=RATE, return_tensors="pt").input_features
        tokenizer = self._processor.tokenizer
        marks = ("startoftranscript", language, task, "notimestamps")
        ids = list(tokenizer.convert_tokens_to_ids([f"<|{name}|>" for name in marks]))
        with self._torch.inference_mode():
            states = self._model.model.encoder(features)
            while len(ids) < TOKENS and ids[-1] != tokenizer.eos_token_id:
                tokens = self._torch.tensor([ids])
                ids.append(int(self._model(encoder_outputs=states, decoder_input_ids=tokens).logits[0, -1].argmax()))
        return str(tokenizer.decode(ids[len(marks) :], skip_special_tokens=True, decode_with_timestamps=False))
