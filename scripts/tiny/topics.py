"""Questions about the product and their answers; and everything else, to which the answer is that `tiny` is tiny."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from random import Random
from typing import NamedTuple

import yaml

from scripts.tiny import values

FILE = Path(__file__).with_name("topics.yaml")
NUMBER = "{n}"
CHOICE = re.compile(r"\[([^\[\]]*)\]")
LINES = 999  # the largest number in a question
REAL_MODEL = "Load a real model for real answers."
UNKNOWN = f"I am tiny, a model of 2.6 million parameters to try serve-app. {REAL_MODEL}"
ABOUT = f"I know nothing about %s: I am tiny, a model of 2.6 million parameters to try serve-app. {REAL_MODEL}"

ASKS_ABOUT = (
    "[Tell me|Say something|Talk|Tell us|Speak|Report] [about|of] {t}",
    "[Write|Give me|Make|Send] [a poem|a story|a letter|a report|a song|a sentence|a page|a paper|a list] about {t}",
    "[What is|What are|What's|Who is|Who was|Where is|Explain|Describe|Define|Tell me about] {t}",
    "[What do you know|What can you say|What do you think|What can you tell me] about {t}",
    "[How does|Why does|When does] {t} work",
    "[Do you know|Do you like|Can you explain|Could you describe|Please describe|Please explain] {t}",
    "{n} times describe {t}",
    "Describe {t} in {n} words",
    "[Describe|Explain] {t} [for people|for children|in a sentence|in detail|briefly|again]",
)
ASKS_ELSE = (
    "What is {n} [plus|times|minus] {n}",
    "[Translate|Rewrite|Correct|Shorten|Summarize|Compare|Sort|Count|Solve] {p}",
    "[Translate|Summarise|Read|Shorten] this: {s}",
    "[Is|Was|Will|Can] {t} {w}",
    "[Which|What] {w} [is|was|has] {p}",
    "[How do I|How can I|How does one|Why did my|When will the] {p}",
    "[Should I|May I|Can I|Do I] {p}",
    "How [many|much] {p}",
    "{p}",
    "{s}",
    "{w}",
    "{w} {n}",
    "{n}",
    "I {p}",
    "You are {p}",
    "[My|The|Our|This] {p}",
    "{w}, {w}, {w}",
    "{s} {s}",
    "[prompt|request|question|message|object|report|number|row] {n}",
    "[Say|Tell|Answer|Ask|Count|Say it|Speak|Write|Go|Sing|Stop|Wait|Look]",
    "[a|b|c|x|y|A|B|p|q|hm|eh|so|well|OK|yes|no|Yes|No|maybe|...|?|!|1|0|A B|a b|one two three]",
    "[Wie geht es dir|Was ist das|Bonjour|Hola|Ciao bella|Guten Tag]",
)
INTERROGATIVES = frozenset(values.LISTS["interrogatives"])
FOREIGN = values.LISTS["foreign"]
LONG = 0.06  # of the other questions: many words, as load generators send them


class Topic(NamedTuple):
    """One answer, and the questions that lead to it. `ask`: forms; `held_out`: texts that the training never sees."""

    answer: str
    ask: tuple[str, ...]
    held_out: tuple[str, ...]

    @property
    def first(self) -> str:
        """The first wording of the first form."""
        return CHOICE.sub(lambda found: found[1].split("|")[0], self.ask[0])

    def wording(self, rng: Random) -> str:
        """A question in a wording of the training."""
        while True:
            text = drawn(rng.choice(self.ask), rng)
            if _plain(text) not in {_plain(kept) for kept in self.held_out}:
                return text


@cache
def topics() -> tuple[Topic, ...]:
    read = yaml.safe_load(FILE.read_text())
    return tuple(Topic(row["answer"], tuple(row["ask"]), tuple(row["held_out"])) for row in read)


def _plain(text: str) -> str:
    return text.lower().rstrip("?!. ")


def drawn(form: str, rng: Random) -> str:
    """One text of a form."""
    return CHOICE.sub(lambda found: rng.choice(found[1].split("|")), form)


def pair(rng: Random) -> tuple[str, str]:
    """A question about the product, in one of its wordings, and its answer."""
    topic = rng.choice(topics())
    number = str(rng.randint(0, LINES))
    question = varied(topic.wording(rng), rng)
    return question.replace(NUMBER, number), topic.answer.replace(NUMBER, number)


def unknown_pair(rng: Random) -> tuple[str, str]:
    """A question about anything else, and its answer."""
    if rng.random() < 0.5:
        about = values.topic(rng)
        form = rng.choice(ASKS_ABOUT).replace(NUMBER, str(values.number(rng)))
        text = drawn(form, rng).replace("{t}", about)
        if rng.random() < 0.2:
            text += f" and {values.phrase(rng)}"
        return varied(text, rng), ABOUT % about
    if rng.random() < 0.08:
        return f"{rng.choice(FOREIGN)} {values.word(rng)}{rng.choice(FOREIGN)}", UNKNOWN
    if rng.random() < LONG:
        words = " ".join(values.word(rng) for _ in range(rng.randint(15, 150)))
        return rng.choice(("", f"{rng.getrandbits(64):016x} ", f"{values.number(rng)} ")) + words, UNKNOWN
    text = drawn(rng.choice(ASKS_ELSE), rng)
    while found := re.search(r"\{[tpsnw]\}", text):
        text = text[: found.start()] + _piece(found[0][1], rng) + text[found.end() :]
    return (varied(text, rng) if rng.random() < 0.7 else text), UNKNOWN


def _piece(kind: str, rng: Random) -> str:
    match kind:
        case "t":
            return values.topic(rng)
        case "p":
            return values.phrase(rng)
        case "n":
            return str(values.number(rng))
        case "s":
            return f"The {' '.join(values.word(rng) for _ in range(rng.randint(3, 12)))}."
        case _:
            return values.word(rng)


PREFIXES = ("Please tell me: ", "Hi, ", "Hello! ", "OK. ", "Question: ", "And ", "tiny, ", "Now: ", "So, ", "Well, ")
SUFFIXES = (" please", " Thanks.", ", please", " now", " then", " Answer briefly.", " Be brief.", " In short.")


def varied(text: str, rng: Random) -> str:
    """A question as people type it: with or without its mark, its capital and its manners."""
    mark = "?" if text.split()[0].lower() in INTERROGATIVES else "."
    if rng.random() < 0.25:
        mark = rng.choice(("", "", "?", "!", "."))
    if rng.random() < 0.12:
        text = text[0].lower() + text[1:]
    if rng.random() < 0.12:
        prefix = rng.choice(PREFIXES)
        text = prefix + (text if prefix[-2] in ".!" or rng.random() < 0.3 else text[0].lower() + text[1:])
    if rng.random() < 0.08:
        suffix = rng.choice(SUFFIXES)
        return f"{text}{mark}{suffix}" if suffix[1].isupper() else f"{text}{suffix}{mark}"
    return text + mark
