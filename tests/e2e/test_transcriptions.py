"""Transcriptions of real vLLM are the text that the `transformers` library makes of the same sound."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import one_engine
from tests.e2e.small_models import CLIP_S, write_whisper
from tests.e2e.speech import TOKENS, Listener, samples, wav
from tests.requires import requires

SETTINGS = {
    "task": "transcribe",
    "dtype": "float32",
    "max_model_len": TOKENS,
    "kv_cache_gb": 0.25,
    "enforce_eager": True,
}
TIMES = re.compile(r"<\|\d+\.\d\d\|>")  # vLLM writes them, the library does not
TONES = (220, 440, 1000)


def asked(operation: str, content: bytes, **fields: Any) -> tuple[str, dict[str, Any], str]:
    return operation, {"file": base64.b64encode(content).decode(), "language": "en"} | fields, "a"


def plain(text: str) -> str:
    return TIMES.sub("", text)


@pytest.mark.long
def test_a_transcription_is_what_the_library_hears_in_each_format(tmp_path: Path) -> None:
    requires("vllm")
    write_whisper(tmp_path / "whisper")
    tones = [samples(hertz, CLIP_S) for hertz in TONES]
    short = samples(TONES[0], CLIP_S / 2)
    whole = wav(*tones)
    clip = wav(short)
    order = {
        "settings": {"name": "w", "path": str(tmp_path / "whisper")} | SETTINGS,
        "asked": [
            asked("transcription", clip),
            asked("transcription", clip, response_format="text"),
            asked("transcription", clip, response_format="verbose_json"),
            asked("translation", clip),
            asked("transcription", clip, stream=True),
            asked("transcription", whole),
            asked("transcription", whole, stream=True, stream_include_usage=True),
            asked("transcription", clip, language="xx"),
            asked("transcription", b"RIFF" + bytes(40)),
            ("chat", {"messages": [{"role": "user", "content": "a"}]}, "a"),
        ],
    }
    answer = one_engine.run_alone(order)
    answered = answer["answered"]
    assert [one[0] for one in answered] == [200] * 7 + [400] * 3
    listener = Listener(tmp_path / "whisper")
    text = listener.text(short)
    in_json, as_text, verbose, translated, streamed, long, long_streamed, language, noise, chat = answered
    assert plain(in_json[1]["text"]) == text
    assert in_json[1]["usage"] == {"type": "duration", "seconds": 1}
    assert plain(as_text[1]) == text
    assert (verbose[1]["duration"], verbose[1]["language"]) == (1.0, "en")
    assert plain(translated[1]["text"]) == listener.text(short, task="translate")
    assert plain(text_of(streamed[1])) == text
    assert plain(long[1]["text"]) == plain(text_of(long_streamed[1]))
    assert len(long[1]["text"]) > len(text)
    assert in_json[2] > 100  # prompt tokens of one second of audio, as vLLM counts them
    assert [one[1]["error"]["param"] for one in (language, noise, chat)] == ["language", "file", "model"]
    assert chat[1]["error"]["message"] == "this model does not support chat completions"


def text_of(events: str) -> str:
    """The text of a stream by OpenAI's own fields, which vLLM's agree with."""
    found = [json.loads(event.removeprefix("data: ")) for event in events.split("\n\n") if event.startswith("data: {")]
    added = "".join(one["delta"] for one in found if one.get("type") == "transcript.text.delta")
    assert added == "".join(choice["delta"]["content"] for one in found for choice in one["choices"])
    (done,) = [one["text"] for one in found if one.get("type") == "transcript.text.done"]
    assert done == added
    assert events.endswith("data: [DONE]\n\n")
    return added
