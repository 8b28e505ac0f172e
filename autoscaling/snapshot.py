"""What a policy saw at a decision, for events and for people: by class, the waits, the rates, what is used and free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoscaling.policies import ClassSignals, Decision, Signals

COUNTED = ("running", "target", "waiting", "granted", "executing")
# Shown where they are not zero, rounded: a snapshot is written again when one of them has changed.
ROUNDED = {
    "waiting_tokens": 0,
    "oldest_wait_s": 0,
    "arrived_tokens_s": 0,
    "served_tokens_s": 0,
    "kv_use": 2,
    "slot_use": 2,
    "starting_s": 0,
}
STALE = "not every router has reported its numbers"


def snapshot_of(signals: Signals, decision: Decision) -> Mapping[str, Any]:
    """What a deployment had at a decision, for its events. What is missing is zero or not known."""
    figures: dict[str, Any] = {name: getattr(signals, name) for name in COUNTED}
    rounded = {name: round(getattr(signals, name), digits) for name, digits in ROUNDED.items()}
    figures |= {name: value for name, value in rounded.items() if value}
    if signals.classes:
        figures["classes"] = {one.request_class: _class_figures(one) for one in signals.classes}
    if signals.room is not None:
        figures["room"] = signals.room
    if not signals.complete:
        figures["complete"] = False
    return figures | {"wanted": decision.replicas, "reason": decision.reason}


def shown(signals: Signals) -> str:
    """The same as one line of text, without what the reason of a decision has."""
    parts = [] if signals.complete else [STALE]
    parts += [_class_text(one) for one in signals.classes]
    if signals.arrived_tokens_s or signals.served_tokens_s:
        parts.append(f"{signals.arrived_tokens_s:.0f} tokens/s arrive, {signals.served_tokens_s:.0f} are served")
    if signals.kv_use or signals.slot_use:
        parts.append(f"{signals.kv_use:.0%} of the KV cache and {signals.slot_use:.0%} of the slots in use")
    if signals.starting_s:
        parts.append(f"a replica has been starting for {signals.starting_s:.0f} s")
    if signals.room is not None:
        parts.append(f"room for {signals.room} more")
    return "; ".join(parts)


def _class_figures(counts: ClassSignals) -> dict[str, Any]:
    known = {
        "waiting": round(counts.waiting),
        "granted": round(counts.granted),
        "late": round(counts.late),
        "oldest_wait_s": round(counts.oldest_wait_s),
    }
    forecast = {} if counts.forecast_s is None else {"forecast_s": round(counts.forecast_s)}
    return {name: value for name, value in known.items() if value} | forecast


def _class_text(counts: ClassSignals) -> str:
    if not counts.waiting:
        return f"{counts.request_class}: {counts.granted:.0f} run"
    last = "" if counts.forecast_s is None else f", the last starts in {counts.forecast_s:.0f} s"
    waits = f"{counts.waiting:.0f} wait, the oldest for {counts.oldest_wait_s:.0f} s{last}"
    return f"{counts.request_class}: {counts.granted:.0f} run, {waits}"
