"""The bounds of the histograms' buckets. Where vLLM has such a histogram they are its own: one panel shows both.

Invariant: ascending, and the last one is above the longest wait or prompt that is usual.
"""

from __future__ import annotations

# Seconds.
REQUEST_LATENCY_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
TIME_TO_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
INTER_TOKEN_LATENCY_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
QUEUE_WAIT_S = TIME_TO_FIRST_TOKEN_S  # the wait is a part of the first token, and compared with it
ROUTER_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)  # a quiet router needs 1 ms
CONTINUATION_GAP_S = TIME_TO_FIRST_TOKEN_S  # a prefill of what there was, after a wait for another replica

# Tokens: 1, 2, 5, 10, ... to the longest prompts there are.
REQUEST_TOKENS = (*(float(step * 10**power) for power in range(6) for step in (1, 2, 5)), 1e6)

# What was used over what was estimated: within 10% an estimate is right, and above 1 a request has to ask for more.
ESTIMATE_RATIO = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 5.0, 10.0)
