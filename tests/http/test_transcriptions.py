"""Transcriptions in the router: the form, the bounds of its file, what it is estimated at, and what refuses it."""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any

import httpx2
import openai
import pytest

from serve_app.core.audio import MAX_CHANNELS, MIN_HZ, TEXT_TOKENS_PER_S, TOKENS_PER_S
from serve_app.core.continuation import NotContinued
from serve_app.core.receipts import Receipt
from serve_app.types import Outcome
from tests.fakes.asgi_client import KEY, Client, Reply, ask, started
from tests.fakes.batches import FORM, form, part
from tests.fakes.engines import MODEL, FakeCluster, model, run, until
from tests.fakes.router import SOON_S

TRANSCRIPTIONS = "/v1/audio/transcriptions"
TRANSLATIONS = "/v1/audio/translations"
RATE = 16_000
SECONDS = 2


def wav(seconds: float = SECONDS, rate: int = RATE, channels: int = 1) -> bytes:
    size = round(seconds * rate) * channels * 2
    numbers = size + 36, b"WAVE", b"fmt ", 16, 1, channels, rate, rate * channels * 2, channels * 2, 16
    return b"RIFF" + struct.pack("<I4s4sIHHIIHH", *numbers) + b"data" + struct.pack("<I", size) + bytes(size)


def fields(**more: str) -> list[bytes]:
    return [part(name.replace("__", "[]"), value.encode()) for name, value in more.items()]


async def post(client: Client, *parts: bytes, content: bytes | None = None, path: str = TRANSCRIPTIONS) -> Reply:
    """A form with these parts behind the file."""
    file = part("file", wav() if content is None else content, "speech.wav")
    body = b"".join(form(file, part("model", MODEL.encode()), *parts))
    return await client.request("POST", path, body, FORM)


def sdk(client: Client) -> openai.AsyncOpenAI:
    transport = httpx2.AsyncClient(transport=httpx2.ASGITransport(client.edge))
    return openai.AsyncOpenAI(api_key=KEY, base_url="http://router/v1", http_client=transport, max_retries=0)


def hearing(**changes: Any) -> Any:
    return model(task="transcribe", **changes)


def kept(client: Client) -> list[Receipt]:
    """The receipts of a router, the oldest first."""
    parts = client.edge.parts
    return [*parts.receipts.kept.values()]


def test_the_official_sdk_gets_text_in_each_format_and_as_a_stream() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        async with sdk(client) as api:
            create = api.audio.transcriptions.create
            asked: dict[str, Any] = {"model": MODEL, "file": ("speech.wav", wav()), "language": "en"}
            whole = await create(**asked, prompt="names", temperature=0.2)
            assert len(whole.text.split()) == SECONDS * TEXT_TOKENS_PER_S
            assert whole.usage is not None
            assert whole.usage.to_dict() == {"type": "duration", "seconds": SECONDS}
            assert await create(**asked, response_format="text") == whole.text
            verbose = await create(**asked, response_format="verbose_json", timestamp_granularities=["segment"])
            assert (verbose.text, float(verbose.duration), verbose.language) == (whole.text, SECONDS, "en")
            events = [event async for event in await create(**asked, stream=True)]
            assert (
                "".join(event.delta for event in events if event.type == "transcript.text.delta").strip() == whole.text
            )
            assert events[-1].type == "transcript.text.done"
            assert events[-1].text.strip() == whole.text
            translated = await api.audio.translations.create(model=MODEL, file=("speech.wav", wav()))
            assert translated.text not in ("", whole.text)

    run(scenario, hearing())


@pytest.mark.parametrize(
    ("parts", "field"),
    [
        (fields(temperature="warm"), "temperature"),
        (fields(temperature="nan"), "temperature"),
        (fields(stream="perhaps"), "stream"),
        (fields(seed="1.5"), "seed"),
        (fields(response_format="srt"), "response_format"),
        (fields(response_format="csv"), "response_format"),
        (fields(stream="true", response_format="text"), "response_format"),
        (fields(timestamp_granularities__="segment"), "timestamp_granularities"),
        (fields(response_format="verbose_json", timestamp_granularities__="word"), "timestamp_granularities"),
        (fields(response_format="verbose_json", timestamp_granularities__="day"), "timestamp_granularities"),
        (fields(use_beam_search="true"), "use_beam_search"),
        (fields(n="2"), "n"),
        (fields(max_completion_tokens="few"), "max_completion_tokens"),
        (fields(priority="urgent"), "priority"),
        (fields(prompt="a" * 1025), "prompt"),
        ([part("file", wav(), "again.wav")], "file"),
    ],
)
def test_a_wrong_field_of_the_form_is_refused_by_name(parts: list[bytes], field: str) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        reply = await post(client, *parts)
        assert (reply.status, reply.error["param"]) == (400, field)
        assert field in reply.error["message"]
        assert client.engine_steps() == 0

    run(scenario, hearing())


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"no sound", "is no audio"),
        (wav()[:20], "is no audio"),
        (wav(seconds=11), "11 seconds, 10 are allowed (models[].max_audio_s)"),
        (wav(seconds=0.1, rate=48_001), "48001 samples a second, 48000 are allowed (models[].max_audio_hz)"),
        (wav(rate=MIN_HZ - 1), f"{MIN_HZ - 1} samples a second, at least {MIN_HZ} are needed"),
        (b"fLaC" + bytes(14) + struct.pack(">Q", RATE << 44) + bytes(100), "a FLAC file that does not say how long"),
        (wav(seconds=0.1, channels=MAX_CHANNELS + 1), f"{MAX_CHANNELS} are allowed"),
        (wav(seconds=9, rate=48_000, channels=3), "bytes once it is decoded"),
    ],
)
def test_a_file_beyond_the_model_s_bounds_is_refused_before_an_engine_has_it(content: bytes, reason: str) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        reply = await post(client, content=content)
        assert (reply.status, reply.error["param"]) == (400, "file")
        assert reason in reply.error["message"]
        assert client.engine_steps() == 0
        assert client.at_rest()

    run(scenario, hearing(max_audio_s=10, max_audio_hz=48_000))


def test_a_file_with_more_bytes_than_may_arrive_is_refused_by_the_setting_s_name() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1", http={"max_audio_bytes": 1024})
        reply = await post(client)
        assert (reply.status, reply.error["param"]) == (413, "file")
        assert "http.max_audio_bytes" in reply.error["message"]

    run(scenario, hearing())


def test_a_form_without_a_file_or_of_json_is_refused() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        reply = await client.request("POST", TRANSCRIPTIONS, b"".join(form(part("model", MODEL.encode()))), FORM)
        assert (reply.status, reply.error["param"]) == (400, "file")
        text = b"".join(form(part("file", b"a text"), part("model", MODEL.encode())))
        reply = await client.request("POST", TRANSCRIPTIONS, text, FORM)
        assert (reply.status, reply.error["param"]) == (400, "file")
        reply = await client.post({"model": MODEL}, path=TRANSCRIPTIONS)
        assert (reply.status, reply.error["param"]) == (415, "Content-Type")

    run(scenario, hearing())


def test_audio_is_estimated_and_charged_by_its_seconds() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        assert (await post(client, content=wav(seconds=65))).status == 200
        (receipt,) = kept(client)
        measure = receipt.trace.measure
        assert (measure.sequences, measure.slots) == (3, 2), "three clips of 30 s, on a replica of two slots"
        assert measure.cost.prompt_tokens == 65 * TOKENS_PER_S
        assert measure.cost.output_tokens == 65 * TEXT_TOKENS_PER_S
        assert (receipt.outcome, receipt.prompt_tokens) == (Outcome.OK, 65 * TOKENS_PER_S)
        assert (await post(client, *fields(stream="true"), content=wav(seconds=65))).status == 200
        streamed = kept(client)[-1].trace.measure
        assert (streamed.sequences, streamed.slots, streamed.cost) == (3, 1, measure.cost), "one clip at a time"
        assert (await post(client, *fields(max_completion_tokens="5"))).status == 200
        bounded = kept(client)[-1]
        measure = bounded.trace.measure
        assert (measure.cost.output_tokens, bounded.output_tokens) == (5, 5)
        assert client.at_rest()

    run(scenario, hearing(slots=2))


def test_a_transcription_has_class_session_and_deadline_as_a_chat_has() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        body = b"".join(form(part("file", wav(), "a.wav"), part("model", MODEL.encode()), *fields(priority="low")))
        headers = {**FORM, "X-Session-Id": "s-1", "X-Deadline-Ms": "60000", "Idempotency-Key": "k"}
        first = await client.request("POST", TRANSCRIPTIONS, body, headers)
        again = await client.request("POST", TRANSCRIPTIONS, body, headers)
        assert (first.status, again.status) == (200, 200)
        assert (first.body, again.headers["x-idempotent-replay"]) == (again.body, "true")
        receipt = kept(client)[0]
        assert receipt.request_class.label == "low"
        other = b"".join(form(part("file", wav(3), "a.wav"), part("model", MODEL.encode()), *fields(priority="low")))
        reply = await client.request("POST", TRANSCRIPTIONS, other, headers)
        assert reply.error["code"] == "idempotency_key_reused", "the file counts"

    run(scenario, hearing())


def test_a_class_in_a_form_is_a_name_or_a_number() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        for priority in ("0", "low"):
            assert (await post(client, *fields(priority=priority))).status == 200
            assert kept(client)[-1].request_class.label == "low"
        reply = await post(client, *fields(priority="4"))
        assert (reply.status, reply.error["param"]) == (400, "priority")

    run(scenario, hearing())


def test_a_model_that_does_not_hear_refuses_audio_and_one_that_hears_refuses_chats() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        hears = client.edge.parts.models[MODEL].settings.task == "transcribe"
        for path in (TRANSCRIPTIONS, TRANSLATIONS):
            reply = await post(client, path=path)
            assert reply.status == (200 if hears else 400)
            assert hears or reply.error["param"] == "model"
        assert (await client.post(ask("a", stream=False))).status == (400 if hears else 200)

    run(scenario, hearing())
    run(scenario, model())


def test_a_whole_transcription_is_repeated_when_its_engine_is_lost_and_a_stream_ends_with_an_error() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1", "r2")
        for stream in (False, True):
            reply = Reply()
            file = part("file", wav(30), "a.wav")
            body = b"".join(form(file, part("model", MODEL.encode()), *fields(stream=str(stream).lower())))
            posting = asyncio.create_task(client.request("POST", TRANSCRIPTIONS, body, FORM, reply=reply))
            busy = await until_busy(cluster, reply, stream)
            cluster.kill(busy)
            await posting
            assert reply.status == 200
            if stream:
                assert "error" in reply.events[-1]
                receipt = kept(client)[-1]
                assert receipt.trace.not_continued is NotContinued.REQUEST
            else:
                assert len(json.loads(reply.body)["text"].split()) == 30 * TEXT_TOKENS_PER_S
            await cluster.add(f"{busy}-again")

    run(scenario, hearing(step_s=0.01))


async def until_busy(cluster: FakeCluster, reply: Reply, stream: bool) -> str:
    """The replica that runs the request, once it has begun to."""
    found = list[str]()

    def looks() -> bool:
        found[:] = [name for name, one in cluster.replicas.items() if one.load.running and not one.dead]
        return bool(found) and (bool(reply.events) if stream and reply.chunks else not stream)

    await until(looks, SOON_S, "an engine runs it")
    return found[0]
