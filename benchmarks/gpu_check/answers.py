"""Greedy answers beside each other: equal, different where two tokens tie, or different. Pure.

Two kernels, or one with batches of two shapes, round differently. Where the two likeliest tokens are closer than the
given bound either is right; what follows such a place cannot be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Answer:
    """A completion as token ids. `margins`: at each token, nats between the two likeliest; empty: not asked for.
    `error`: the code of the error that ended its stream."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str
    margins: tuple[float, ...] = ()
    error: str = ""

    def rest(self, cut: int) -> Answer:
        """What comes after `cut` tokens; its text is not known."""
        return Answer(self.prompt + self.tokens[:cut], self.tokens[cut:], "", self.margins[cut:])


@dataclass(frozen=True, slots=True)
class Agreement:
    """How many answers are equal, and where the others begin to differ."""

    equal: int
    ties: tuple[str, ...]
    differences: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Nothing differs beyond a tie, and something was compared to its end."""
        return not self.differences and self.equal > 0

    def as_figures(self) -> dict[str, object]:
        return {
            "equal": self.equal,
            "different at a tie": len(self.ties),
            "different": len(self.differences),
            "first difference": next(iter((*self.differences, *self.ties)), "none"),
        }


def compare(pairs: Sequence[tuple[str, Answer, Answer]], tie_nats: float) -> Agreement:
    """Each pair: its name, the answer with `margins`, and the one that is to equal it. Texts count where both are
    known."""
    equal = 0
    ties = list[str]()
    differences = list[str]()
    for name, wanted, got in pairs:
        place = first_difference(wanted.tokens, got.tokens)
        if place is None:
            if wanted.text and got.text and wanted.text != got.text:
                differences.append(f"{name}: the same tokens as another text")
            else:
                equal += 1
            continue
        ends = [str(one.tokens[place]) if place < len(one.tokens) else "the end" for one in (wanted, got)]
        margin = wanted.margins[place] if place < min(len(wanted.margins), len(got.tokens)) else None
        description = f"{name}, token {place}: {ends[0]} and {ends[1]}"
        description += "" if margin is None else f", the two likeliest {margin:.3g} nats apart"
        (ties if margin is not None and margin <= tie_nats else differences).append(description)
    return Agreement(equal, tuple(ties), tuple(differences))


def first_difference(wanted: Sequence[int], got: Sequence[int]) -> int | None:
    """The first place where two sequences differ, or one ends; None: they are equal."""
    for place, (token, other) in enumerate(zip(wanted, got, strict=False)):
        if token != other:
            return place
    return None if len(wanted) == len(got) else min(len(wanted), len(got))
