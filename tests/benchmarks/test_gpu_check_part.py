"""The flow of `benchmarks.gpu_check` over servers that are played here: what is asked, in which order, and what a
failure leaves of the rest."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from rich.console import Console

from benchmarks.common.arms import OURS, VLLM, Arm, BenchmarkError
from benchmarks.gpu_check import checks, machine, part, plan
from benchmarks.gpu_check.checks import Outcome, Result
from benchmarks.gpu_check.client import Client
from benchmarks.gpu_check.machine import Gpu
from serve_app.engine.start import model_lookup

GB = 10**9
BLOCK = 16
KV_TOKENS = 4 * GB // (BLOCK * 256) * BLOCK
CONFIG = {"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 64}  # 256 bytes a token
TITLE = "ray::ServeReplica:serve_app:engine-checked"
STREAMED_BEFORE_DEATH = 40  # tokens of a stream whose engine dies
PIECE = 4  # tokens of an event
ENDS_S = 20.0  # a process that was killed is gone in milliseconds
LOG = f"""1 INFO config: enforce_eager=False, 'cudagraph_mode': <CUDAGraphMode.FULL: 2>
1 INFO GPU KV cache size: {KV_TOKENS:,} tokens, Maximum concurrency for 2,048 tokens per request: 1.00x
1 INFO Graph capturing finished in 4 secs, took 0.50 GiB
"""
QUOTA = {
    "devices": [{"device": "node/0", "granted_bytes": 8 * GB, "reserved_bytes": 2 * GB}],
    "engines": [
        {"replica": "a", "granted_bytes": 8 * GB, "measured_bytes": 6 * GB, "kv_tokens": KV_TOKENS},
    ],
}


def next_token(prefix: Sequence[int], seed: int) -> int:
    return (sum(prefix) * 31 + len(prefix) + seed) % 97


@dataclass
class Server:
    """Answers as an engine would, whose tokens depend on all that came before and on a seed. `engine` is the process
    that serves: a stream as long as the kill's ends with an error when it has died."""

    engine: subprocess.Popen[bytes]
    seed: int = 0
    asked: list[dict[str, Any]] = field(default_factory=list)

    def answer(self, body: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        """Token ids of prompt and answer."""
        prompt = body["prompt"]
        ids = [len(word) for word in prompt.split()] if isinstance(prompt, str) else list(prompt)
        made: list[int] = []
        for _ in range(body["max_tokens"]):
            made.append(next_token(ids + made, self.seed))
        return ids, made


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake_server: Server

    def log_message(self, *_: Any) -> None:
        """Silent."""

    def do_GET(self) -> None:
        metrics = f'vllm:cache_config_info{{block_size="{BLOCK}"}} 1.0\n'
        self._send(metrics if self.path == "/metrics" else json.dumps(QUOTA))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.fake_server.asked.append(body)
        ids, made = self.fake_server.answer(body)
        if body.get("stream"):
            self._stream(ids, made)
            return
        choice: dict[str, Any] = {"prompt_token_ids": ids, "token_ids": made, "text": text_of(made)}
        if body.get("logprobs"):
            choice["logprobs"] = {"top_logprobs": [{"a": -0.1, "b": -3.0} for _ in made]}
        self._send(json.dumps({"choices": [choice]}))

    def _send(self, text: str) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def _stream(self, ids: list[int], made: list[int]) -> None:
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for at in range(0, len(made), PIECE):
            if at == STREAMED_BEFORE_DEATH and len(made) == plan.KILL_TOKENS:
                self.fake_server.engine.wait(ENDS_S)
                self._event({"error": {"code": "engine_failed", "message": "it died"}})
                break
            piece = made[at : at + PIECE]
            choice = {"prompt_token_ids": ids if at == 0 else None, "token_ids": piece, "text": text_of(piece)}
            self._event({"choices": [choice]})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, event: Mapping[str, Any]) -> None:
        self._chunk(f"data: {json.dumps(event)}\n\n".encode())

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.wfile.flush()


def text_of(tokens: Sequence[int]) -> str:
    return "".join(f"t{token} " for token in tokens)


@pytest.fixture
def serve() -> Iterator[Callable[[int], tuple[Server, int]]]:
    """Starts a server with its engine's process; returns it with its port."""
    running: list[tuple[Server, ThreadingHTTPServer, Thread]] = []

    def start(seed: int = 0) -> tuple[Server, int]:
        engine = subprocess.Popen(["bash", "-c", f"exec -a {TITLE} sleep 600"], start_new_session=True)
        fake_server = Server(engine, seed)
        http = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"fake_server": fake_server}))
        thread = Thread(target=http.serve_forever)
        thread.start()
        running.append((fake_server, http, thread))
        return fake_server, http.server_address[1]

    yield start
    for fake_server, http, thread in running:
        http.shutdown()
        http.server_close()
        thread.join()
        fake_server.engine.kill()
        fake_server.engine.wait()


class PlayedStage:
    """Stands for `Stage`: servers of `serve` by label; one whose port is 0 does not start."""

    ports: Mapping[str, tuple[Server, int]]
    got: list[str]
    closed: int

    def __init__(self, model: Any, folder: Path, *_: Any, **options: Any) -> None:
        self.model = model
        self._folder = folder
        self._environments = options["environments"]
        self.idle_cores: dict[str, Any] = {}

    def get(self, label: str) -> Arm:
        type(self).got.append(label)
        server, port = self.ports[label]
        if not port:
            raise BenchmarkError(f"{label} ended with 1 at start:\nout of memory")
        settings = json.loads(Path(self._environments[label]["VLLM_LOGGING_CONFIG_PATH"]).read_text())
        Path(settings["handlers"]["file"]["filename"]).write_text(LOG)
        return Arm(label, label, port, "key", server.engine, self._folder / "x.log", None, signal.SIGTERM, 12.0)

    def close(self) -> None:
        type(self).closed += 1


def run(
    monkeypatch: pytest.MonkeyPatch, folder: Path, ports: Mapping[str, tuple[Server, int]], used: Sequence[int]
) -> tuple[dict[str, Result], type[PlayedStage]]:
    """The results of TP=1 on one GPU with this memory used before and after."""
    stage = type("Played", (PlayedStage,), {"ports": ports, "got": [], "closed": 0})
    sizes = iter(used)

    def no_load(*_: Any) -> None:
        raise BenchmarkError("no load generator here")

    monkeypatch.setattr(part, "Stage", stage)
    monkeypatch.setattr(part, "run_rounds", no_load)
    monkeypatch.setattr(machine, "gpus", lambda: ([Gpu("a GPU", 80 * GB, next(sizes))], ""))
    options = plan.parse_arguments(["--quick"], "")
    found: list[Result] = []
    known = model_lookup.ModelFacts(None, "", 0, CONFIG, True)
    console = Console(quiet=True)
    part.PartChecks(options, plan.Part(1), str(folder), known, folder, console, found.append).run()
    return {one.check: one for one in found}, stage


def test_every_check_is_made_and_one_that_raises_is_a_failed_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, serve: Callable[..., tuple[Server, int]]
) -> None:
    ours = serve()
    found, stage = run(monkeypatch, tmp_path, {VLLM: serve(), OURS: ours}, [GB, 7 * GB])
    assert set(found) == set(checks.OF_EACH_PART)
    outcomes = {name: one.outcome for name, one in found.items()}
    assert outcomes.pop(checks.THROUGHPUT) is Outcome.FAIL
    assert set(outcomes.values()) == {Outcome.PASS}, found
    assert found[checks.THROUGHPUT].seen == "BenchmarkError: no load generator here"
    assert (stage.got, stage.closed) == ([VLLM, OURS], 1)
    assert ours[0].engine.poll() == -signal.SIGKILL
    reported = found[checks.KILLED].figures
    assert (reported["error"], reported["received tokens"]) == ("engine_failed", STREAMED_BEFORE_DEATH)
    assert found[checks.BORDERS].figures["cuts"] == len(
        [body for body in ours[0].asked if body.get("stream") and body["max_tokens"] < 2 * BLOCK + 2]
    )


def test_other_tokens_than_vllms_own_servers_fail_greedy_equality_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, serve: Callable[..., tuple[Server, int]]
) -> None:
    found, _ = run(monkeypatch, tmp_path, {VLLM: serve(1), OURS: serve()}, [GB, 7 * GB])
    failed = {name for name, one in found.items() if one.outcome is Outcome.FAIL}
    assert failed == {checks.GREEDY, checks.THROUGHPUT}
    assert "answer 0, token 0" in found[checks.GREEDY].seen


def test_memory_beyond_the_grant_is_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, serve: Callable[..., tuple[Server, int]]
) -> None:
    found, _ = run(monkeypatch, tmp_path, {VLLM: serve(), OURS: serve()}, [GB, 20 * GB])
    assert found[checks.NVML].seen == "GPU 0: 19.00 GB came, 8.00 GB granted"
    assert found[checks.GRAPHS].outcome is Outcome.FAIL


@pytest.mark.parametrize(
    ("broken", "failed"),
    [
        (OURS, set(checks.OF_EACH_PART)),
        (VLLM, {checks.START, checks.GREEDY, checks.KV, checks.THROUGHPUT}),
    ],
    ids=["this stack", "vLLM's own server"],
)
def test_a_server_that_does_not_start_fails_the_checks_that_need_it(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    serve: Callable[..., tuple[Server, int]],
    broken: str,
    failed: set[str],
) -> None:
    ports = {label: serve() for label in (VLLM, OURS)}
    ports[broken] = (ports[broken][0], 0)
    found, stage = run(monkeypatch, tmp_path, ports, [GB, 7 * GB])
    assert set(found) == set(checks.OF_EACH_PART)
    assert {name for name, one in found.items() if one.outcome is Outcome.FAIL} == failed
    assert f"{broken} ended with 1 at start" in found[checks.START].seen
    assert "out of memory" in found[checks.START].figures["error"]
    assert stage.closed == 1


def test_a_request_is_greedy_and_a_server_that_does_not_listen_is_named(
    tmp_path: Path, serve: Callable[..., tuple[Server, int]]
) -> None:
    server, port = serve()
    arm = Arm(OURS, OURS, port, "key", server.engine, tmp_path / "x", None, signal.SIGTERM)
    answer = Client(arm, "checked", 5.0).complete("one two", 3, margins=True)
    assert (answer.prompt, answer.margins) == ((3, 3), (pytest.approx(2.9),) * 3)
    assert server.asked[0]["temperature"] == 0
    silent = Arm(OURS, OURS, 1, "key", server.engine, tmp_path / "x", None, signal.SIGTERM)
    with pytest.raises(BenchmarkError, match="ours: "):
        Client(silent, "checked", 5.0).complete("one", 1)
