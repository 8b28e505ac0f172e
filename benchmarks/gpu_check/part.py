"""All checks with one number of ranks: vLLM's own server is observed, then this stack, then both under load in turn.

Invariant: one server at most is up at a time, as each takes a GPU's memory; a check that raises is a failed one, and
the others go on.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import requests
from rich.console import Console

from benchmarks.common import report
from benchmarks.common.arms import OURS, VLLM, Arm, BenchmarkError, our_settings
from benchmarks.common.processes import ENGINE_REPLICA, role_of, title_of
from benchmarks.common.stage import Stage
from benchmarks.common.workload import prompts
from benchmarks.gpu_check import checks, engine_log, machine, plan
from benchmarks.gpu_check.answers import Answer, compare
from benchmarks.gpu_check.checks import KvSize, LedgerDevice, Result
from benchmarks.gpu_check.client import Client, block_tokens, read_json
from benchmarks.gpu_check.engine_log import EngineFacts
from benchmarks.throughput import run_rounds
from serve_app.cli.check import kv_bytes_per_token, text_config
from serve_app.engine.start import environment, memory_history, memory_size, model_lookup
from serve_app.errors import ServeAppError
from serve_app.settings import GB, ModelSettings, parse

# of prompts that nothing else asks: a cached prefix is prefilled otherwise
BORDER_SEED = 101
KILL_SEED = 102
UNUSED_KEY = "gpu-check-settings-only"  # the settings are read for their sizes; no server gets this key
ERRORS = (BenchmarkError, ServeAppError, requests.RequestException, OSError, LookupError, ValueError)

Record = Callable[[Result], None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Baseline:
    """What vLLM's own server answered and said of itself."""

    answers: tuple[Answer, ...]
    facts: EngineFacts
    block_tokens: int


class PartChecks:
    """The checks of one part.

    Args:
        path: the model's folder or id; `known`: what is known of it.
        folder: for logs.
        record: called with each result as soon as it is there.
    """

    def __init__(
        self,
        options: plan.Options,
        part: plan.Part,
        path: str,
        known: model_lookup.ModelFacts,
        folder: Path,
        console: Console,
        record: Record,
    ) -> None:
        self._options = options
        self._part = part
        self._known = known
        self._record = record
        self._folder = folder / f"tp{part.ranks}"
        self._console = console
        self._folder.mkdir()
        choice = options.choice(path, part.ranks)
        wait_s = options.start_timeout_s  # requests of a killed engine wait for the next one
        self._stage = Stage(
            choice,
            self._folder,
            (),
            console,
            one_at_a_time=True,
            admission={"max_wait_s": wait_s, "no_replica_wait_s": wait_s},
            environments={label: self._logging(label) for label in (VLLM, OURS)},
            start_timeout_s=wait_s,
        )
        self.settings: ModelSettings = parse(our_settings(choice, UNUSED_KEY)).models[0]

    def run(self) -> None:
        """All of them. What was started is ended, however this ends."""
        with closing(self._stage):
            used_before = [one.used_bytes for one in machine.gpus()[0]]
            baseline, problem = self._reached(self._observe_vllm, "vLLM's own server starts and answers")
            arm, our_problem = self._reached(lambda: self._stage.get(OURS), "this stack starts")
            self._record(self._started(baseline, arm, problem + our_problem))
            if arm is None:
                self._unreached(checks.OF_EACH_PART[1:], our_problem)
                return
            self._of_memory(arm, baseline, used_before)
            if baseline is None:
                self._unreached((checks.GREEDY, checks.KV, checks.THROUGHPUT), problem)
            else:
                known = baseline
                self._attempt(checks.GREEDY, lambda: self._greedy(arm, known))
            block = 16 if baseline is None else baseline.block_tokens
            self._attempt(checks.BORDERS, lambda: self._borders(arm, block))
            self._attempt(checks.KILLED, lambda: self._killed(arm))
            if baseline is not None:
                self._attempt(checks.THROUGHPUT, self._throughput)
            self._say("all servers end")

    def _of_memory(self, arm: Arm, baseline: Baseline | None, used_before: list[int]) -> None:
        """Ledger, NVML, KV cache and graphs; the stage has just had the engine under a full batch."""
        self._say("the ledger, NVML and vLLM's log are read")
        used = [one.used_bytes for one in machine.gpus()[0]]
        name = self._part.name
        quota = read_json(arm, "/admin/quota")
        devices = [
            LedgerDevice(int(one["device"].rpartition("/")[2]), one["granted_bytes"], one["reserved_bytes"])
            for one in quota["devices"]
        ]
        facts = self._facts(OURS)
        self._attempt(checks.LEDGER, lambda: checks.ledger(name, quota["engines"]))
        if self._options.device == "cpu":
            self._record(checks.not_applicable(checks.NVML, name, "NVML knows GPUs only"))
            self._attempt(checks.GRAPHS, lambda: checks.graphs(name, facts, memory_size.GPU_OVERHEAD_BYTES, None))
        else:
            self._attempt(checks.NVML, lambda: checks.nvml(name, devices, used_before, used))
            came = [used[one.index] - used_before[one.index] for one in devices if one.granted_bytes]
            self._attempt(checks.GRAPHS, lambda: self._graphs(facts, came))
        if baseline is not None:
            self._attempt(checks.KV, lambda: self._kv(quota, baseline, facts))

    def _kv(self, quota: Mapping[str, Any], baseline: Baseline, facts: EngineFacts) -> Result:
        (engine,) = quota["engines"]
        settings = self.settings
        granted = engine["granted_bytes"] // self._part.ranks
        weights = model_lookup.weights_bytes(settings)
        need = memory_history.need_here(settings, environment.platform(), weights, self._known.config)
        kv_bytes = memory_size.kv_bytes_of(settings, need, granted)
        kv_bytes = min(kv_bytes, round((settings.kv_cache_gb or 0.0) * GB))
        each = kv_bytes_per_token(settings, text_config(settings, self._known.config))
        size = KvSize(granted, kv_bytes, each, baseline.block_tokens)
        return checks.kv(self._part.name, size, engine["kv_tokens"], facts.kv_tokens, baseline.facts.kv_tokens)

    def _graphs(self, facts: EngineFacts, came: list[int]) -> Result:
        weights = facts.weights_bytes or -(-model_lookup.weights_bytes(self.settings) // self._part.ranks)
        beside = [size - weights - self._stage.model.kv_cache_bytes for size in came]
        return checks.graphs(self._part.name, facts, memory_size.GPU_OVERHEAD_BYTES, beside)

    def _observe_vllm(self) -> Baseline:
        arm = self._stage.get(VLLM)
        return Baseline(tuple(self._answers(arm)), self._facts(VLLM), block_tokens(arm))

    def _answers(self, arm: Arm) -> list[Answer]:
        client = self._client(arm)
        asked = islice(prompts(self._options.seed), self._options.prompts)
        return [client.complete(prompt, self._options.tokens, margins=True) for prompt in asked]

    def _greedy(self, arm: Arm, baseline: Baseline) -> Result:
        self._say(f"{self._options.prompts} greedy answers, one request at a time")
        pairs = zip(baseline.answers, self._answers(arm), strict=True)
        named = [(f"answer {number}", wanted, got) for number, (wanted, got) in enumerate(pairs)]
        return checks.greedy(self._part.name, compare(named, self._options.tie_nats))

    def _borders(self, arm: Arm, block: int) -> Result:
        client = self._client(arm)
        pairs = list[tuple[str, Answer, Answer]]()
        count = 0
        for number, text in enumerate(islice(prompts(BORDER_SEED), self._options.border_prompts)):
            prompt = client.complete(text, 1).prompt
            tokens = plan.answer_tokens(len(prompt), block, plan.MAX_MODEL_LEN)
            unbroken = client.complete(prompt, tokens, margins=True)
            pairs.append((f"prompt {number} streamed", unbroken, client.stream(prompt, tokens)))
            places = plan.cuts(len(prompt), tokens, block)
            self._say(f"prompt {number}: {len(places)} cuts at borders of blocks of {block} tokens")
            for cut in places:
                rest = unbroken.rest(cut)
                name = f"prompt {number} of {len(prompt)} tokens, cut after {cut}"
                pairs.append((name, rest, client.stream(rest.prompt, tokens - cut)))
                count += 1
        return checks.borders(self._part.name, compare(pairs, self._options.tie_nats), count, block)

    def _killed(self, arm: Arm) -> Result:
        """Kill the engine's replica under a stream and under an answer that is not streamed."""
        client = self._client(arm)
        text, other = list(islice(prompts(KILL_SEED), 2))
        self._say("a stream's engine is killed; another one starts")
        unbroken = client.complete(text, plan.KILL_TOKENS, margins=True)
        unbroken_whole = client.complete(other, plan.KILL_TOKENS, margins=True)
        # looked up before: a fast engine answers sooner than all processes are searched
        replicas = [pid for pid in arm.members() if role_of(title_of(pid)) == ENGINE_REPLICA]
        living = list(replicas)

        def kill(count: int) -> None:
            while count >= plan.KILL_AFTER_TOKENS and living:
                os.kill(living.pop(), signal.SIGKILL)

        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(client.complete, other, plan.KILL_TOKENS)
            stream = client.stream(text, plan.KILL_TOKENS, kill)
            began = time.monotonic()
            whole = waits.result()
        restarted_s = time.monotonic() - began
        left = plan.KILL_TOKENS - len(stream.tokens)
        rest = client.complete((*unbroken.prompt, *stream.tokens), max(1, left))  # of the next engine, in any case
        tokens = stream.tokens + rest.tokens[:left]
        tie = self._options.tie_nats
        continued = compare([("stream", unbroken, Answer(unbroken.prompt, tokens, ""))], tie)
        figures = {"killed processes": len(replicas), "seconds to the next engine's answer": round(restarted_s, 1)}
        again = compare([("whole answer", unbroken_whole, whole)], tie)
        return checks.killed(self._part.name, stream, left, continued, again, figures)

    def _throughput(self) -> Result:
        windows = self._options.windows
        self._say(f"{windows.rounds} rounds of load, each server in turn")
        measured = run_rounds(self._stage, windows, time.monotonic())
        analysis = report.Analysis(measured, windows.arms, windows.clients, seed=windows.seed)
        foreign = round(max(window.foreign_cores for window in measured), 2)
        found = report.build(analysis, {"idle_cores": self._stage.idle_cores, "foreign_cores_max": foreign})
        report.print_tables(self._console, found)
        crowded = plan.crowded(self._options.device, len(os.sched_getaffinity(0)), self._part.ranks)
        return checks.throughput(self._part.name, found, crowded)

    def _started(self, baseline: Baseline | None, arm: Arm | None, problem: str) -> Result:
        if baseline is None or arm is None:
            return checks.failure(checks.START, self._part.name, problem)
        seen = f"vLLM's own server and this stack start; this stack in {arm.start_s:.0f} s"
        return Result(checks.START, self._part.name, checks.Outcome.PASS, seen)

    def _reached(self, step: Callable[[], T], step_name: str) -> tuple[T | None, str]:
        self._say(f"{step_name}; {self._options.start_timeout_s:.0f} s at most")
        try:
            return step(), ""
        except ERRORS as error:
            return None, f"{type(error).__name__}: {error}\n"

    def _attempt(self, check: str, step: Callable[[], Result]) -> None:
        try:
            self._record(step())
        except ERRORS as error:
            self._record(checks.failure(check, self._part.name, f"{type(error).__name__}: {error}"))

    def _unreached(self, names: tuple[str, ...], problem: str) -> None:
        for check in names:
            self._record(checks.failure(check, self._part.name, f"not reached: {problem.partition(chr(10))[0]}"))

    def _client(self, arm: Arm) -> Client:
        return Client(arm, self._stage.model.name, self._options.start_timeout_s)

    def _logging(self, label: str) -> dict[str, str]:
        """Variables that make a server's engine write vLLM's log to a file."""
        file = self._folder / f"{label}-logging.json"
        file.write_text(json.dumps(engine_log.logging_settings(self._log(label))))
        return {"VLLM_CONFIGURE_LOGGING": "1", "VLLM_LOGGING_LEVEL": "INFO", "VLLM_LOGGING_CONFIG_PATH": str(file)}

    def _log(self, label: str) -> Path:
        return self._folder / f"{label}-engine.log"

    def _facts(self, label: str) -> EngineFacts:
        file = self._log(label)
        return engine_log.read(file.read_text(errors="replace")) if file.is_file() else EngineFacts()

    def _say(self, text: str) -> None:
        self._console.print(f"{self._part.name}: {text}", markup=False)
