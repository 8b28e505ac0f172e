"""`serve-app calibrate`: measure a running engine, and write its profile for `simulate`."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console

from autoscaling.simulator import DecodeSample, EngineProfile, PrefillSample, StepModel, fitted
from serve_app.cli.chat import events
from serve_app.cli.command_line import EndpointOptions
from serve_app.cli.endpoint import Endpoint, request, session
from serve_app.cli.layout import say
from serve_app.cli.operators import fetch_soon
from serve_app.cli.progress import Progress
from serve_app.errors import BadRequest

COMPLETIONS = "/v1/completions"
LENGTHS = (128, 512, 1024, 2048)
COUNTS = (1, 2, 4, 8, 16, 32, 64)  # more would measure this client
REPEATS = 3
SHORT_TOKENS = 16
ANSWER_TOKENS = 128  # so that all run at once for most of it
IDS = (100, 999)  # of the tokens of a prompt: every vocabulary has them; drawn, so that no prefix was ever computed


@dataclass(frozen=True, slots=True)
class CalibratedEngine:
    """The one engine that runs a model, as the quota actor knows it."""

    slots: int
    kv_tokens: int
    gpus: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """Moments of a request: when it was sent, and when each event with tokens came; `produced`: tokens in all."""

    sent_s: float
    event_s: Sequence[float]
    produced: int

    @property
    def first_token_s(self) -> float:
        return self.event_s[0] - self.sent_s

    def gap_s(self, begin_s: float, end_s: float) -> float:
        """Between two tokens, in this span; in the whole answer where the span has less than two events."""
        inside = [moment for moment in self.event_s if begin_s <= moment <= end_s]
        measured = inside if len(inside) > 1 else self.event_s
        tokens = max(1.0, (len(measured) - 1) * self.produced / len(self.event_s))
        return (measured[-1] - measured[0]) / tokens


def calibrate(
    at: EndpointOptions,
    model: Annotated[str, typer.Argument(help="The model, with one replica that nobody else uses.")],
    out: Annotated[Path, typer.Option("--out", help="Write the profile there, such as my.json.")],
    start_s: Annotated[
        float, typer.Option("--start-s", min=0.0, help="How long its start takes; the logs say it.")
    ] = 60.0,
    gpu_hour_price: Annotated[float, typer.Option("--gpu-hour-price", min=0.0, help="Of one GPU.")] = 0.0,
    longest: Annotated[
        int, typer.Option("--longest", min=256, help="Tokens of the longest prompt that is measured.")
    ] = LENGTHS[-1],
) -> None:
    """Measure a running engine for some minutes, and write its profile for `simulate --profile`."""
    endpoint = at.endpoint()
    engine = engine_of(fetch_soon(endpoint, "GET", "/admin/quota"), model)
    errors = Console(stderr=True)
    with Progress(errors) as progress:
        progress.begin("prompts alone")
        prefills = list(_prefills(endpoint, model, [each for each in LENGTHS if each <= longest], progress))
        progress.begin("answers at once")
        decodes = list(_decodes(endpoint, model, engine, longest, progress))
    found = fitted(prefills, decodes)
    profile = profile_of(model, engine, found, start_s, gpu_hour_price)
    try:
        out.write_text(json.dumps(asdict(profile), indent=1) + "\n")
    except OSError as error:
        raise BadRequest(f"--out {out}: {error.strerror}", param="--out") from None
    console = Console()
    say(console, f"step {found.step_s * 1e3:.2f} ms, {found.sequence_s * 1e6:.1f} us a sequence")
    say(
        console,
        f"prefill {found.prefill_tokens_per_s:,.0f} tokens/s; {engine.slots} slots, {engine.kv_tokens} KV tokens",
    )
    say(console, f"the model is off its own measurements by {found.error:.1%} in the median; written to {out}")


def engine_of(ledger: Mapping[str, Any], model: str) -> CalibratedEngine:
    """The one engine of a model. Raises BadRequest: none or several run."""
    running = [one for one in ledger["engines"] if one["model"] == model and one["slots"]]
    if len(running) != 1:
        raise BadRequest(
            f"{len(running)} engines of {model!r} run; calibrate needs one: set min_replicas and max_replicas to 1",
            param="model",
        )
    (engine,) = running
    gpus = max(1, len(engine["devices"]))
    return CalibratedEngine(engine["slots"], engine["kv_tokens"], gpus, round(engine["granted_bytes"] / gpus))


def profile_of(
    model: str, engine: CalibratedEngine, found: StepModel, start_s: float, gpu_hour_price: float
) -> EngineProfile:
    """The profile of what was fitted."""
    return EngineProfile(
        model,
        f"measured: serve-app calibrate {model}",
        slots=engine.slots,
        kv_tokens=engine.kv_tokens,
        step_s=found.step_s,
        sequence_s=found.sequence_s,
        kv_token_s=found.kv_token_s,
        prefill_tokens_per_s=found.prefill_tokens_per_s,
        start_s=start_s,
        gpus=engine.gpus,
        memory_bytes=engine.memory_bytes,
        gpu_hour_price=gpu_hour_price,
    )


def _prefills(endpoint: Endpoint, model: str, lengths: Sequence[int], progress: Progress) -> Iterator[PrefillSample]:
    _answer(endpoint, model, SHORT_TOKENS, 1)  # what the first request of all takes is no prefill
    for length, repeat in itertools.product(lengths, range(REPEATS)):
        progress.detail(f"{length} tokens, {repeat + 1} of {REPEATS}")
        yield PrefillSample(length, _answer(endpoint, model, length, 1).first_token_s)


def _decodes(
    endpoint: Endpoint, model: str, engine: CalibratedEngine, longest: int, progress: Progress
) -> Iterator[DecodeSample]:
    counts = [count for count in COUNTS if count <= engine.slots]
    for prompt in (SHORT_TOKENS, longest // 2):
        for count in counts:
            if count * (prompt + ANSWER_TOKENS) > engine.kv_tokens:
                continue  # they would not run at once
            progress.detail(f"{count} at once, prompts of {prompt} tokens")
            with ThreadPoolExecutor(count) as pool:
                asked = [pool.submit(_answer, endpoint, model, prompt, ANSWER_TOKENS) for _ in range(count)]
                answers = [one.result() for one in asked]
            yield DecodeSample(count, prompt + ANSWER_TOKENS / 2, gap_at_once(answers))


def gap_at_once(answers: Sequence[TimedAnswer]) -> float:
    """Seconds between two tokens of one, while all run: reading the prompts of the others is no part of it."""
    begin_s = max(answer.event_s[0] for answer in answers)
    end_s = min(answer.event_s[-1] for answer in answers)
    return median(answer.gap_s(begin_s, end_s) for answer in answers)


def _answer(endpoint: Endpoint, model: str, prompt_tokens: int, tokens: int) -> TimedAnswer:
    """Stream one answer. Raises ServeAppError: it was refused, or broke off."""
    draw = random.SystemRandom()
    body = {
        "model": model,
        "prompt": [draw.randint(*IDS) for _ in range(prompt_tokens)],
        "max_tokens": tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "temperature": 0,
    }
    with session(endpoint) as http:
        sent_s = time.perf_counter()
        response = request(http, endpoint, "POST", COMPLETIONS, json=body, stream=True)
        event_s = list[float]()
        produced = 0
        for event in events(response.iter_lines(decode_unicode=True)):
            if event.get("choices"):
                event_s.append(time.perf_counter())
            produced = (event.get("usage") or {}).get("completion_tokens", produced)
    if not event_s or produced < tokens:
        raise BadRequest(f"an answer has {produced} tokens, not {tokens}: its engine bounds them", param="max_tokens")
    return TimedAnswer(sent_s, event_s, produced)
