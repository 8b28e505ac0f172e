"""What is changed of vLLM's transcriptions: their events, and the segments of a clip without a text."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.requires import requires

requires("vllm")

from starlette.datastructures import State  # noqa: E402
from vllm.entrypoints.speech_to_text.base.serving import SpeechToTextBaseServing  # noqa: E402

from serve_app.engine.vllm_adapter import transcriptions  # noqa: E402
from serve_app.transport import Submit  # noqa: E402
from serve_app.types import Operation  # noqa: E402

END = 7
DELTA = 'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
ERROR = 'data: {"error": {"message": "lost"}}\n\n'
DONE = "data: [DONE]\n\n"


def events(*made: str) -> str:
    async def create_transcription(*_: Any) -> AsyncGenerator[str, None]:
        async def each() -> AsyncGenerator[str, None]:
            for text in made:
                yield text

        return each()

    async def answered() -> str:
        submit = Submit(1, "one", Operation.TRANSCRIPTION, {"file": b"", "stream": True})
        request: Any = SimpleNamespace(language=None)
        serving = SimpleNamespace(create_transcription=create_transcription)
        stream: Any = await transcriptions.answer(serving, submit, request, SimpleNamespace())  # type: ignore[arg-type]
        return "".join([text async for text in stream])

    return asyncio.run(answered())


def test_a_whole_text_ends_a_stream_and_none_follows_an_error() -> None:
    assert '"transcript.text.done","text":"a"' in events(DELTA, DONE)
    failed = events(DELTA, ERROR, DONE)
    assert failed.endswith(ERROR + DONE)
    assert "transcript.text.done" not in failed


def test_a_client_of_vllm_reads_the_text_from_the_first_choice_of_every_event() -> None:
    usage = '"usage":{"total_tokens":3}'
    counted = DELTA.replace('{"choices"', f'{{{usage},"choices"', 1)
    *made, done, nothing = events(counted, DONE).split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in made]
    assert (f"{done}\n\n", nothing) == (DONE, "")
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == "a"
    assert all(chunk["usage"]["total_tokens"] == 3 for chunk in chunks)


@pytest.mark.parametrize("tokens", [(END,), (END, END), ()])
def test_a_clip_without_a_text_has_no_segment(tokens: tuple[int, ...]) -> None:
    serving: Any = SimpleNamespace(tokenizer=SimpleNamespace(eos_token_id=END, encode=lambda *_, **__: [100]))
    serving._decode_and_chunk_speech_async = serving._preprocess_speech_to_text = None
    serving._get_verbose_segments = functools.partial(SpeechToTextBaseServing._get_verbose_segments, serving)
    named = {"log_probs": [], "request": None, "segment_class": dict, "start_time": 0.0}
    if tokens != (END, END):
        with pytest.raises(IndexError):
            serving._get_verbose_segments(tokens=tokens, **named)
    transcriptions.install(State({"openai_serving_transcription": serving}))
    assert serving._get_verbose_segments(tokens=tokens, **named) == []
