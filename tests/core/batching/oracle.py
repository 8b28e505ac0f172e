"""Batches by brute force: at each moment the definition is applied to everything that waits. For small cases."""

from __future__ import annotations

from dataclasses import dataclass, field

from serve_app.core.batching import FIRST_SIZE, MIN_SIZE, RECENT, BatchItem, BatchPolicy, Sizing


@dataclass(slots=True)
class Oracle:
    """The same events as `Batcher`; each returns the ids of the requests that start."""

    policy: BatchPolicy
    waiting: list[tuple[float, BatchItem]] = field(default_factory=list)  # by arrival
    running: set[str] = field(default_factory=set)
    arrivals: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    is_closed: bool = False

    def on_arrive(self, item: BatchItem, now: float) -> list[str]:
        self.waiting.append((now, item))
        self.arrivals.append(now)
        return self.start(now)

    def on_end(self, item_id: str, now: float) -> list[str]:
        self.waiting = [one for one in self.waiting if one[1].item_id != item_id]
        self.running -= {item_id}
        return self.start(now)

    def close(self, now: float) -> list[str]:
        self.is_closed = True
        return self.start(now)

    def start(self, now: float) -> list[str]:
        items = self.chosen(now)
        self.waiting = [one for one in self.waiting if one[1] not in items]
        self.running |= {item.item_id for item in items}
        if items:
            self.sizes.append(len(items))
        return [item.item_id for item in items]

    def chosen(self, now: float) -> list[BatchItem]:
        policy = self.policy
        items = [item for _, item in self.waiting]
        if policy.is_continuous:
            return items[: policy.max_size - len(self.running)]
        if self.running or not items:
            return []
        size = self.size()
        weight = sum(map(self.weight, items))
        tokens = sum(map(self.tokens, items))
        is_full = len(items) >= size if policy.weights is None else weight >= policy.max_size
        is_full = is_full or (policy.max_tokens is not None and tokens >= policy.max_tokens)
        is_late = policy.max_wait_s is not None and now >= self.waiting[0][0] + policy.max_wait_s
        if not (is_full or is_late or self.is_closed):
            return []
        return self.best(items, size)

    def best(self, items: list[BatchItem], size: int) -> list[BatchItem]:
        """Of all runs of requests, by arrival or by length, with the oldest one in them: the largest that fits, then
        the one with the least padding, then with the shortest requests."""
        line = sorted(items, key=lambda item: item.tokens) if self.policy.by_length else items
        runs = [line[a:b] for a in range(len(line)) for b in range(a + 1, len(line) + 1)]
        runs = [run for run in runs if items[0] in run and (len(run) == 1 or self.fits(run, size))]

        def rank(run: list[BatchItem]) -> tuple[int, int, int]:
            lengths = [item.tokens for item in run]
            padding = len(run) * max(lengths) - sum(lengths) if self.policy.by_length else 0
            return -len(run), padding, line.index(run[0])

        chosen = min(runs, key=rank)
        return [item for item in items if item in chosen]

    def fits(self, run: list[BatchItem], size: int) -> bool:
        most = self.policy.max_tokens
        return (
            len(run) <= size
            and sum(map(self.weight, run)) <= self.policy.max_size
            and (most is None or sum(map(self.tokens, run)) <= most)
        )

    def size(self) -> int:
        policy = self.policy
        wanted = float(self.policy.max_size)
        if policy.sizing is Sizing.RECENT_BATCHES:
            last = self.sizes[-RECENT:]
            wanted = max(MIN_SIZE, 0.9 * sum(last) / RECENT) if len(last) == RECENT else FIRST_SIZE
        elif policy.sizing is Sizing.ARRIVAL_RATE:
            last_32 = self.arrivals[-32:]
            if last_32[-1] > last_32[0]:
                wanted = max(1.0, (len(last_32) - 1) / (last_32[-1] - last_32[0]) * (policy.max_wait_s or 0.0))
        elif policy.sizing is Sizing.PROMPT_LENGTH:
            prompts = [item.prompt_tokens for _, item in self.waiting[: policy.max_size]]
            if sum(prompts) / len(prompts) >= policy.long_from:
                wanted = policy.long_size
        return int(min(wanted, policy.max_size))

    def weight(self, item: BatchItem) -> int:
        rule = self.policy.weights
        if rule is None or item.tokens < rule.long_from:
            return 1
        return max(1, min(rule.long_weight, self.policy.max_size))

    def tokens(self, item: BatchItem) -> int:
        return item.tokens if self.policy.counts_output else item.prompt_tokens
