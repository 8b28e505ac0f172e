"""How much of a replica's batch a sequence takes by its length: many short ones may run at once, few long ones. Pure.

A batch of 64 slots takes 64 short sequences, or 16 long ones where a long one weighs 4, or any mixture in proportion.

Invariant: a request weighs no less than its sequences, so slots granted within a replica's are sequences within its
batch; and no more than a whole replica where its sequences fit one, so whatever could run before still can.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LengthRule:
    """Sequences of `long_from` tokens and more, prompt and output, weigh `long_weight` slots; all others one.

    Raises:
        ValueError: a figure below 1.
    """

    long_from: int
    long_weight: int

    def __post_init__(self) -> None:
        if self.long_from < 1 or self.long_weight < 1:
            raise ValueError(f"out of range: {self}")

    @classmethod
    def of_batch(cls, sequences: int, long_sequences: int, long_from: int) -> LengthRule:
        """By how many of each fill a batch; never more long ones, fewer where the one does not divide the other."""
        return cls(long_from, -(-sequences // max(1, long_sequences)))

    def slots(self, sequences: int, tokens_each: float, largest: int) -> int:
        """What a request takes.

        Args:
            tokens_each: what each of its sequences is estimated to come to.
            largest: the slots of the largest replica.
        """
        if tokens_each < self.long_from:
            return sequences
        return max(sequences, min(sequences * self.long_weight, largest))
