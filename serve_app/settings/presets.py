"""What `preset` of a model stands for: defaults of other settings, chosen together for one aim.

The field's dynamic batching has three bounds: how many requests a batch waits for, how long it waits for them, and how
many tokens it may hold (balanced 32, 50 ms, 8192; latency 8 and 10 ms; throughput 64 and 100 ms). With continuous
batching

- the size is `max_num_seqs`: what a step runs at most; it starts with whoever is there;
- the token budget is `max_num_batched_tokens`: what one step may read. A long prompt is read in pieces of it, and the
  others' next tokens wait for each piece. 2048 and 16384 are vLLM's own choices for a server on a small GPU and for
  offline work on a large one;
- the wait is nobody's: a request joins at the next step, some milliseconds later. What remains of the bargain behind
  it, fuller batches for longer waits, is how full replicas are before another one is started:
  `target_ongoing_requests`, five eighths of the batch (the field's 20 of 32).

`session_slots` stay a quarter of the batch: what sessions run beside it slows its steps, too. vLLM's mode
"interactivity" captures CUDA graphs for each small batch, so that a step of 3 is not padded to 4 (on the CPU it does
nothing); its mode "throughput" only raises bounds that are set here.

Invariant: what the user sets is never touched, even where it is set to null.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Settings of a model; a mapping in it has defaults for the keys inside that setting.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "latency": {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 2048,
        "session_slots": 2,
        "replicas": {"target_ongoing_requests": 5.0},
        "extra_engine_args": {"performance_mode": "interactivity"},
    },
    "balanced": {
        "max_num_seqs": 32,
        "max_num_batched_tokens": 8192,
        "session_slots": 8,
        "replicas": {"target_ongoing_requests": 20.0},
    },
    "throughput": {
        "max_num_seqs": 64,
        "max_num_batched_tokens": 16384,
        "session_slots": 16,
        "replicas": {"target_ongoing_requests": 40.0},
    },
}
# A pooling model has no sessions, and reads a prompt whole, so vLLM has to find the budget from the length itself.
ONLY_GENERATING = ("max_num_batched_tokens", "session_slots")


def with_preset(given: Mapping[str, Any]) -> dict[str, Any]:
    """A model's settings as the user wrote them, with the defaults of their preset, if they name one that exists."""
    preset = given.get("preset")
    defaults = PRESETS.get(preset, {}) if isinstance(preset, str) else {}
    found = dict(given)
    for name, default in defaults.items():
        if name in ONLY_GENERATING and given.get("task", "generate") != "generate":
            continue
        if not isinstance(default, Mapping):
            found.setdefault(name, default)
        elif isinstance(inner := found.get(name, {}), Mapping):
            found[name] = {**default, **inner}
    return found
