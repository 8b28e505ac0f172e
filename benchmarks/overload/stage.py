"""The servers under overload: pinned to their cores, asked for their own figures, and looked at when the load is over.

Invariant: EngineCore has one core to itself, everything else (router, HAProxy, Ray, vLLM's API server, the clients,
this process) shares the other; what a server counts is read from the server, before and after, never from clients.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Iterable
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from benchmarks.common.arms import HOST, OURS, VLLM, Arm, BenchmarkError, ModelChoice, get, session, start
from benchmarks.common.processes import ENGINE_CORE, role_of, title_of
from benchmarks.common.stage import drive
from benchmarks.overload.answers import Answer, brief
from benchmarks.overload.offered_load import GROUPS, TENANTS, Label
from benchmarks.overload.open_loop import Spec
from benchmarks.overload.plan import CLOSED_FACTOR, FIFO, Levels, Plan

COUNTED = ("generated_tokens", "prompt_tokens", "preemptions")  # by an engine, since it started
KEPT_S = 15.0  # after a load until all is given back: clients have left by then, engines end within a second
POLL_S = 0.25
CLOSED_WARMUP_S = 2.0  # the slots of a closed loop are full after its first prompts
WARM_S = 6.0  # under full load after each start: first batches of each size allocate and compile
FOREVER_S = 3_600.0  # of a FIFO: nobody is refused, everybody leaves by himself
BOUNDLESS = 1_000_000
RSS_ROLES = ("router replica", "engine replica", "HAProxy", "vLLM API server")
VLLM_SERIES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "engine_waiting",
    "vllm:kv_cache_usage_perc": "kv_in_use",
    "vllm:generation_tokens_total": "generated_tokens",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:num_preemptions_total": "preemptions",
}
OUR_SERIES = {
    "serve_app_engine_running_sequences": "running",
    "serve_app_engine_waiting_sequences": "engine_waiting",
    "serve_app_engine_kv_cache_usage_ratio": "kv_in_use",
    "serve_app_engine_generated_tokens_total": "generated_tokens",
    "serve_app_engine_prompt_tokens_total": "prompt_tokens",
    "serve_app_engine_preemptions_total": "preemptions",
    "serve_app_waiting": "waiting",
}
HELD = ("running", "engine_waiting", "kv_in_use", "waiting", "granted", "kv_tokens_used")  # zero when nothing is asked


def admission_of(arm: str) -> dict[str, Any]:
    """The line of an arm. FIFO: one class, one tenant (see `keys_of`), nobody refused."""
    if arm != FIFO:
        return {}
    return {"max_queued": BOUNDLESS, "max_queued_tokens": None, "max_wait_s": FOREVER_S}


def keys_of(arm: str) -> list[dict[str, Any]]:
    """A key for each tenant; of a FIFO all are one tenant's, and may claim one class only."""
    tenant = "all" if arm == FIFO else "tenant-{}"
    ours = {"max_class": "normal"} if arm == FIFO else {"max_class": "high"}
    return [{"key": f"sk-{secrets.token_hex(16)}", "tenant": tenant.format(n), **ours} for n in range(TENANTS)]


@dataclass(slots=True)
class Server:
    """A running arm with the keys of its tenants."""

    arm: Arm
    keys: list[str]

    def labels(self, name: str, levels: Levels | None) -> dict[str, list[list[Any]]]:
        """What the clients of arm `name` send; without levels (a closed loop) neither class nor deadline."""

        def label(group: str, key: str) -> Label:
            if levels is None or name != OURS:
                return Label(key)
            return Label(key, group, levels.deadline_ms(group))

        return {group: [list(astuple(label(group, key))) for key in self.keys] for group in GROUPS}

    def figures(self) -> dict[str, float]:
        """What it counts and holds by its own metrics; a busy engine that they leave out is waited for."""
        deadline = time.monotonic() + KEPT_S
        while True:
            status, body = get(self.arm, "/metrics")
            if status != 200:
                raise BenchmarkError(f"{self.arm.label}: /metrics answered {status}")
            found = metrics_of(body.decode())
            if found.keys() >= set(COUNTED):
                break
            if time.monotonic() >= deadline:
                raise BenchmarkError(f"{self.arm.label}: /metrics has no counts of its engine")
            time.sleep(POLL_S)
        if self.arm.kind == OURS:
            found["kv_tokens_used"] = sum(one["kv_tokens_used"] for one in self._admin("/admin/quota")["engines"])
        return found

    def held(self) -> dict[str, float]:
        """What is still held after `KEPT_S` without a client; empty: nothing."""
        deadline = time.monotonic() + KEPT_S
        while True:
            left = {name: value for name, value in self.figures().items() if name in HELD and value}
            if not left or time.monotonic() >= deadline:
                return left
            time.sleep(POLL_S)

    def rss_mb(self) -> dict[str, float]:
        """Resident memory by role, of those that could grow with requests."""
        found: dict[str, float] = {}
        for pid in self.arm.members():
            role = role_of(title_of(pid))
            if role in RSS_ROLES:
                found[role] = round(found.get(role, 0.0) + _rss_mb(pid), 1)
        return found

    def receipts(self, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        """What the router says became of requests, by what their clients call them; those it does not know are left
        out: their clients were gone before it had read them."""
        if self.arm.kind != OURS:
            return {}
        found = {}
        with session(self.arm) as http:
            for name in names:
                answer = http.get(f"{self.arm.url}/admin/requests/{name}", timeout=KEPT_S)
                if answer.status_code == 200:
                    found[name] = answer.json()
                elif answer.status_code != 404:
                    raise BenchmarkError(f"{self.arm.label}: a receipt: {answer.status_code}: {answer.text[:300]!r}")
        return found

    def _admin(self, path: str) -> Any:
        status, body = get(self.arm, path)
        if status != 200:
            raise BenchmarkError(f"{self.arm.label}: {path} answered {status}: {body[:300]!r}")
        return json.loads(body)


@dataclass(slots=True)
class Theatre:
    """The one server that is up; asking for another takes it down."""

    model: ModelChoice
    folder: Path
    console: Console
    plan: Plan
    cores: tuple[int, int]
    up: dict[str, Server] = field(default_factory=dict)

    def get(self, name: str) -> Server:
        """The server of an arm, started, pinned and warm.

        Raises:
            BenchmarkError: it does not start.
        """
        label = f"{OURS}#{FIFO}" if name == FIFO else name
        if label not in self.up:
            self.close()
            self.up[label] = server = self._start(label, name)
            self.console.print(f"  {label}: up after {server.arm.start_s:.0f} s on port {server.arm.port}")
            pin(server.arm, *self.cores)
            self.closed(name, "warm-up", CLOSED_FACTOR * self.model.max_num_seqs, WARM_S, 0)
        return self.up[label]

    def _start(self, label: str, name: str) -> Server:
        os.sched_setaffinity(0, self.cores)  # what the server starts may choose among both
        try:
            if name == VLLM:
                arm = start(label, self.model, self.folder)
                return Server(arm, [arm.api_key] * TENANTS)
            keys = keys_of(name)
            arm = start(label, self.model, self.folder, keys=keys, admission=admission_of(name))
            return Server(arm, [key["key"] for key in keys])
        finally:
            os.sched_setaffinity(0, {self.cores[1]})

    def closed(self, name: str, window: str, clients: int, span_s: float, seed: int) -> dict[str, Any]:
        """A closed loop of so many clients. Raises BenchmarkError: a request failed."""
        server = self.get(name)
        spec = self._spec(server, name, window, None, seed, span_s, clients=clients)
        result, cpu_s, foreign_s = drive(server.arm, spec, "benchmarks.overload.open_loop")
        if result["failed"]:
            raise BenchmarkError(f"{name}, {window}: {result['failed']} failed: {result['failed_samples']}")
        return result | {"warmup_s": spec.warmup_s, "cpu_s_by_role": cpu_s, "foreign_s": foreign_s}

    def window(
        self, name: str, multiple: float, span_s: float, part: int, levels: Levels, texts: int = 0
    ) -> dict[str, Any]:
        """One window of open load, and everything that is known of it afterwards. `texts`: see `Spec`."""
        server = self.get(name)
        before = server.figures()
        seed = self.plan.seed_of(multiple, part)
        rate = multiple * levels.capacity_rps
        spec = self._spec(server, name, f"{name}-{multiple:g}", levels, seed, span_s, rate=rate, texts=texts)
        result, cpu_s, foreign_s = drive(server.arm, spec, "benchmarks.overload.open_loop")
        left = server.held()
        after = server.figures()
        inside = [a.number for a in map(Answer.of, result["rows"]) if a.inside(spec.warmup_s, span_s)]
        return result | {
            "arm": name,
            "multiple": multiple,
            "round": part,
            "rate": rate,
            "warmup_s": spec.warmup_s,
            "seed": seed,
            "levels": list(astuple(levels)),
            "cpu_s_by_role": cpu_s,
            "foreign_s": foreign_s,
            "engine": {key: after[key] - before[key] for key in COUNTED},
            "left": left,
            "rss_mb": server.rss_mb(),
            "decisions": [
                brief(int(name.rpartition("-")[2]), receipt)
                for name, receipt in server.receipts(f"{spec.name}-{number}" for number in inside).items()
            ],
        }

    def _spec(
        self,
        server: Server,
        name: str,
        window: str,
        levels: Levels | None,
        seed: int,
        span_s: float,
        *,
        rate: float = 0.0,
        clients: int = 0,
        texts: int = 0,
    ) -> Spec:
        closed = levels is None
        return Spec(
            name=f"{window}-{secrets.token_hex(3)}",
            host=HOST,
            port=server.arm.port,
            model=self.model.name,
            folder=self.plan.folder,
            longest=self.model.max_model_len,
            seed=seed,
            rate=rate,
            warmup_s=CLOSED_WARMUP_S if closed else self.plan.warmup_s,
            window_s=span_s,
            tail_s=0.0 if closed else self.plan.tail_s,
            clients=clients,
            labels=server.labels(name, levels),
            patience_s={} if levels is None else {group: levels.patience_s(group) for group in GROUPS},
            texts=texts,
        )

    def close(self) -> None:
        """Take the server down, also when it resists."""
        with contextlib.ExitStack() as stack:
            while self.up:
                stack.callback(self.up.popitem()[1].arm.stop)


def metrics_of(exposition: str) -> dict[str, float]:
    """The figures of either kind of server under common names, summed over replicas."""
    found: dict[str, float] = {}

    def add(name: str, value: float) -> None:
        found[name] = found.get(name, 0.0) + value

    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if sample.name in VLLM_SERIES and "replica" not in sample.labels:  # not passed on by a router
                add(VLLM_SERIES[sample.name], sample.value)
            elif sample.name in OUR_SERIES:
                add(OUR_SERIES[sample.name], sample.value)
            elif sample.name == "serve_app_slots" and sample.labels["state"] == "granted":
                add("granted", sample.value)
    return found


def pin(arm: Arm, engine_core: int, other_core: int) -> None:
    """EngineCore to one core, every other process of the arm to the other; what they start later inherits it."""
    for pid in arm.members():
        core = engine_core if role_of(title_of(pid)) == ENGINE_CORE else other_core
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):  # it, or a thread of it, has just ended
            for thread in psutil.Process(pid).threads():
                os.sched_setaffinity(thread.id, {core})


def _rss_mb(pid: int) -> float:
    try:
        return float(psutil.Process(pid).memory_info().rss) / 2**20
    except psutil.NoSuchProcess:
        return 0.0
