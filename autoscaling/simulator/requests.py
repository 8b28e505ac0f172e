"""One request before and after the simulation: frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from serve_app.types import Outcome, RequestClass


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """A request of a trace or of a synthetic load.

    Args:
        at_s: when it is offered, from the beginning of the load.
        session: its requests share a replica while that has room; None: it is of no session.
        prefix_blocks: hashes of the blocks of its prompt, each with all before it; empty: not known.
        is_row: a row of a batch, which is no load for scaling.
        max_tokens: the bound on its answer that its client names; None: it names none.
        fingerprint: of its body, which a client repeats after a refusal; empty: no other request has it.
        is_repeat: whether the client says that it repeats a request; None: it does not say.
    """

    at_s: float
    tenant: str
    request_class: RequestClass
    model: str
    prompt_tokens: int
    output_tokens: int
    session: str | None = None
    prefix_blocks: tuple[str, ...] = ()
    is_row: bool = False
    max_tokens: int | None = None
    fingerprint: bytes = b""
    is_repeat: bool | None = None


class RequestEnd(NamedTuple):
    """What became of a request; moments are seconds from the beginning of the simulation.

    Args:
        number: of the request, in the order of arrivals.
        granted_s, first_s: of its first grant and its first token; None: there was none.
        output_tokens: that its client has received.
        refused: why it was refused; empty: it was not.
        replica: on which it ran last; empty: it never ran.
        runs: on replicas; more than one: it was stopped for others, or lost a replica.
        again_tokens: that its later runs needed again, computed or cached: its prompt and what it had produced.
        is_in_time: whether it met the level of its class (`serve_app.core.receipts.judge`).
        estimated_tokens: of prompt and answer, before it ran: what limits charge until its end.
        retry_after_s: of one that was refused: when its client may come again; None: it was told no moment.
    """

    number: int
    request_class: RequestClass
    tenant: str
    model: str
    offered_s: float
    granted_s: float | None
    first_s: float | None
    ended_s: float
    prompt_tokens: int
    output_tokens: int
    outcome: Outcome
    refused: str
    replica: str
    runs: int
    again_tokens: int
    is_in_time: bool
    estimated_tokens: int = 0
    retry_after_s: float | None = None
