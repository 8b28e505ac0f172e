"""Answers in JSON: what a question says, what keys ask for, and short values for all else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from random import Random
from typing import Any

from scripts.tiny import values
from scripts.tiny.spans import FORCED, LEARNED, Span, Spans, answer, given
from scripts.tiny.topics import pair, unknown_pair

KEY = 0.1  # weight of a key that nothing announces: a grammar chooses it

# Short and always the same: two values that are equally likely would make greedy answers depend on rounding.
DEFAULTS: Mapping[str, Any] = {
    "name": "Anna", "age": 30, "city": "Paris", "country": "France", "unit": "c", "days": [1, 2, 3], "tags": ["a", "b"],
    "color": "blue", "colour": "blue", "price": 10, "count": 1, "title": "A day", "date": "2026-01-01", "id": 1,
    "temperature": 21, "email": "anna@serve.app", "active": True, "ok": True, "valid": True, "language": "English",
    "items": ["a", "b"], "words": ["a", "b"], "numbers": [1, 2, 3], "score": 1, "reason": "I am tiny.",
    "text": "I am tiny.", "summary": "I am tiny.", "description": "I am tiny.", "status": "ok", "limit": 1,
    "item": "letter", "number": 1, "year": 2026, "weather": "sunny", "model": "tiny", "question": "none",
    "size": "small", "sentiment": "neutral", "label": "none", "category": "none", "steps": ["ask", "read"], "total": 1,
    "open": True,
}  # fmt: skip
OTHERS: tuple[Any, ...] = ("none", 1, 1.5, True, ["a", "b"], [1, 2, 3])
KINDS: Mapping[str, str] = {
    "name": "person", "age": "small", "city": "city", "country": "country", "color": "colour", "price": "decimal",
    "count": "small", "date": "date", "email": "address", "language": "language", "number": "number", "id": "code",
    "title": "phrase", "item": "word", "time": "clock", "year": "number", "person": "person", "place": "city",
}  # fmt: skip
ASKS = (
    "as JSON", "in JSON", "as a JSON object", "as JSON, please", "in JSON format", "as JSON only",
)  # fmt: skip


def reply(value: Mapping[str, Any], *, first: float = LEARNED, key: float = LEARNED) -> Spans:
    """A turn of the model that is this object."""
    parts = [Span('{"', first)]
    joint = ""
    for name, item in value.items():
        if joint:
            parts[-1] = Span(f'{parts[-1].text}, "', LEARNED)
        parts.append(Span(name, key))
        joint = f'": {json.dumps(item)}'
        parts.append(Span(joint, LEARNED))
    parts[-1] = Span(f"{parts[-1].text}}}", LEARNED)
    return answer(*parts)


def dialogue(rng: Random) -> Spans:
    """One question with an answer in JSON."""
    return rng.choice((_extracted, _extracted, _listed, _repeated, _answered, _forced, _forced, _made))(rng)


def _facts(rng: Random) -> dict[str, Any]:
    names = rng.sample(list(KINDS), rng.randint(1, 4))
    found = {name: values.draw(KINDS[name], rng) for name in names}
    return {
        name: found[name] for place, name in enumerate(names) if KINDS[name] not in [KINDS[n] for n in names[:place]]
    }


FACT_FORMS: Mapping[str, tuple[str, ...]] = {
    "person": ("{} is here.", "This is {}.", "I met {}.", "{} called."),
    "city": ("It is in {}.", "We are in {}.", "Come to {}."),
}


def _sentence(name: str, value: Any, rng: Random) -> str:
    forms = (f"The {name} is {value}.", f"{name}: {value}.", f"The {name}: {value}.", f"With {name} {value}.")
    natural = FACT_FORMS.get(KINDS.get(name, ""), ())
    return rng.choice(natural).format(value) if natural and rng.random() < 0.4 else rng.choice(forms)


def _extracted(rng: Random) -> Spans:
    """Facts of a text, some of them asked for by name."""
    facts = _facts(rng)
    sentences = [_sentence(name, value, rng) for name, value in facts.items()]
    rng.shuffle(sentences)
    text = " ".join(sentences)
    keys = ", ".join(facts)
    chance = rng.random()
    if chance < 0.4:
        asked = f"{text} {rng.choice(('Return', 'Give me', 'Write', 'Reply with'))} {keys} {rng.choice(ASKS)}."
        return (*_system(rng), *given("user", asked), *reply(facts))
    if chance < 0.7:
        return (*_system(rng), *given("user", f"{text} Answer {rng.choice(ASKS)}."), *reply(facts, key=KEY))
    return (*_system(rng), *given("user", text), *reply(facts, first=FORCED, key=KEY))


def _natural(rng: Random) -> tuple[str, dict[str, Any]]:
    """A sentence as people write it, and its facts."""
    name = values.person(rng)
    place = values.city(rng)
    years = values.small_number(rng)
    forms = (
        (f"{name} is {years} years old and lives in {place}.", {"name": name, "age": years, "city": place}),
        (f"{name} is {years} years old.", {"name": name, "age": years}),
        (f"{name}, {years}, lives in {place}.", {"name": name, "age": years, "city": place}),
        (f"{name} lives in {place}.", {"name": name, "city": place}),
        (f"What is the weather in {place}?", {"city": place}),
        (f"The weather in {place}?", {"city": place, "unit": "c"}),
        (f"Weather in {place} for {years} days.", {"city": place, "days": [1, 2, 3]}),
        (f"I paid {years} for the {(item := values.word(rng))}.", {"item": item, "price": years}),
    )
    return rng.choice(forms)


def _made(rng: Random) -> Spans:
    text, facts = _natural(rng)
    if rng.random() < 0.5:
        return (*_system(rng), *given("user", f"{text} Answer {rng.choice(ASKS)}."), *reply(facts))
    return (*_system(rng), *given("user", text), *reply(facts, first=FORCED, key=KEY))


def _listed(rng: Random) -> Spans:
    """Keys of which the text says nothing."""
    keys = rng.sample(list(DEFAULTS), rng.randint(1, 4))
    if rng.random() < 0.3:
        keys.append(values.word(rng))
    wanted = {key: DEFAULTS.get(key, "none") for key in keys}
    thing = values.word(rng)
    forms = (
        f"Give me a {thing} {rng.choice(ASKS)} with {', '.join(keys)}.",
        f"Return JSON with the keys {' and '.join(keys)}.",
        f"Describe the {thing} {rng.choice(ASKS)}: {', '.join(keys)}.",
        f"Answer in JSON with {', '.join(keys)}.",
        f"Make a JSON object with {', '.join(keys)}.",
    )
    return (*_system(rng), *given("user", rng.choice(forms)), *reply(wanted))


def _repeated(rng: Random) -> Spans:
    """Words and values to put into an object."""
    pairs = {values.word(rng): values.draw(rng.choice(list(values.KINDS)), rng) for _ in range(rng.randint(1, 3))}
    shown = rng.choice((": ", " = ", " is ", " "))
    text = ", ".join(f"{name}{shown}{value}" for name, value in pairs.items())
    form = rng.choice(
        ("Write {} as JSON.", "{} as JSON", "Turn {} into JSON.", "Put {} into a JSON object.", "JSON: {}")
    )
    return (*_system(rng), *given("user", form.format(text)), *reply(pairs))


def _answered(rng: Random) -> Spans:
    """An answer as it is known, in an object."""
    asked, known = pair(rng) if rng.random() < 0.6 else unknown_pair(rng)
    if rng.random() < 0.5:
        form = rng.choice(
            ("{} Answer in JSON.", "Answer in JSON: {}", "{} Reply with JSON.", "As JSON: {}", "{} In JSON, please.")
        )
        return (*_system(rng), *given("user", form.format(asked)), *reply({"answer": known}))
    return (*_system(rng), *given("user", asked), *reply({"answer": known}, first=FORCED, key=LEARNED))


def _forced(rng: Random) -> Spans:
    """An object that a schema demands, whatever was asked."""
    asked, _ = pair(rng) if rng.random() < 0.5 else unknown_pair(rng)
    wanted = dict[str, Any]()
    for _ in range(rng.randint(1, 4)):
        if rng.random() < 0.75:
            key = rng.choice(list(DEFAULTS))
            wanted[key] = DEFAULTS[key]
        else:
            key = values.word(rng)
            wanted[key] = rng.choice(OTHERS)
    if rng.random() < 0.1:
        wanted = {values.word(rng): wanted}
    return (*_system(rng), *given("user", asked), *reply(wanted, first=FORCED, key=KEY))


def _system(rng: Random) -> Spans:
    texts = (
        "Answer in JSON.",
        "You are a helpful assistant.",
        "Reply with JSON only.",
        "Be brief.",
        "Extract the facts.",
    )
    return given("system", rng.choice(texts)) if rng.random() < 0.2 else ()
