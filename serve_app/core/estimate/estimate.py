"""How many tokens a request will need, learned from ended requests.

Rules
- Prompt: its bytes times the recent tokens per byte, as the median weighted by bytes: no other ratio leaves a smaller
  total error in tokens over all prompts, and unusual texts do not move it.
- Output: a quantile of recent answers to prompts of about this size. An answer that was cut off (by its bound, by a
  client that left) counts as "this or more", so the quantile is that of answers that end by themselves. If this request
  has a bound, the estimate is min(quantile, bound), since a monotone function keeps quantiles.
- With too few observations, the next of these is used: prompts of this size of the tenant on the model, all prompts of
  the tenant on the model, the same two for all tenants of the model, a fixed prior.

Invariant: memory is bounded for any number of tenants and models; `estimate` changes no state.
"""

from __future__ import annotations

import enum
import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from serve_app.core.body_bounds import BYTES_PER_TOKEN
from serve_app.core.estimate.histogram import FadingHistogram

PRIOR_OUTPUT_TOKENS = 256  # between the means of the two public chat traces, 211 and 343
DEFAULT_QUANTILE = 0.8  # on chat traces 2 to 5% of reserved tokens stay idle and under 1% are missing; 0.9: 2 to 7%
HALF_LIFE = 500  # requests; in the Azure trace the median answer changes by half within about 2,000
MIN_SEEN = 20  # requests: at 0.8, four are above the quantile
MAX_TENANTS = 1024  # pairs of tenant and model, 14 KiB each; the least recently seen pair is dropped
MAX_MODELS = 64  # more than one system serves at a time
MAX_PROMPT_WEIGHT = 8192  # bytes: without it one unusual upload would outweigh a day of chat
KIB = 1024
_SMALLEST_OCTAVE = 9
_SIZE_CLASSES = 8  # prompts under 1 KiB, 2, 4, ... and those of 64 KiB and more
_OUTPUT_OCTAVES = 17  # up to 131,072 tokens
_RATIO_OCTAVES = 12  # 1 to 4,096 tokens per KiB


class EstimateSource(enum.StrEnum):
    """The observations from which an output estimate was learned."""

    TENANT = "tenant"
    MODEL = "model"
    PRIOR = "prior"


class RequestCost(NamedTuple):
    """The tokens that a request is estimated to need.

    Args:
        prompt_tokens: of its prompts together.
        output_tokens: of its answers together; `source`: what they were learned from.
        max_output_tokens: the most tokens of its answers together, by the client's bound; None: it names none.
    """

    prompt_tokens: int
    output_tokens: int
    source: EstimateSource
    max_output_tokens: int | None = None

    @property
    def tokens(self) -> int:
        """Prompts and answers together, at least 1."""
        return max(1, self.prompt_tokens + self.output_tokens)


@dataclass(frozen=True, slots=True)
class ObservedUse:
    """The tokens that an ended request has used.

    Args:
        prompt_bytes: as given to `estimate`.
        prompt_tokens: as counted by the engine.
        output_tokens: of all answers.
        answers: number of answers (n x prompts).
        is_cut_off: the answer did not end by itself: its bound, the context, a client that left, a failure.

    Raises:
        ValueError: a negative figure, or no answer.
    """

    tenant: str
    model: str
    prompt_bytes: int
    prompt_tokens: int
    output_tokens: int
    answers: int = 1
    is_cut_off: bool = False

    def __post_init__(self) -> None:
        if min(self.prompt_bytes, self.prompt_tokens, self.output_tokens) < 0 or self.answers < 1:
            raise ValueError(f"use out of range: {self}")


def _new_outputs() -> FadingHistogram:
    return FadingHistogram(_OUTPUT_OCTAVES, HALF_LIFE)


@dataclass(slots=True, eq=False)
class _LearnedLengths:
    """The histograms of one tenant on one model, or of a whole model."""

    ratio: FadingHistogram = field(default_factory=lambda: FadingHistogram(_RATIO_OCTAVES, HALF_LIFE))
    all_sizes: FadingHistogram = field(default_factory=_new_outputs)
    by_size: defaultdict[int, FadingHistogram] = field(default_factory=lambda: defaultdict(_new_outputs))

    def observe(self, use: ObservedUse) -> None:
        if use.prompt_bytes and use.prompt_tokens:
            per_kib = use.prompt_tokens * KIB / use.prompt_bytes
            self.ratio.add(per_kib, min(use.prompt_bytes, MAX_PROMPT_WEIGHT))
        output = use.output_tokens / use.answers
        if output == 0:
            return  # generation never began, or none was requested
        for outputs in (self.all_sizes, self.by_size[size_class(use.prompt_bytes)]):
            outputs.add(output, is_cut_off=use.is_cut_off)

    def output_histograms(self, size: int) -> Iterator[FadingHistogram]:
        """The histograms with enough observations, the most specific first."""
        for found in (self.by_size.get(size), self.all_sizes):
            if found is not None and found.seen >= MIN_SEEN:
                yield found


_Learned = OrderedDict[tuple[str, ...], _LearnedLengths]


class Estimator:
    """Learns by `observe`, predicts by `estimate`; both O(1).

    Args:
        quantile: of the answers' lengths, above 0 and below 1 (the settings check it); it may change at any time.
    """

    def __init__(self, quantile: float = DEFAULT_QUANTILE) -> None:
        self.quantile = quantile
        self.tenants: _Learned = OrderedDict()  # by model and tenant
        self.models: _Learned = OrderedDict()  # by model alone
        self._nothing = _LearnedLengths()  # of a tenant or a model that was not seen

    def estimate(self, tenant: str, model: str, prompt_bytes: int, bound: int | None = None) -> RequestCost:
        """The cost of one prompt with one answer. `bound`: on the answer, in tokens (`max_tokens`)."""
        return self.estimates(tenant, model, [prompt_bytes], bound)[0]

    def estimates(
        self, tenant: str, model: str, prompt_bytes: Sequence[int], bound: int | None = None
    ) -> list[RequestCost]:
        """As `estimate`, for each prompt of a list. O(prompts + size classes of them)."""
        own = self.tenants.get((model, tenant), self._nothing)
        common = self.models.get((model,), self._nothing)
        per_kib = _tokens_per_kib(own, common)
        found = {size: self._output(own, common, size) for size in set(map(size_class, prompt_bytes))}
        costs = list[RequestCost]()
        for size in prompt_bytes:
            output, source = found[size_class(size)]
            if bound is not None:
                output = min(output, max(0, bound))
            costs.append(RequestCost(math.ceil(size * per_kib / KIB), output, source, bound))
        return costs

    def observe(self, use: ObservedUse) -> None:
        """Learn from a request that has ended, with or without success."""
        _get_or_create(self.tenants, (use.model, use.tenant), MAX_TENANTS).observe(use)
        _get_or_create(self.models, (use.model,), MAX_MODELS).observe(use)

    def _output(self, own: _LearnedLengths, common: _LearnedLengths, size: int) -> tuple[int, EstimateSource]:
        longest_cut = 0.0
        for learned, source in ((own, EstimateSource.TENANT), (common, EstimateSource.MODEL)):
            for outputs in learned.output_histograms(size):
                found = outputs.quantile(self.quantile)
                if found is not None:
                    return math.ceil(found), source
                longest_cut = max(longest_cut, outputs.longest_censored())  # most were cut off: they are longer
        return max(PRIOR_OUTPUT_TOKENS, math.ceil(longest_cut)), EstimateSource.PRIOR


def _tokens_per_kib(own: _LearnedLengths, common: _LearnedLengths) -> float:
    for ratio in (own.ratio, common.ratio):
        if ratio.seen >= MIN_SEEN and (per_kib := ratio.quantile(0.5)) is not None:
            return per_kib
    return KIB / BYTES_PER_TOKEN


def size_class(prompt_bytes: int) -> int:
    """The size class of a prompt: 0 below 1 KiB, then one for each doubling; the last has no upper end."""
    return min(max(prompt_bytes.bit_length() - 1 - _SMALLEST_OCTAVE, 0), _SIZE_CLASSES - 1)


def _get_or_create(learned: _Learned, key: tuple[str, ...], limit: int) -> _LearnedLengths:
    """The entry of a key, created if absent and marked most recent; above `limit` the least recent one is dropped."""
    if key not in learned:
        learned[key] = _LearnedLengths()
        if len(learned) > limit:
            learned.popitem(last=False)
    learned.move_to_end(key)
    return learned[key]
