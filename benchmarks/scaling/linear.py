"""Whether throughput grows with the replicas: `python -m benchmarks.scaling --linear`.

A stack for each number of simulated engines, all else the same: HTTP, keys, routers, the quota actor's queue. Clients
ask without pause, half as many again as there are slots. A simulated step takes `STEP_S` whatever runs, so an engine's
own rate is known, and what is missing is the stack's, on the cores of this machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.common.scaling_stack import MODEL, Clients, stack

REPLICA_COUNTS = (1, 2, 4, 8)
SLOTS = 8  # of an engine
STEP_S = 0.1  # slow enough that two cores can relay the tokens of 64 slots
TOKENS = 32  # of an answer
WARM_S = 5.0
WINDOW_S = 20.0
LINEAR = 0.9  # of N times the rate of one replica [bar]
MORE_CPUS = 4  # logical ones, for what is not an engine


def configuration(replicas: int) -> dict[str, Any]:
    model = {
        "name": MODEL,
        "engine": "simulated",
        "max_num_seqs": SLOTS,
        "session_slots": 0,
        "replicas": {"min_replicas": replicas, "max_replicas": replicas},
        "simulated": {"decode_step_s": STEP_S},
    }
    return {"models": [model], "admission": {"max_queued": 1000, "max_wait_s": 300.0}}


def measure(replicas: int) -> float:
    """Answers a second. Raises BenchmarkError: the stack does not come up."""
    with stack(configuration(replicas), cpus=replicas + MORE_CPUS) as stage:
        clients = Clients(stage, SLOTS * replicas * 3 // 2, TOKENS)
        clients.start()
        time.sleep(WARM_S)
        began = time.monotonic()
        before = clients.answered
        time.sleep(WINDOW_S)
        rate = (clients.answered - before) / (time.monotonic() - began)
        clients.finish()
    return rate


def linear(tell: Callable[[str], None], rate_of: Callable[[int], float] = measure) -> dict[str, Any]:
    """The rates, their share of N times the first, and the verdict on the field's 'linear scaling'."""
    rates = {}
    for replicas in REPLICA_COUNTS:
        rates[replicas] = rate_of(replicas)
        tell(f"  {replicas} replicas: {rates[replicas]:.2f} answers/s")
    return result(rates)


def result(rates: Mapping[int, float]) -> dict[str, Any]:
    single = rates[min(rates)] / min(rates)
    shares = {replicas: rate / (replicas * single) for replicas, rate in rates.items()}
    return {
        "answers_per_s": {str(replicas): round(rate, 2) for replicas, rate in rates.items()},
        "share_of_linear": {str(replicas): round(share, 3) for replicas, share in shares.items()},
        "bar": LINEAR,
        "claim": "throughput grows linearly with replicas",
        "verdict": "confirmed" if min(shares.values()) >= LINEAR else "refuted",
    }
