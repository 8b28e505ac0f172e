"""What routers and the quota actor tell each other of requests with an `Idempotency-Key`.

A claim names its request by digests of the key and the body, so the actor sees neither. A *run* is one execution of the
request; its name is the id of the request that runs, so no two runs have the same.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from serve_app.core.messages import message

Generation = tuple[int, int]  # of what the actor knows from one router; another one: the actor knows nothing from it
KEPT_S = 600.0  # a client's retries are over within minutes: the OpenAI SDK's own time limit is ten


class ClaimState(enum.IntEnum):
    """The life of a claim; a higher value is later."""

    RUNNING = 0
    NOT_KEPT = 1  # it was answered, and its answer was too long to keep
    KEPT = 2


@message
@dataclass(frozen=True, slots=True)
class Claim:
    """One key of one tenant.

    Args:
        key: digest of the key.
        fingerprint: digest of operation and body.
        routers: the router that runs it; of a kept answer, the routers that keep it.
        restarts: how many runs were lost with their router before this one.
    """

    tenant: str
    key: bytes
    fingerprint: bytes
    run: str
    state: ClaimState
    routers: tuple[str, ...]
    restarts: int = 0


@message
@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """A router asks what becomes of a request. Asking again with the same `run` changes nothing.

    Args:
        run: the name of the run, if the request runs at this router.
        may_run: False: the router only looks for the answer.
        gone: a router and a run: this router does not have that run or its answer (any more).
    """

    router: str
    tenant: str
    key: bytes
    fingerprint: bytes
    run: str
    may_run: bool = True
    gone: tuple[str, str] | None = None


class ClaimVerdict(enum.Enum):
    """What becomes of a request."""

    RUN = "run"  # at the router that asks
    JOIN = "join"  # it runs at `routers`
    KEPT = "kept"  # `routers` keep its answer
    NOT_KEPT = "not_kept"  # it was answered, and the answer was not kept
    REUSED = "reused"  # the key is claimed for another body
    LOST = "lost"  # its routers died too often
    FULL = "full"  # the tenant has too many claims that run
    UNKNOWN = "unknown"  # there is nothing to find, for a router that only looks
    WAIT = "wait"  # not known yet: ask again


@message
@dataclass(frozen=True, slots=True)
class ClaimReply:
    """The actor's answer to a claim. `restarts` as in `Claim`."""

    verdict: ClaimVerdict
    run: str = ""
    routers: tuple[str, ...] = ()
    restarts: int = 0


@message
@dataclass(frozen=True, slots=True)
class ClaimReport:
    """What a router has.

    Args:
        generation: as the actor has answered the last report.
        claims: some of its claims, each with the seconds since its state changed.
        running: the names of all runs at this router, those included that it has just asked for.
        is_whole: it has reported every claim it has since it was answered this generation.
    """

    router: str
    generation: Generation | None
    claims: tuple[tuple[Claim, float], ...] = ()
    running: frozenset[str] | None = None
    is_whole: bool = False
