"""The decisions of a policy with the signals behind them, as lines of JSON, and whether they come out again.

A line is of one deployment: a span in which its signals, the number and its cause did not change, with the times of its
decisions. Lines are in the order of time; `begins` says that the policy was new.

Invariant: of lines that go back to the beginning of a policy every decision comes out again, on any machine: policies
have no clock, no chance and no memory but their signals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from autoscaling.policies import POLICIES, Decision, ReplicaPolicy, Signals
from serve_app.errors import BadRequest
from serve_app.system import SUFFIX, EventWriter, RecordBounds, records_folder

DECISIONS = "decisions"  # the kind of their files
BOUNDS = RecordBounds(keep_s=7 * 86_400.0, max_bytes=64 * 2**20)  # half a day of a busy model
MOST_TIMES = 600  # of a line: a minute of Serve's looks, which is lost if the controller dies


class DecidedNumber(NamedTuple):
    """What a policy has answered."""

    replicas: int
    cause: str


class DecisionRecorder:
    """The lines of one deployment. `write` takes each."""

    def __init__(self, deployment: str, policy: str, write: Callable[[Mapping[str, Any]], None]) -> None:
        self._common = {"deployment": deployment, "policy": policy}
        self._write = write
        self._begins = True
        self._span: tuple[Signals, DecidedNumber] | None = None  # the signals at no time
        self._times: list[float] = []

    def add(self, signals: Signals, decision: Decision) -> None:
        """A decision; the line of the span before goes out once this one differs."""
        span = (replace(signals, now=0.0), DecidedNumber(decision.replicas, decision.cause.value))
        if self._span != span or len(self._times) >= MOST_TIMES:
            self.flush()
            self._span = span
        self._times.append(signals.now)

    def flush(self) -> None:
        """Let the present span out."""
        if self._span is None or not self._times:
            return
        signals, answer = self._span
        line = {"begins": self._begins, "times": self._times, "signals": asdict(signals), **answer._asdict()}
        self._write(self._common | line)
        self._begins = False
        self._times = []


class Difference(NamedTuple):
    """A decision that did not come out again. `now`: of the policy's clock."""

    now: float
    recorded: DecidedNumber
    again: DecidedNumber


@dataclass(frozen=True, slots=True)
class Replay:
    """What came of the decisions of one deployment. `first`: of those that differ; None: there is none."""

    deployment: str
    policy: str
    decisions: int
    differing: int
    first: Difference | None


class _SpanLine(msgspec.Struct, frozen=True):
    deployment: str
    policy: str
    begins: bool
    times: list[float]
    signals: dict[str, Any]
    replicas: int
    cause: str


def keep_decisions(ray_session: Path | None, source: str) -> EventWriter | None:
    """Where this process keeps decisions; None: it has no node, and keeps none."""
    return None if ray_session is None else EventWriter(records_folder(ray_session), source, DECISIONS, BOUNDS)


def lines_of(path: Path) -> Iterator[bytes]:
    """The lines of a file, or of all files of decisions in a folder, those of each process in order.

    Raises:
        BadRequest: it cannot be read, or there is none.
    """
    files = sorted(path.glob(f"{DECISIONS}.*{SUFFIX}")) if path.is_dir() else [path]
    if not files:
        raise BadRequest(f"{path}: no file {DECISIONS}.*{SUFFIX} is there; is scaling.record_decisions set?")
    for file in files:
        try:
            with file.open("rb") as opened:
                yield from (line for line in opened if line.endswith(b"\n"))  # one is just being written
        except OSError as error:
            raise BadRequest(f"{file} cannot be read: {error.strerror or error}") from None


def replayed(lines: Iterable[bytes]) -> list[Replay]:
    """Decide everything again, by a new policy of the same name for each that was new.

    Raises:
        BadRequest: a line is not of this kind, its policy is unknown, or the lines of a deployment begin later than its
            policy, so that nobody knows what that had seen.
    """
    policies: dict[str, ReplicaPolicy] = {}
    found: dict[str, Replay] = {}
    for number, data in enumerate(lines, 1):
        line, signals = _parsed(number, data)
        name = line.deployment
        if line.begins:
            if line.policy not in POLICIES:
                raise BadRequest(f"line {number}: {line.policy!r} is no policy", param="policy")
            policies[name] = POLICIES[line.policy]()
        elif name not in policies:
            raise BadRequest(f"line {number}: what came before, since the policy began, is missing", param="begins")
        before = found.get(name, Replay(name, line.policy, 0, 0, None))
        different = list(_different(line, signals, policies[name]))
        found[name] = Replay(
            name,
            line.policy,
            before.decisions + len(line.times),
            before.differing + len(different),
            before.first or next(iter(different), None),
        )
    return [found[name] for name in sorted(found)]


def _parsed(number: int, data: bytes) -> tuple[_SpanLine, Signals]:
    try:
        line = msgspec.json.decode(data, type=_SpanLine)
        return line, msgspec.convert(line.signals, type=Signals)
    except msgspec.ValidationError as error:
        raise BadRequest(f"line {number}: {error}", param="line") from None
    except msgspec.DecodeError as error:
        raise BadRequest(f"line {number} is no JSON: {error}", param="line") from None


def _different(line: _SpanLine, signals: Signals, policy: ReplicaPolicy) -> Iterator[Difference]:
    recorded = DecidedNumber(line.replicas, line.cause)
    for now in line.times:
        decision = policy.decide(replace(signals, now=now))
        again = DecidedNumber(decision.replicas, decision.cause.value)
        if again != recorded:
            yield Difference(now, recorded, again)
