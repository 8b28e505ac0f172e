"""Words to say again, and numbers to count."""

from __future__ import annotations

from random import Random

from scripts.tiny import values
from scripts.tiny.spans import Spans, given, plain

NUMERALS = values.LISTS["numerals"]
SAY_AGAIN = (
    "Say {}", "Say {}.", "Repeat {}.", "Repeat: {}", "Repeat after me: {}", "Say the words {}.", 'Say "{}".', "Echo {}",
    'Repeat "{}"', "Say it after me: {}", "Write {}.", "Answer with {}.", "Say only {}.", "Reply with the words {}.",
    'Answer "{}".',
)  # fmt: skip
COUNT = (
    "Count to {}",
    "Count to {}.",
    "Count up to {}.",
    "Count from one to {}.",
    "Please count to {}.",
    "Can you count to {}?",
)


def dialogue(rng: Random) -> Spans:
    """One to three turns of copying."""
    spans: Spans = ()
    for _ in range(rng.choice((1, 1, 2, 3))):
        asked, answered = counted(rng) if rng.random() < 0.15 else again(rng)
        spans += (*given("user", asked), *plain(answered))
    return spans


def counted(rng: Random) -> tuple[str, str]:
    """A question to count, by words or digits, and the numbers."""
    last = rng.randint(2, len(NUMERALS))
    form = rng.choice(COUNT)
    if rng.random() < 0.5:
        return form.format(NUMERALS[last - 1]), ", ".join(NUMERALS[:last]) + "."
    return form.replace("one", "1").format(last), ", ".join(str(number) for number in range(1, last + 1)) + "."


def again(rng: Random) -> tuple[str, str]:
    """A question to say something, and that."""
    kind = rng.choice(
        ("word", "phrase", "phrase", "phrase", "city", "person", "number", "code", "clock", "date", "address")
    )
    text = str(values.draw(kind, rng))
    if rng.random() < 0.4:
        text += f" {values.draw(rng.choice(list(values.KINDS)), rng)}"
    return rng.choice(SAY_AGAIN).format(text), text
