"""`serve-app calibrate` with a server of the tests, which answers as slowly as an engine."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from serve_app.cli.calibrate import TimedAnswer, gap_at_once
from serve_app.cli.simulate.profiles import profile_of
from tests.cli.test_chat import KEY, reply, run, serve  # noqa: F401 - fixtures
from tests.requires import requires

requires("linux")

Run = Callable[..., Result]
Serve = Callable[[Callable[[BaseHTTPRequestHandler, Any], None]], str]
ENGINE = {
    "model": "chat",
    "slots": 4,
    "kv_tokens": 8192,
    "devices": {"n/0": 20, "n/1": 20},
    "granted_bytes": 40_000_000_000,
}
PROMPT_TOKEN_S = 2e-4
STEP_S = 1e-3
SEQUENCE_S = 1e-3


class SlowEngine:
    """Answers at `STEP_S`, and `SEQUENCE_S` for each that runs, after `PROMPT_TOKEN_S` a prompt token.

    Args:
        engines: those of the ledger.
        shorter: tokens that each answer lacks.
    """

    def __init__(self, engines: list[dict[str, Any]], shorter: int = 0) -> None:
        self.engines = engines
        self.prompts: list[tuple[int, ...]] = []
        self._shorter = shorter
        self._running = 0
        self._lock = threading.Lock()

    def __call__(self, handler: BaseHTTPRequestHandler, body: Any) -> None:
        if body is None:
            reply(handler, 200, json.dumps({"engines": self.engines}).encode())
            return
        with self._lock:
            self._running += 1
            self.prompts.append(tuple(body["prompt"]))
        self._stream(handler, body)
        with self._lock:
            self._running -= 1

    def _stream(self, handler: BaseHTTPRequestHandler, body: Any) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.end_headers()
        tokens = body["max_tokens"] - self._shorter
        time.sleep(PROMPT_TOKEN_S * len(body["prompt"]))  # the engine reads: 0.1 s at most
        for number in range(tokens):
            time.sleep(0.0 if number == 0 else STEP_S + self._running * SEQUENCE_S)  # its step: 5 ms
            self._send(handler, {"choices": [{"text": "a"}]})
        self._send(handler, {"choices": [], "usage": {"completion_tokens": tokens}})
        handler.wfile.write(b"data: [DONE]\n\n")

    @staticmethod
    def _send(handler: BaseHTTPRequestHandler, event: Any) -> None:
        handler.wfile.write(f"data: {json.dumps(event)}\n\n".encode())


def calibrate(run: Run, url: str, out: Path, *more: str) -> Result:  # noqa: F811
    return run("calibrate", "chat", "--out", str(out), "--url", url, "--key", KEY, "--longest", "512", *more)


def test_what_was_measured_is_a_profile_that_can_be_simulated(run: Run, serve: Serve, tmp_path: Path) -> None:  # noqa: F811
    engine = SlowEngine([ENGINE, ENGINE | {"model": "other"}])
    out = tmp_path / "my.json"
    done = calibrate(run, serve(engine), out, "--start-s", "33", "--gpu-hour-price", "2.5")
    assert done.exit_code == 0, done.output
    assert "in the median" in done.output
    profile = profile_of(out.read_text(), str(out))
    assert (profile.slots, profile.kv_tokens, profile.gpus, profile.memory_bytes) == (4, 8192, 2, 20_000_000_000)
    assert (profile.start_s, profile.gpu_hour_price) == (33.0, 2.5)
    assert 0 < profile.prefill_tokens_per_s < 1.5 / PROMPT_TOKEN_S, "sleeping takes longer at most"
    assert profile.step_s + 4 * profile.sequence_s > STEP_S + 4 * SEQUENCE_S * 0.5
    prompts = [prompt for prompt in engine.prompts if len(prompt) > 1]
    assert len(set(prompts)) == len(prompts), "one that was computed before would cost nothing"


@pytest.mark.parametrize(("engines", "count"), [([], 0), ([ENGINE, ENGINE], 2), ([ENGINE | {"slots": None}], 0)])
def test_without_exactly_one_engine_nothing_is_measured(
    run: Run,  # noqa: F811
    serve: Serve,  # noqa: F811
    tmp_path: Path,
    engines: list[dict[str, Any]],
    count: int,
) -> None:
    refused = calibrate(run, serve(SlowEngine(engines)), tmp_path / "my.json")
    assert refused.exit_code == 2
    assert f"{count} engines of 'chat' run; calibrate needs one" in refused.output
    assert list(tmp_path.glob("*.json")) == []


def test_an_engine_that_bounds_its_answers_is_named(run: Run, serve: Serve, tmp_path: Path) -> None:  # noqa: F811
    refused = calibrate(run, serve(SlowEngine([ENGINE], shorter=1)), tmp_path / "my.json")
    assert refused.exit_code == 2
    assert "an answer has 0 tokens, not 1" in refused.output


def test_a_gap_is_that_of_all_at_once_and_reading_the_prompts_of_others_is_no_part_of_it() -> None:
    early = TimedAnswer(0.0, [0.1, 0.6, 0.7, 0.8, 0.9], 5)  # the prompt of the other took half a second
    late = TimedAnswer(0.0, [0.6, 0.7, 0.8, 0.9, 0.95], 5)  # and is alone at the end
    assert gap_at_once([early, late]) == pytest.approx(0.1)
    assert early.first_token_s == 0.1


def test_an_event_with_several_tokens_has_several_gaps() -> None:
    assert TimedAnswer(0.0, [0.2, 0.4, 0.6], 6).gap_s(0.0, 1.0) == pytest.approx(0.1)


def test_of_answers_that_never_ran_at_once_the_gap_is_that_of_each() -> None:
    answers = [TimedAnswer(0.0, [0.1, 0.2], 2), TimedAnswer(0.0, [0.5, 0.6], 2)]
    assert gap_at_once(answers) == pytest.approx(0.1)
    assert gap_at_once([TimedAnswer(0.0, [0.1], 1)]) == 0.0
