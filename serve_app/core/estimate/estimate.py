"""How many tokens a request will need, learned from those that have ended.

Rules
- Prompt: its bytes times the tokens per byte seen of late, the median weighted by bytes: no other ratio leaves a
  smaller error in tokens, all prompts together, and odd texts do not move it.
- Output: a quantile of the answers seen of late to prompts of about this size. An answer that was cut off (its bound, a
  client that left) counts as "this or more", so the quantile is that of answers left to end by themselves; with a bound
  on this one it is min(quantile, bound), since a quantile passes through any monotone function.
- Where too little has been seen: prompts of this size of the tenant on the model, then all of the tenant's, then those
  of all tenants, then what is true of most.

Invariant: memory is bounded whatever the tenants and models are; `estimate` changes no estimate.
"""

from __future__ import annotations

import enum
import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from serve_app.core.estimate.histogram import FadingHistogram

PRIOR_BYTES_PER_TOKEN = 4  # of English text in today's vocabularies
PRIOR_OUTPUT_TOKENS = 256  # between the means of the two public chat traces, 211 and 343
DEFAULT_QUANTILE = 0.8  # on chat traces 2 to 5% of what is reserved stays idle and under 1% is missing; 0.9: 2 to 7%
HALF_LIFE = 500  # requests; in the Azure trace the median answer moves by half within some two thousand
MIN_SEEN = 20  # requests: at 0.8, four are above the quantile
MAX_TENANTS = 1024  # pairs of tenant and model, the least recently seen is forgotten: 14 KiB each
MAX_MODELS = 64  # more than one system serves at a time
MAX_PROMPT_WEIGHT = 8192  # bytes: above it one odd upload would outweigh a day of chat
KIB = 1024
_SMALLEST_OCTAVE, _SIZES = 9, 8  # prompts under 1 KiB, 2, 4, ... and those of 64 KiB and more
_OUTPUT_OCTAVES = 17  # up to 131,072 tokens
_RATIO_OCTAVES = 12  # 1 to 4,096 tokens per KiB

_Key = TypeVar("_Key")


class Source(enum.StrEnum):
    """What an output estimate was learned from."""

    TENANT = "tenant"
    MODEL = "model"
    PRIOR = "prior"


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a request will need, in tokens: its prompt, and each of its answers."""

    prompt_tokens: int
    output_tokens: int
    source: Source


@dataclass(frozen=True, slots=True)
class Use:
    """What an ended request has needed.

    Args:
        prompt_bytes: as given to `estimate`.
        prompt_tokens: as the engine counted them.
        output_tokens: of all answers.
        answers: how many there were (n x prompts).
        cut: the answer was not left to end by itself: its bound, the context, a client that left, a failure.

    Raises:
        ValueError: a negative figure, or no answer.
    """

    tenant: str
    model: str
    prompt_bytes: int
    prompt_tokens: int
    output_tokens: int
    answers: int = 1
    cut: bool = False

    def __post_init__(self) -> None:
        if min(self.prompt_bytes, self.prompt_tokens, self.output_tokens) < 0 or self.answers < 1:
            raise ValueError(f"use out of range: {self}")


class _Learned:
    """Of one tenant on one model, or of a whole model."""

    __slots__ = ("all_sizes", "by_size", "ratio")

    def __init__(self) -> None:
        self.ratio = FadingHistogram(_RATIO_OCTAVES, HALF_LIFE)
        self.all_sizes = FadingHistogram(_OUTPUT_OCTAVES, HALF_LIFE)
        self.by_size: dict[int, FadingHistogram] = {}

    def observe(self, use: Use) -> None:
        if use.prompt_bytes and use.prompt_tokens:
            per_kib = use.prompt_tokens * KIB / use.prompt_bytes
            self.ratio.add(per_kib, min(use.prompt_bytes, MAX_PROMPT_WEIGHT))
        output = use.output_tokens / use.answers
        if output == 0:
            return  # it never began, or nothing was to be generated
        self.all_sizes.add(output, cut=use.cut)
        size = size_of(use.prompt_bytes)
        if size not in self.by_size:
            self.by_size[size] = FadingHistogram(_OUTPUT_OCTAVES, HALF_LIFE)
        self.by_size[size].add(output, cut=use.cut)

    def outputs(self, size: int) -> Iterator[FadingHistogram]:
        """From the most telling on, those with enough in them."""
        for found in (self.by_size.get(size), self.all_sizes):
            if found is not None and found.seen >= MIN_SEEN:
                yield found


class Estimator:
    """Learns from `observe`, answers `estimate`; both O(1).

    Args:
        quantile: of the answers, 0 to 1.

    Raises:
        ValueError: a quantile out of range.
    """

    def __init__(self, quantile: float = DEFAULT_QUANTILE) -> None:
        self.configure(quantile)
        self._tenants: OrderedDict[tuple[str, str], _Learned] = OrderedDict()  # by model and tenant
        self._models: OrderedDict[str, _Learned] = OrderedDict()

    def configure(self, quantile: float) -> None:
        """Answer with another quantile of what was learned; raises as the constructor."""
        if not 0.0 < quantile < 1.0:
            raise ValueError(f"quantile is {quantile}")
        self._quantile = quantile

    def __len__(self) -> int:
        """Pairs of tenant and model that are remembered."""
        return len(self._tenants)

    def estimate(self, tenant: str, model: str, prompt_bytes: int, bound: int | None = None) -> Estimate:
        """What a request will need. `bound`: on each answer, in tokens (`max_tokens`)."""
        own, common = self._tenants.get((model, tenant)), self._models.get(model)
        prompt_tokens = self._prompt(own, common, prompt_bytes)
        output, source = self._output(own, common, size_of(prompt_bytes))
        if bound is not None:
            output = min(output, max(0, bound))
        return Estimate(prompt_tokens, output, source)

    def observe(self, use: Use) -> None:
        """A request has ended, however it did."""
        _recent(self._tenants, (use.model, use.tenant), MAX_TENANTS).observe(use)
        _recent(self._models, use.model, MAX_MODELS).observe(use)

    def _prompt(self, own: _Learned | None, common: _Learned | None, prompt_bytes: int) -> int:
        for learned in (own, common):
            if learned is not None and learned.ratio.seen >= MIN_SEEN:
                per_kib = learned.ratio.quantile(0.5)
                if per_kib is not None:
                    return math.ceil(prompt_bytes * per_kib / KIB)
        return -(-prompt_bytes // PRIOR_BYTES_PER_TOKEN)

    def _output(self, own: _Learned | None, common: _Learned | None, size: int) -> tuple[int, Source]:
        longest_cut = 0.0
        for learned, source in ((own, Source.TENANT), (common, Source.MODEL)):
            for outputs in () if learned is None else learned.outputs(size):
                found = outputs.quantile(self._quantile)
                if found is not None:
                    return math.ceil(found), source
                longest_cut = max(longest_cut, outputs.longest_cut())  # most were cut: they are longer than that
        return max(PRIOR_OUTPUT_TOKENS, math.ceil(longest_cut)), Source.PRIOR


def size_of(prompt_bytes: int) -> int:
    """Which class of sizes a prompt is of: 0 below 1 KiB, then one for each doubling, the last is open."""
    return min(max(prompt_bytes.bit_length() - 1 - _SMALLEST_OCTAVE, 0), _SIZES - 1)


def _recent(learned: OrderedDict[_Key, _Learned], key: _Key, most: int) -> _Learned:
    """The one of this key, new if need be, as the most recent; the least recent goes where there are too many."""
    found = learned.get(key)
    if found is None:
        found = learned[key] = _Learned()
        if len(learned) > most:
            learned.popitem(last=False)
    learned.move_to_end(key)
    return found
