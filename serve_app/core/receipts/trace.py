"""What is known of a request: its measure, taken once from its body, and its trace, filled in on its way. Pure.

Invariant: a measure never changes. A fact of a trace is in the request's receipt, under its own name, unless it is one
of `NOT_IN_RECEIPTS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any, NamedTuple

from serve_app.core.continuation import NotContinued
from serve_app.core.estimate import EstimateSource, RequestCost
from serve_app.core.queue import WaitReason
from serve_app.core.routing import AffinityKey, Route, TargetReason
from serve_app.types import RequestClass

MAX_CONTINUED = 8  # the prompts of a list have more than one stream, which has two at most
MAX_HOPS = 8  # a request that left more models waited at each
MAX_TEXT_CHARS = 256  # of an id or a name; those that this system makes are shorter
NOT_IN_RECEIPTS = frozenset({"measure", "reason", "waited_s", "is_row"})
NO_COST = RequestCost(0, 0, EstimateSource.PRIOR)


class RequestMeasure(NamedTuple):
    """What a body says of its request, read once, when it arrives.

    Args:
        prompt_bytes: of what may reach the model's input.
        sequences: that it runs: `n` times its prompts, or the texts of embeddings and scores; 0: it takes no slot.
        answers: the choices, embeddings or scores of its answer.
        is_large: reading it would hold up an event loop or a tokenizer (`core.body_bounds`).
        is_preemptible: it can be stopped while it runs, and continued without loss (`core.continuation`).
        cost: as estimated.
        slots: of a replica's batch that it takes.
        key: what its replica is chosen by; None: nothing.
    """

    prompt_bytes: int = 0
    sequences: int = 0
    answers: int = 1
    is_large: bool = False
    is_preemptible: bool = False
    cost: RequestCost = NO_COST
    slots: int = 0
    key: AffinityKey | None = None

    @property
    def at_once(self) -> int:
        """Sequences that its slots run at once: texts wait inside the engine, each for the one before it."""
        return min(self.sequences, self.slots)

    @classmethod
    def total(cls, parts: Sequence[RequestMeasure]) -> RequestMeasure:
        """What the parts of a list come to together; at least one."""
        costs = [part.cost for part in parts]
        bounds = [cost.max_output_tokens for cost in costs if cost.max_output_tokens is not None]
        cost = RequestCost(
            prompt_tokens=sum(cost.prompt_tokens for cost in costs),
            output_tokens=sum(cost.output_tokens for cost in costs),
            source=costs[0].source,
            max_output_tokens=sum(bounds) if len(bounds) == len(costs) else None,
        )
        return cls(
            prompt_bytes=sum(part.prompt_bytes for part in parts),
            sequences=sum(part.sequences for part in parts),
            answers=sum(part.answers for part in parts),
            cost=cost,
            slots=sum(part.slots for part in parts),
        )


NOT_MEASURED = RequestMeasure()


@dataclass(slots=True)
class RequestTrace:
    """What happened to a request on its way.

    Args:
        measure: with which it came to the queue; `NOT_MEASURED`: it did not.
        is_row: whether it is a row of a batch.
        limit_wait_s: seconds that it waited aside, until a limit of its key or tenant let it into the queue.
        router_losses: earlier runs under its Idempotency-Key that were lost with their router.
        ahead: requests of its class and above, of all tenants, that waited when it arrived, by class.
        waited_s: seconds between its last arrival in the queue and the grant.
        waited_for: what it waited for then; None: for nothing, or it was not granted.
        replica_id: the replica to which it was submitted last.
        reason: the reason for that replica; `route`: the rule that chose it, None: the queue did.
        losses: replicas that were lost while it ran on them.
        preempted: how often it was stopped for others; `moved`: since its replica drained.
        continued: the replicas on which its stream continued after a loss, each with the seconds until it did.
        not_continued: why its stream ended when it lost its replica.
        kv_token_s: KV tokens held, times seconds.
        trace_id: of OpenTelemetry's trace, in hex; None: traces are off.
        trace_sampled: whether its spans go to the collector.
        asked_model: the name that its client sent, if it is no model's own (`core.names`); None: it is.
        hops: the models of that name that it left, in order, each with the `HopReason`.
        is_shadow: it is the second run of a request, on the shadow of its name, for nobody.
    """

    measure: RequestMeasure = NOT_MEASURED
    is_row: bool = False
    limit_wait_s: float = 0.0
    router_losses: int = 0
    ahead: tuple[tuple[RequestClass, int], ...] = ()
    waited_s: float = 0.0
    waited_for: WaitReason | None = None
    replica_id: str | None = None
    reason: TargetReason = TargetReason.MOST_FREE
    route: Route | None = None
    losses: int = 0
    preempted: int = 0
    moved: int = 0
    continued: tuple[tuple[str, float], ...] = ()
    not_continued: NotContinued | None = None
    kv_token_s: float = 0.0
    trace_id: str | None = None
    trace_sampled: bool = False
    asked_model: str | None = None
    hops: tuple[tuple[str, str], ...] = ()
    is_shadow: bool = False

    @classmethod
    def total(cls, parts: Sequence[RequestTrace]) -> RequestTrace:
        """The trace of a list from those of its prompts, at least one: that of the longest wait, with the sums."""
        return replace(
            max(parts, key=lambda part: part.waited_s),
            measure=RequestMeasure.total([part.measure for part in parts]),
            losses=sum(part.losses for part in parts),
            preempted=sum(part.preempted for part in parts),
            moved=sum(part.moved for part in parts),
            continued=tuple(one for part in parts for one in part.continued),
            not_continued=next((part.not_continued for part in parts if part.not_continued), None),
            kv_token_s=sum(part.kv_token_s for part in parts),
        )

    def bounded(self) -> RequestTrace:
        """A copy of bounded size, as receipts keep it."""
        return replace(
            self,
            replica_id=None if self.replica_id is None else self.replica_id[:MAX_TEXT_CHARS],
            ahead=self.ahead[: len(RequestClass)],
            continued=tuple((name[:MAX_TEXT_CHARS], gap_s) for name, gap_s in self.continued[:MAX_CONTINUED]),
            hops=self.hops[:MAX_HOPS],
        )

    def to_json_fields(self) -> dict[str, Any]:
        """What its receipt says of it: each fact by its name, and of its measure what the queue has reckoned with."""
        facts = dict(zip(_FACT_NAMES, _fact_values(self), strict=True))
        measure = self.measure
        return facts | {
            "ahead": {who.label: count for who, count in self.ahead},
            "sequences": measure.at_once,
            "slots": measure.slots,
            "estimated_prompt": measure.cost.prompt_tokens,
            "estimated_output": measure.cost.output_tokens,
            "source": measure.cost.source,
        }

    @classmethod
    def from_json_fields(cls, values: Mapping[str, Any]) -> RequestTrace:
        """The trace that a receipt with these fields has shown."""
        cost = RequestCost(values["estimated_prompt"], values["estimated_output"], EstimateSource(values["source"]))
        return cls(
            measure=RequestMeasure(sequences=values["sequences"], cost=cost, slots=values["slots"]),
            ahead=tuple((RequestClass[label.upper()], count) for label, count in values["ahead"].items()),
            waited_for=None if values["waited_for"] is None else WaitReason(values["waited_for"]),
            route=None if values["route"] is None else Route(values["route"]),
            continued=tuple((name, gap_s) for name, gap_s in values["continued"]),
            not_continued=None if values["not_continued"] is None else NotContinued(values["not_continued"]),
            asked_model=values.get("asked_model"),  # a router of the release before has neither
            hops=tuple((model, reason) for model, reason in values.get("hops", ())),
            is_shadow=values.get("is_shadow", False),
            **{name: values[name] for name in _PLAIN_FACTS},
        )


_FACT_NAMES = tuple(one.name for one in fields(RequestTrace) if one.name not in NOT_IN_RECEIPTS)
_fact_values = attrgetter(*_FACT_NAMES)

# Facts that are the same as JSON.
_PLAIN_FACTS = (
    "limit_wait_s",
    "router_losses",
    "replica_id",
    "losses",
    "preempted",
    "moved",
    "kv_token_s",
    "trace_id",
    "trace_sampled",
)
