"""What routing by key finds in prefix caches, and at which spread of load: `python -m benchmarks.routing [--quick]`.

Mooncake's conversations (they name the 512-token blocks that prompts share) on a model of `REPLICAS` engines: each has
`SLOTS` slots and an LRU cache of `CACHE_BLOCKS` blocks. A request takes the tokens that are not cached at
`PREFILL_RATE`, then its answer at `ITL_S` a token, both slower by what else runs there (1 + running / `SLOTS`). Who
finds no free slot waits, first come first served. The trace is played slower or faster. The key is the first two
blocks, as `request_size.prefix_key`. A model, no engine: it compares rules, its seconds are nobody's.

Arms: `two_choices` (no keys); `bounded` (the ring with the paper's bound alone); `ours` (with `FREE_SHARE`). Figures:
`found`, the share of prompt blocks that were cached; `spread`, the load of the fullest replica over the mean, averaged
over arrivals; mean and p99 of the time to the first token, in seconds.

Prints conditions, a table, and as its last line one JSON object.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from benchmarks.common.conditions import here
from benchmarks.common.output import write_json
from benchmarks.common.traces import DATA, MOONCAKE_FILE, TraceMissingError, recorded
from serve_app.core.routing import FREE_SHARE, LOAD_BOUND, BoundedRing

REPLICAS = 8
SLOTS = 16
CACHE_BLOCKS = 3000
BLOCK_TOKENS = 512
# tokens/s and seconds of an engine that runs one request
PREFILL_RATE = 8000.0
ITL_S = 0.02
KEY_BLOCKS = 2
LOADS = {"light": 0.3, "usual": 1.0, "busy": 1.6}  # speed of the trace; at 2.2 every slot is taken
QUICK_REQUESTS = 2_000


@dataclass(frozen=True, slots=True)
class Request:
    """One of the trace; `blocks` are those of its prompt."""

    at_s: float
    key: str
    blocks: tuple[str, ...]
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Result:
    """What an arm did; see the module."""

    found: float
    spread: float
    ttft_mean_s: float
    ttft_p99_s: float


Choose = Callable[[str, dict[str, int]], str | None]


def load_trace(folder: Path, most: int | None) -> list[Request]:
    """The trace's requests.

    Raises:
        TraceMissingError: it is not in the folder.
    """
    return [
        request(one.at_s, one.prefix_blocks, one.prompt_tokens, one.output_tokens)
        for one in recorded(folder, MOONCAKE_FILE)[:most]
    ]


def request(at_s: float, blocks: tuple[str, ...], prompt_tokens: int, output_tokens: int) -> Request:
    """A request with its key."""
    return Request(at_s, "/".join(map(str, blocks[:KEY_BLOCKS])), blocks, prompt_tokens, output_tokens)


def by_routing(keyed: bool, free_share: float) -> Choose:
    """Ours, or two choices."""
    routing = BoundedRing(LOAD_BOUND, free_share)
    draw = random.Random(1)

    def choose(key: str, loads: dict[str, int]) -> str | None:
        for name, load in loads.items():
            if not routing.load_bound(name):  # not added yet
                routing.set_slots(name, SLOTS)
            routing.add_load(name, load - routing.load(name))
        choice = routing.choose(key if keyed else None, draw)
        return None if choice is None else choice.replica_id

    return choose


def arms() -> dict[str, Choose]:
    """What is compared, each made anew."""
    return {
        "two_choices": by_routing(False, 0.0),
        "bounded": by_routing(True, 0.0),
        "ours": by_routing(True, FREE_SHARE),
    }


class Engines:
    """The modelled replicas."""

    def __init__(self, choose: Choose) -> None:
        self._choose = choose
        self.loads = {f"replica-{number}": 0 for number in range(REPLICAS)}
        self._caches: dict[str, OrderedDict[str, None]] = {name: OrderedDict() for name in self.loads}
        self._ends: list[tuple[float, int, str]] = []
        self._order = itertools.count()
        self._waiting: deque[Request] = deque()
        self.found = self.blocks = 0
        self.ttfts: list[float] = []

    def until(self, now: float) -> None:
        """What ends by `now` ends, and who waits takes its place."""
        while self._ends and self._ends[0][0] <= now:
            ended, _, name = heapq.heappop(self._ends)
            self.loads[name] -= 1
            while self._waiting and self._start(self._waiting[0], ended):
                self._waiting.popleft()

    def arrive(self, request: Request) -> None:
        """A request starts, or waits behind those who do."""
        if self._waiting or not self._start(request, request.at_s):
            self._waiting.append(request)

    def _start(self, request: Request, now: float) -> bool:
        name = self._choose(request.key, self.loads)
        if name is None:
            return False
        self.loads[name] += 1
        cached = self._read(self._caches[name], request.blocks)
        slower = 1 + self.loads[name] / SLOTS
        prefill_s = max(0, request.prompt_tokens - BLOCK_TOKENS * cached) / PREFILL_RATE * slower
        self.ttfts.append(now - request.at_s + prefill_s)
        ends = now + prefill_s + request.output_tokens * ITL_S * slower
        heapq.heappush(self._ends, (ends, next(self._order), name))
        self.found += cached
        self.blocks += len(request.blocks)
        return True

    @staticmethod
    def _read(cache: OrderedDict[str, None], blocks: Sequence[str]) -> int:
        """How many leading blocks were cached; all are afterwards."""
        cached = sum(1 for _ in itertools.takewhile(cache.__contains__, blocks))
        for block in blocks:
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > CACHE_BLOCKS:
            cache.popitem(last=False)
        return cached


def play(requests: Sequence[Request], speed: float, choose: Choose) -> Result:
    """The trace at a speed, under one rule."""
    engines = Engines(choose)
    spreads = []
    for request in requests:
        sooner = Request(
            request.at_s / speed, request.key, request.blocks, request.prompt_tokens, request.output_tokens
        )
        engines.until(sooner.at_s)
        engines.arrive(sooner)
        spreads.append(max(engines.loads.values()) * REPLICAS / sum(engines.loads.values()))
    engines.until(float("inf"))
    ordered = sorted(engines.ttfts)
    return Result(
        found=round(engines.found / max(1, engines.blocks), 3),
        spread=round(fmean(spreads), 2),
        ttft_mean_s=round(fmean(ordered), 2),
        ttft_p99_s=round(ordered[int(len(ordered) * 0.99)], 2),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help=f"the first {QUICK_REQUESTS} requests")
    parser.add_argument("--data", type=Path, default=DATA, help="where the trace is")
    options = parser.parse_args()
    console = Console(stderr=True, width=130)
    conditions = here()
    console.print(conditions)
    try:
        trace = load_trace(options.data, QUICK_REQUESTS if options.quick else None)
    except TraceMissingError as missing:
        raise SystemExit(f"skipped: {missing}") from missing
    table = Table("load", "arm", "found", "spread", "TTFT mean s", "TTFT p99 s", title=f"{len(trace)} requests")
    results: dict[str, dict[str, Result]] = {}
    for load, speed in LOADS.items():
        results[load] = {arm: play(trace, speed, choose) for arm, choose in arms().items()}
        for arm, r in results[load].items():
            table.add_row(load, arm, f"{r.found:.1%}", f"{r.spread:g}", f"{r.ttft_mean_s:g}", f"{r.ttft_p99_s:g}")
    console.print(table)
    plain = {load: {arm: asdict(one) for arm, one in by_arm.items()} for load, by_arm in results.items()}
    write_json({"bound": LOAD_BOUND, "free_share": FREE_SHARE, "loads": plain, "conditions": conditions})


if __name__ == "__main__":
    main()
