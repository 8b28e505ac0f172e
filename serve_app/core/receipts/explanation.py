"""A receipt as text: why a request waited, was refused, or ran on its replica. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from serve_app.core.continuation import NotContinued
from serve_app.core.estimate import EstimateSource
from serve_app.core.limits import LimitReason
from serve_app.core.queue import RefusalReason, WaitReason
from serve_app.core.receipts.receipts import Receipt
from serve_app.core.receipts.slo import SloVerdict
from serve_app.core.receipts.trace import RequestTrace
from serve_app.core.routing import Route
from serve_app.types import Outcome

AT_ONCE_S = 0.005  # a shorter wait is not noticed
ROUNDING_S = 1e-5  # of the seconds by reason, which are kept in microseconds

_OUTCOMES = {
    Outcome.OK: "answered",
    Outcome.BAD_REQUEST: "refused as a bad request by the router or the engine",
    Outcome.UNAUTHORIZED: "refused: no valid key",
    Outcome.REFUSED: "refused",
    Outcome.CANCELLED_QUEUED: "the client left while it waited",
    Outcome.CANCELLED_RUNNING: "the client left while it ran",
    Outcome.ENGINE_FAILED: "the engine died under it, or could not handle it",
    Outcome.INTERNAL_ERROR: "failed by an internal error",
}
_REFUSALS: dict[str, str] = {
    LimitReason.RATE_LIMIT: "its key or tenant had used its requests or tokens a minute",
    LimitReason.CONCURRENCY: "its key or tenant had as many requests at once as it may have",
    LimitReason.ALLOWANCE: "its key or tenant had used its day's requests or tokens, or its month's budget",
    RefusalReason.QUEUE_FULL: "the queue, or its class in it, was full of requests with as much right to wait",
    RefusalReason.SHED: "a higher class or a lighter tenant needed its place in the full queue",
    RefusalReason.DEADLINE: "it could not start before its deadline",
    RefusalReason.TIMEOUT: "it could not start within the longest wait allowed",
    RefusalReason.NO_REPLICA: "no replica could serve",
    RefusalReason.NOT_CONTINUABLE: "it had begun, and no engine of the model that began it was left",
    RefusalReason.TOO_LARGE: "it needed more sequences or tokens than any replica has",
    RefusalReason.SESSIONS: "sessions held the KV tokens that it needed during the longest wait allowed",
    RefusalReason.LOST: "the router or the quota actor failed at it; their logs name the request",
    "limits_unavailable": "its limits could not be charged, since the quota actor did not answer for it",
}
_WAITS = {
    WaitReason.TURN: "other requests had their turn first",
    WaitReason.SLOTS: "no replica had enough free slots",
    WaitReason.KV_TOKENS: "no replica with free slots had enough free KV tokens",
    WaitReason.PLACEMENT: "the replicas that it could run on had nothing free; others had",
    WaitReason.KV_DEBT: "replicas with room were closed to it, as requests there needed more KV tokens than estimated",
    WaitReason.HELD_BACK: "the replica with room was held back for a larger request",
    WaitReason.GUARD_SLOTS: "the free slots were kept for higher classes",
    WaitReason.NO_REPLICA: "no replica ran yet",
    WaitReason.SESSION: "another request of its session ran",
    WaitReason.QUOTA_ACTOR: "the quota actor did not answer",
}
_REPLAYED = "Answered with the answer of the first request of its Idempotency-Key; nothing ran."
_ROUTES = {
    Route.HOME: "the home of its session or prefix",
    Route.NEXT: "next on the ring, since its home was closed or at its load bound",
    Route.TWO_CHOICES: "the less busy of two, since it had no session or prefix",
    Route.LEAST_BUSY: "the least busy, since the others were at their load bound",
}
_SOURCES = {
    EstimateSource.TENANT: "learned from this tenant",
    EstimateSource.MODEL: "learned from all of the model",
    EstimateSource.PRIOR: "before anything was learned",
}


_NOT_CONTINUED = {
    NotContinued.ENGINE: "the engines that are left cannot go on with a stream of that one",
    NotContinued.REQUEST: "what it asked for can only be finished by the engine that began it",
    NotContinued.TOO_LONG: "it had produced more than is recorded of one stream",
    NotContinued.LOSSES: "it had lost as many replicas as one request may, or reached none for the longest wait",
    NotContinued.QUEUE: "no replica took it within the longest wait",
    NotContinued.REFUSED: "the next replica could not go on with it exactly",
}
_VERDICTS = {
    SloVerdict.MET: "kept",
    SloVerdict.TTFT: "missed, the first token came too late",
    SloVerdict.ITL: "missed, the tokens came too slowly",
    SloVerdict.REFUSED: "missed by the refusal",
    SloVerdict.FAILED: "missed by the failure",
    SloVerdict.CLIENT_LEFT: "kept until the client left",
}


def explain(receipt: Receipt) -> list[str]:
    """A few lines, each a sentence, in the order of the events."""
    trace = receipt.trace
    cost = receipt.trace.measure.cost
    lines = [
        f"{receipt.request_id}: {receipt.request_class.label} request of {receipt.tenant} to {receipt.model}, "
        f"{_OUTCOMES[receipt.outcome]} after {_duration(receipt.total_s)}.",
        _REPLAYED if receipt.outcome is Outcome.OK and not receipt.granted else _waiting(receipt),
    ]
    if trace.asked_model is not None:
        left = "".join(f"; it left {model} ({reason})" for model, reason in trace.hops)
        lines.append(f"Asked for {trace.asked_model}, which stands for {receipt.model}{left}.")
    if trace.router_losses:
        lines.append("Started anew: the router that ran the first request of its Idempotency-Key had died.")
    if receipt.refused is not None:
        retry_s = receipt.retry_after_s
        advice = "" if retry_s is None else f"; the client was told to retry after {_duration(retry_s)}"
        why = _REFUSALS.get(receipt.refused, "something that it needed was away")
        lines.append(f"Refused ({receipt.refused}): {why}{advice}.")
    if trace.replica_id is not None:
        lines.append(_placement(receipt))
    if trace.preempted:
        why = "for requests before it, and went on with what it had produced"
        lines.append(f"Stopped {_times(trace.preempted)} while it ran, {why}.")
    if trace.moved:
        lines.append(f"Moved {_times(trace.moved)} off a replica that was taken away, with what it had produced.")
    if trace.continued or trace.not_continued is not None:
        lines.append(_continuation(trace))
    if receipt.slo is not None:
        promised = [] if receipt.ttft_slo_s is None else [f"first token within {_duration(receipt.ttft_slo_s)}"]
        promised += [] if receipt.itl_slo_s is None else [f"{_duration(receipt.itl_slo_s)} between tokens"]
        lines.append(f"Promised {' and '.join(promised)}: {_VERDICTS[receipt.slo]}.")
    if receipt.granted or cost.prompt_tokens or cost.output_tokens:
        lines.append(_tokens(receipt))
    if len(receipt.waits) > 1:
        lines.append(f"Waits by reason: {_by_reason(receipt.waits)}.")
    if _has_shares(receipt):
        lines.append(_first_token(receipt))
    if trace.trace_id is not None:
        lines.append(f"Trace {trace.trace_id}, {'' if trace.trace_sampled else 'not '}sampled.")
    return lines


def _waiting(receipt: Receipt) -> str:
    trace = receipt.trace
    ahead = [(who, count) for who, count in sorted(trace.ahead, reverse=True) if count > 0]
    if receipt.granted and receipt.wait_s < AT_ONCE_S:
        text = "Started at once"
    else:
        # the cause of the last wait; where no replica came after a loss, that is not the wait before its first run
        cause = None if trace.not_continued is NotContinued.QUEUE else trace.waited_for
        is_explained = ahead or cause is not None or trace.limit_wait_s >= AT_ONCE_S
        is_begun_late = receipt.granted and not is_explained  # it was checked, and its router asked for a place
        text = f"{'Started after' if is_begun_late else 'Waited'} {_duration(receipt.wait_s)}"
        if ahead:
            named = " and ".join(f"{_counted(count, 'request')} of class {who.label}" for who, count in ahead)
            text += f": {named} waited when it came"
        if trace.limit_wait_s >= AT_ONCE_S:
            text += f", {_duration(trace.limit_wait_s)} of it for a limit of its key or tenant"
        if cause is not None:
            text += f"; {_WAITS[cause]}"
    if receipt.deadline_s is not None:
        text += f"; its deadline was {_duration(receipt.deadline_s)}"
    return text + "."


def _by_reason(waits: Mapping[str, float]) -> str:
    """The longest first."""
    ordered = sorted(waits.items(), key=lambda entry: -entry[1])
    return ", ".join(f"{_duration(waited_s)} {reason}" for reason, waited_s in ordered)


def _has_shares(receipt: Receipt) -> bool:
    """Whether it is known whose part of the first token was how long: of requests with one run."""
    trace = receipt.trace
    first_s = receipt.first_token_s
    if not receipt.granted or first_s is None or trace.losses or trace.preempted or trace.moved:
        return False
    waited_s = sum(receipt.waits.values())  # of a list more than it took: its prompts wait at once
    return waited_s <= receipt.wait_s + ROUNDING_S and receipt.wait_s <= first_s + ROUNDING_S


def _first_token(receipt: Receipt) -> str:
    waited_s = sum(receipt.waits.values())
    waits = f"{_duration(waited_s)} of waits" if receipt.waits else "no wait"
    in_router = _duration(max(0.0, receipt.wait_s - waited_s))
    in_engine = _duration(max(0.0, (receipt.first_token_s or 0.0) - receipt.wait_s))
    return f"First token: {waits}, {in_router} in the router, {in_engine} in the engine."


def _placement(receipt: Receipt) -> str:
    trace = receipt.trace
    measure = receipt.trace.measure
    text = f"Ran on {trace.replica_id}"
    if trace.route is not None:
        text += f", {_ROUTES[trace.route]}"
    if receipt.session_id is not None:
        text += f" (session {receipt.session_id})"
    if measure.slots > measure.at_once:
        text += f", in {measure.slots} of its slots for {_counted(measure.at_once, 'long sequence')}"
    if trace.losses:
        text += f", after {_counted(trace.losses, 'replica')} {'was' if trace.losses == 1 else 'were'} lost under it"
    if receipt.first_token_s is not None:
        text += f"; first token after {_duration(receipt.first_token_s)}"
    if receipt.itl_s is not None:
        text += f", then {_duration(receipt.itl_s)} a token"
        if receipt.longest_gap_s is not None:
            text += f" with a pause of {_duration(receipt.longest_gap_s)} at most"
    return text + "."


def _continuation(trace: RequestTrace) -> str:
    went_on = ", ".join(f"continued on {name} after {_duration(gap_s)}" for name, gap_s in trace.continued)
    ended = ""
    if trace.not_continued is not None:
        ended = f"{'; then ' if went_on else ''}not continued ({trace.not_continued.value}): "
        ended += _NOT_CONTINUED[trace.not_continued]
        if trace.not_continued is NotContinued.QUEUE and trace.waited_for is not None:
            ended += f"; {_WAITS[trace.waited_for]}"
    return f"Its stream lost its replica in the middle: {went_on}{ended}."


def _tokens(receipt: Receipt) -> str:
    trace = receipt.trace
    cost = receipt.trace.measure.cost
    estimated = f"{cost.prompt_tokens} + {cost.output_tokens}"
    text = f"Estimated {estimated} tokens (prompt + output, {_SOURCES[cost.source]})"
    if receipt.prompt_tokens is not None:
        text += f", used {receipt.prompt_tokens} + {receipt.output_tokens or 0}"
    if trace.kv_token_s > 0.0:
        text += f"; held {trace.kv_token_s:,.0f} KV token-seconds"
    return text + "."


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 0.9995 else f"{seconds:.1f} s"
