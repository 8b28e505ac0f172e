"""How many slots of a replica's batch a sequence takes by its length, so that fewer long sequences run at once. Pure.

A batch of 64 slots takes 64 short sequences, or 16 long ones if a long one weighs 4, or any mixture in proportion.

Invariant: a request takes at least as many slots as it has sequences, so grants within a replica's slots are sequences
within its batch; and no more than the largest replica if its sequences fit there, so every request that fits without
this rule fits with it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LengthRule:
    """Sequences of `long_from` tokens and more, prompt and output, weigh `long_weight` slots; all others one.

    Both are 1 at least (the settings check it).
    """

    long_from: int
    long_weight: int

    @classmethod
    def of_batch(cls, sequences: int, long_sequences: int, long_from: int) -> LengthRule:
        """The rule by which `sequences` short or `long_sequences` long ones fill a batch; the weight is rounded up."""
        return cls(long_from, -(-sequences // max(1, long_sequences)))

    def slots(self, sequences: int, tokens_each: float, largest: int) -> int:
        """The slots that a request takes.

        Args:
            tokens_each: the estimated tokens of each of its sequences, prompt and output.
            largest: the slots of the largest replica.
        """
        if tokens_each < self.long_from:
            return sequences
        return max(sequences, min(sequences * self.long_weight, largest))
