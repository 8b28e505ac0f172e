"""Names, words, numbers and other values that questions mention and calls repeat."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random

import yaml

from serve_app.engine.tiny_model import WORDS

FILE = Path(__file__).with_name("vocabulary.yaml")
LISTS: Mapping[str, tuple[str, ...]] = {
    name: tuple(text.split()) for name, text in yaml.safe_load(FILE.read_text()).items()
}

NOUNS = WORDS[WORDS.index("large") + 1 :]  # the end of the list: nouns of this field and of daily life
ENDINGS = ("n", "r", "s", "l", "m", "ck", "th", "", "", "", "")


def invented(rng: Random) -> str:
    """A word that nobody has seen, in lower case."""
    return "".join(rng.choice(LISTS["syllables"]) for _ in range(rng.randint(2, 3))) + rng.choice(ENDINGS)


def city(rng: Random) -> str:
    place = rng.choice(LISTS["cities"]) if rng.random() < 0.5 else invented(rng).capitalize()
    return place if rng.random() < 0.9 else f"{rng.choice(('New', 'San', 'Port', 'Upper', 'East'))} {place}"


def person(rng: Random) -> str:
    first = rng.choice(LISTS["names"]) if rng.random() < 0.5 else invented(rng).capitalize()
    return first if rng.random() < 0.7 else f"{first} {invented(rng).capitalize()}"


def word(rng: Random) -> str:
    return rng.choice(NOUNS) if rng.random() < 0.6 else rng.choice(WORDS) if rng.random() < 0.5 else invented(rng)


def phrase(rng: Random) -> str:
    return " ".join(word(rng) for _ in range(rng.randint(1, 3)))


def small_number(rng: Random) -> int:
    return rng.randint(1, 9) if rng.random() < 0.5 else rng.randint(10, 99)


def number(rng: Random) -> int:
    return rng.randint(0, 10 ** rng.randint(1, 4))


def decimal(rng: Random) -> float:
    return rng.randint(1, 999) / 10


def date(rng: Random) -> str:
    return f"20{rng.randint(20, 39)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"


def clock(rng: Random) -> str:
    return f"{rng.randint(0, 23):02}:{rng.choice((0, 15, 30, 45)):02}"


def address(rng: Random) -> str:
    return f"{person(rng).split()[0].lower()}@{invented(rng)}.{rng.choice(('org', 'com', 'net'))}"


def code(rng: Random) -> str:
    letters = "".join(rng.choice("ABCDEFGHKLMNPRSTX") for _ in range(rng.randint(1, 3)))
    return f"{letters}{rng.choice(('-', '', '/'))}{number(rng)}"


# By the kind of a value: its JSON type, and how it is drawn.
KINDS: Mapping[str, tuple[str, Callable[[Random], str | int | float]]] = {
    "city": ("string", city),
    "person": ("string", person),
    "word": ("string", word),
    "phrase": ("string", phrase),
    "small": ("integer", small_number),
    "number": ("integer", number),
    "decimal": ("number", decimal),
    "date": ("string", date),
    "clock": ("string", clock),
    "address": ("string", address),
    "code": ("string", code),
    "colour": ("string", lambda rng: rng.choice(LISTS["colours"])),
    "language": ("string", lambda rng: rng.choice(LISTS["languages"])),
    "country": ("string", lambda rng: rng.choice(LISTS["countries"])),
}


def draw(kind: str, rng: Random) -> str | int | float:
    return KINDS[kind][1](rng)


def topic(rng: Random) -> str:
    """A noun phrase that a question may be about, and none that the model knows."""
    while True:
        found = _noun_phrase(rng)
        if not set(found.lower().split()) & set(LISTS["product"]):
            return found


def _noun_phrase(rng: Random) -> str:
    noun = rng.choice(NOUNS) if rng.random() < 0.7 else word(rng)
    forms = (
        f"the {noun}",
        f"the {noun}",
        f"a {noun}",
        noun,
        f"the {noun} and the {word(rng)}",
        f"the {noun} of {city(rng)}",
        f"the {noun} in the {word(rng)}",
        city(rng),
        person(rng),
        f"{word(rng)} and {word(rng)}",
        f"the {rng.choice(LISTS['colours'])} {noun}",
        f"the {word(rng)} {noun}",
    )
    return rng.choice(forms)
