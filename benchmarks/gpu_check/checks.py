"""The verdict of each check from what was seen, and of the whole run. Pure.

Invariant: a check that failed, or was not reached, is never a pass; "not applicable" always has its reason.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.common.run import FOREIGN_LIMIT_CORES
from benchmarks.gpu_check.answers import Agreement, Answer
from benchmarks.gpu_check.engine_log import EngineFacts
from serve_app.core.memory import OVERUSE_SHARE
from serve_app.settings import GB

ENVIRONMENT = "environment"
START = "start"
GREEDY = "greedy equality"
LEDGER = "ledger and measured memory"
NVML = "ledger and NVML"
KV = "KV cache"
GRAPHS = "CUDA graphs"
BORDERS = "continuation at block borders"
KILLED = "continuation after a kill"
THROUGHPUT = "throughput"
OF_EACH_PART = (START, GREEDY, LEDGER, NVML, KV, GRAPHS, BORDERS, KILLED, THROUGHPUT)

NOISE_BYTES = 100_000_000  # of a device that nobody was granted: the driver's own bookkeeping for processes elsewhere
MIN_RATIO = 0.7  # of vLLM's own tokens/s; 0.8 to 1.0 was measured on CPUs, so less is a defect and not noise
# exit status
PASSED = 0
FAILED = 1
NO_GPU = 2


class Outcome(enum.Enum):
    PASS = "pass"
    FAIL = "fail"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True, slots=True)
class Result:
    """One check of one part. `seen`: a sentence; `figures` hold numbers, texts, or lists of records."""

    check: str
    part: str
    outcome: Outcome
    seen: str
    figures: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        fields = {"check": self.check, "part": self.part, "result": self.outcome.value, "seen": self.seen}
        return {**fields, "figures": dict(self.figures)}


@dataclass(frozen=True, slots=True)
class LedgerDevice:
    """What the quota actor says of one device; `index` as NVML counts them."""

    index: int
    granted_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True)
class KvSize:
    """What the settlement of a grant leaves for the KV cache of a rank. `bytes_per_token`: on a rank; None: not known
    for this model."""

    granted_bytes: int
    kv_bytes: int
    bytes_per_token: float | None
    block_tokens: int

    @property
    def tokens(self) -> int | None:
        """In whole blocks."""
        if self.bytes_per_token is None:
            return None
        return int(self.kv_bytes // (self.block_tokens * self.bytes_per_token)) * self.block_tokens


def environment(doctor: Sequence[tuple[str, str, str]], figures: Mapping[str, Any]) -> Result:
    """`doctor`: name, state and finding of each check of `serve-app doctor`."""
    wrong = [f"{name}: {found}" for name, state, found in doctor if state == "fail"]
    rows = [{"check": name, "state": state, "found": found} for name, state, found in doctor]
    seen = "; ".join(wrong) or f"{len(doctor)} checks of the machine, none failed"
    return Result(ENVIRONMENT, "", _outcome(not wrong), seen, {**figures, "doctor": rows})


def greedy(part: str, found: Agreement) -> Result:
    return Result(GREEDY, part, _outcome(found.holds), _summary(found, "vLLM's own server's"), found.as_figures())


def borders(part: str, found: Agreement, cuts: int, block_tokens: int) -> Result:
    figures = {"block tokens": block_tokens, "cuts": cuts, **found.as_figures()}
    if not cuts:
        seen = f"no border of a block of {block_tokens} tokens fits into an answer"
        return Result(BORDERS, part, Outcome.NOT_APPLICABLE, seen, figures)
    return Result(BORDERS, part, _outcome(found.holds), _summary(found, "the unbroken streams'"), figures)


def killed(
    part: str, stream: Answer, missing: int, continued: Agreement, whole: Agreement, figures: Mapping[str, Any]
) -> Result:
    """A stream whose engine was killed. The next engine goes on with it; if that cannot, this stack ends it with an
    error, and the client continues from the token ids. An answer that is not streamed is made again. A tie is enough:
    in 16 bits a long answer that shares a batch has one.

    Args:
        missing: tokens that the stream lacks.
        continued: what was received, and its continuation by the client, beside the unbroken answer.
        whole: the answer that was not streamed, beside the unbroken one.
    """
    described = {**figures, "received tokens": len(stream.tokens), "error": stream.error or "none"}
    described |= {"continued": continued.as_figures(), "not streamed": whole.as_figures()}
    if not stream.error and missing:
        return Result(KILLED, part, Outcome.FAIL, "the stream ended early without an error", described)
    holds = not continued.differences and not whole.differences
    ended = f"cut after {len(stream.tokens)} tokens with {stream.error}" if stream.error else "the stream went on"
    seen = f"{ended}; "
    seen += _summary(continued, "the unbroken one's") + "; not streamed: " + _summary(whole, "the unbroken one's")
    return Result(KILLED, part, _outcome(holds), seen, described)


def ledger(part: str, engines: Sequence[Mapping[str, Any]]) -> Result:
    """Whether engines are within their grants by their own measurement. `engines`: as `serve-app quota --json`."""
    rows = [{name: one[name] for name in ("replica", "granted_bytes", "measured_bytes")} for one in engines]
    figures = {"tolerance": f"{OVERUSE_SHARE:.0%}", "engines": rows}
    if not rows:
        return Result(LEDGER, part, Outcome.FAIL, "the ledger knows no engine", figures)
    unmeasured = [one for one in rows if one["measured_bytes"] is None]
    if unmeasured:
        seen = "ranks in processes of Ray are not measured by their replica"
        return Result(LEDGER, part, Outcome.NOT_APPLICABLE, seen, figures)
    above = [one for one in rows if one["measured_bytes"] > one["granted_bytes"] * (1 + OVERUSE_SHARE)]
    shown = above or rows
    seen = f"{_gb(shown[0]['measured_bytes'])} measured, {_gb(shown[0]['granted_bytes'])} granted"
    return Result(LEDGER, part, _outcome(not above), seen, figures)


def nvml(part: str, devices: Sequence[LedgerDevice], before: Sequence[int], after: Sequence[int]) -> Result:
    """What each device was granted beside what NVML says is used of it.

    Per device: what came since `before` is within the grant (and the ledger's own tolerance, or `NOISE_BYTES` where
    nothing was granted), and all that is used is within the grant and what the ledger reserves for nobody.
    """
    rows = []
    wrong = []
    for device in devices:
        used = after[device.index]
        came = after[device.index] - before[device.index]
        rows.append({
            "GPU": device.index,
            "granted_bytes": device.granted_bytes,
            "reserved_bytes": device.reserved_bytes,
            "used_before_bytes": before[device.index],
            "used_bytes": used,
        })  # fmt: skip
        if came > max(device.granted_bytes * (1 + OVERUSE_SHARE), NOISE_BYTES):
            wrong.append(f"GPU {device.index}: {_gb(came)} came, {_gb(device.granted_bytes)} granted")
        elif used > device.granted_bytes + device.reserved_bytes:
            beside = f"{_gb(device.granted_bytes)} granted and {_gb(device.reserved_bytes)} reserved"
            wrong.append(f"GPU {device.index}: {_gb(used)} used, {beside}")
    if len(devices) != len(after):
        wrong.append(f"the ledger has {len(devices)} devices, NVML {len(after)} GPUs")
    granted, used = (sum(row[name] for row in rows) for name in ("granted_bytes", "used_bytes"))
    seen = "; ".join(wrong) or f"{_gb(used)} used, {_gb(granted)} granted, on {len(rows)} GPUs"
    figures = {"tolerance": f"{OVERUSE_SHARE:.0%} of the grant, at least {_gb(NOISE_BYTES)}", "GPUs": rows}
    return Result(NVML, part, _outcome(not wrong), seen, figures)


def kv(part: str, size: KvSize, ledger_tokens: int, ours: int | None, vllm: int | None) -> Result:
    """KV tokens: by the settlement of the grant, in the ledger, and by vLLM's own log of either engine. A block of
    difference is rounding."""
    sizes = {"settlement": size.tokens, "ledger": ledger_tokens, "this engine's log": ours, "vLLM's own server's": vllm}
    known = {name: tokens for name, tokens in sizes.items() if tokens is not None}
    figures: dict[str, Any] = {"granted bytes a rank": size.granted_bytes, "KV bytes a rank": size.kv_bytes}
    figures |= {"block tokens": size.block_tokens}
    figures |= {f"tokens, {name}": "not known" if tokens is None else tokens for name, tokens in sizes.items()}
    holds = max(known.values()) - min(known.values()) <= size.block_tokens and ours is not None and vllm is not None
    seen = ", ".join(f"{name} {tokens}" for name, tokens in known.items()) + " tokens"
    return Result(KV, part, _outcome(holds), seen, figures)


def graphs(part: str, facts: EngineFacts, counted_bytes: int, beside_bytes: Sequence[int] | None) -> Result:
    """Whether graphs were captured, and whether they and everything else beside weights and KV cache are within what
    the ledger counts for it.

    Args:
        counted_bytes: a rank's overhead in the ledger.
        beside_bytes: of each GPU in use, what NVML shows beyond weights and KV cache; None: not on GPUs.
    """
    figures: dict[str, Any] = {"enforce_eager": facts.eager, "mode": facts.graph_mode, "counted bytes": counted_bytes}
    figures |= {"graph bytes": facts.graph_bytes, "bytes beside weights and KV cache": beside_bytes}
    if beside_bytes is None:
        return Result(GRAPHS, part, Outcome.NOT_APPLICABLE, "graphs are captured on GPUs only", figures)
    rest = max(beside_bytes, default=0)
    seen = f"{_gb(rest)} beside weights and KV cache, {_gb(counted_bytes)} counted"
    if facts.eager:
        seen = f"enforce_eager, no graphs; {seen}"
    elif facts.graph_bytes is None:
        return Result(GRAPHS, part, Outcome.FAIL, f"vLLM's log names no captured graphs; {seen}", figures)
    else:
        seen = f"captured ({facts.graph_mode}), {_gb(facts.graph_bytes)}; {seen}"
    return Result(GRAPHS, part, _outcome(max(rest, facts.graph_bytes or 0) <= counted_bytes), seen, figures)


def throughput(part: str, measured: Mapping[str, Any], crowded: str = "") -> Result:
    """`measured`: the result object of `benchmarks.throughput`, vLLM's own server first. `crowded`: why there is no
    verdict."""
    vllm, ours = measured["arms"]
    rows = []
    for count, ratio in measured["ratio"].items():
        speeds = [measured["arms"][arm][count]["tokens_per_s"]["value"] for arm in (vllm, ours)]
        added = measured["ttft_added_ms"][count]
        row = {"clients": count, "vLLM tokens/s": speeds[0], "ours tokens/s": speeds[1], "ratio": ratio}
        rows.append({**row, "bar": measured["bars"]["ratio"].get(count), "TTFT added ms": added})
    slow = [row for row in rows if row["ratio"] is None or row["ratio"] < MIN_RATIO]
    cpu = measured["cpu_us_per_token_outside_engine"]
    foreign = measured["conditions"]["foreign_cores_max"]
    figures = {"least ratio": MIN_RATIO, "by clients": rows, "CPU us a token outside EngineCore": dict(cpu)}
    figures |= {"cores that other processes used, at most": foreign}
    seen = ", ".join(f"{row['ratio']} at {row['clients']} clients" for row in rows) + " of vLLM's own tokens/s"
    seen += f"; others used {foreign:g} cores, so it is noise" if foreign > FOREIGN_LIMIT_CORES else ""
    if crowded:
        return Result(THROUGHPUT, part, Outcome.NOT_APPLICABLE, f"{crowded}; {seen}", figures)
    return Result(THROUGHPUT, part, _outcome(bool(rows) and not slow), seen, figures)


def not_applicable(check: str, part: str, reason: str) -> Result:
    return Result(check, part, Outcome.NOT_APPLICABLE, reason)


def failure(check: str, part: str, error: str) -> Result:
    """A check that could not be made: the first line says why, all of it is a figure."""
    lines = [line for line in error.strip().splitlines() if line.strip()] or ["no reason given"]
    return Result(check, part, Outcome.FAIL, lines[0].strip(), {"error": error} if len(lines) > 1 else {})


def exit_status(results: Sequence[Result]) -> int:
    """Of a run that had its devices: one failed check fails it, and so does one without a single pass."""
    outcomes = {one.outcome for one in results}
    return FAILED if Outcome.FAIL in outcomes or Outcome.PASS not in outcomes else PASSED


def _outcome(holds: bool) -> Outcome:
    return Outcome.PASS if holds else Outcome.FAIL


def _summary(found: Agreement, whose: str) -> str:
    """`8 answers equal vLLM's own server's, 1 differs at a tie`"""
    parts = [f"{found.equal} equal {whose}"]
    if found.ties:
        parts.append(f"{len(found.ties)} differ at a tie")
    if found.differences:
        parts.append(f"{len(found.differences)} differ: {found.differences[0]}")
    return ", ".join(parts)


def _gb(size: float) -> str:
    return f"{size / GB:.2f} GB"
