"""Tools that nobody has seen, questions that need them, the calls, their results and what is answered then."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, NamedTuple

from scripts.tiny import values
from scripts.tiny.spans import Span, Spans, called, given, plain, system
from scripts.tiny.topics import pair, unknown_pair

VERBS = values.LISTS["verbs"]
THINGS = values.LISTS["things"]

# By the name of a parameter: the kind of its values, and what stands before the value in a question.
PARAMETERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "city": ("city", ("in", "for", "of", "in", "in the city", "city")),
    "location": ("city", ("in", "at", "for", "in", "location")),
    "place": ("city", ("in", "at", "for", "place")),
    "origin": ("city", ("from", "from", "origin")),
    "destination": ("city", ("to", "to", "destination")),
    "country": ("country", ("in", "of", "for", "country")),
    "name": ("person", ("of", "for", "named", "with name", "name")),
    "user": ("person", ("of", "for", "of user", "user")),
    "person": ("person", ("of", "for", "with", "person")),
    "to": ("address", ("to", "to", "for")),
    "email": ("address", ("to", "of", "for", "email")),
    "query": ("phrase", ("for", "about", "query")),
    "text": ("phrase", ("of", "text", "with text")),
    "topic": ("phrase", ("about", "on", "topic")),
    "title": ("phrase", ("titled", "called", "with title", "title")),
    "item": ("word", ("of", "item", "for")),
    "word": ("word", ("of", "word", "for")),
    "count": ("small", ("count", "with count")),
    "limit": ("small", ("with limit", "limit", "at most", "up to")),
    "number": ("number", ("number", "of number", "with number")),
    "amount": ("number", ("amount", "with amount", "of")),
    "quantity": ("small", ("quantity", "with quantity")),
    "days": ("small", ("for days", "days", "with days")),
    "hours": ("small", ("hours", "with hours")),
    "year": ("number", ("in", "of", "year")),
    "age": ("small", ("age", "with age")),
    "price": ("decimal", ("for", "price", "at price")),
    "value": ("decimal", ("value", "with value", "of")),
    "date": ("date", ("on", "for", "date")),
    "day": ("date", ("on", "day")),
    "time": ("clock", ("at", "time")),
    "id": ("code", ("id", "with id", "number")),
    "order_id": ("number", ("order", "of order", "with order id")),
    "code": ("code", ("code", "with code", "for")),
    "symbol": ("code", ("of", "for", "symbol")),
    "color": ("colour", ("in", "color")),
    "colour": ("colour", ("in", "colour")),
    "language": ("language", ("in", "to", "into", "language")),
}
CHOICES = (
    ("unit", ("celsius", "fahrenheit")), ("unit", ("c", "f")), ("unit", ("km", "miles")), ("state", ("on", "off")),
    ("size", ("small", "medium", "large")), ("mode", ("fast", "slow")), ("order", ("up", "down")),
    ("level", ("low", "high")), ("item", ("letter", "window")), ("format", ("json", "text", "table")),
)  # fmt: skip
INSTRUCTIONS = (
    "", "", "", "Be brief.", "You are a helpful assistant.", "Use the tools.", "Answer briefly.", "Be kind.",
    "You are an agent. Call a function if one fits.", "Answer like a report.", "You help the people of a shop.",
)  # fmt: skip


class Parameter(NamedTuple):
    """`choices`: of an enum; empty: any value of the kind."""

    name: str
    kind: str
    before: tuple[str, ...]
    choices: tuple[str, ...] = ()


class Tool(NamedTuple):
    """`phrases`: how a question names what the tool does; `things`: the words of its name."""

    name: str
    parameters: tuple[Parameter, ...]
    required: tuple[str, ...]
    phrases: tuple[str, ...]
    things: tuple[str, ...]
    schema: dict[str, Any]


def parameter(rng: Random) -> Parameter:
    chance = rng.random()
    if chance < 0.75:
        name = rng.choice(list(PARAMETERS))
        kind, before = PARAMETERS[name]
        return Parameter(name, kind, before)
    if chance < 0.88:
        name, choices = rng.choice(CHOICES)
        return Parameter(name, "word", (f"with {name}", name, f"in {name}"), choices)
    name = values.word(rng)
    kind = rng.choice(("word", "phrase", "city", "person", "small", "number", "code"))
    return Parameter(name, kind, (f"with {name}", name, f"and {name}", f"{name} is", f"{name} ="))


def tool(rng: Random) -> Tool:
    """A tool with a name from two words, or an invented one."""
    thing = rng.choice(THINGS) if rng.random() < 0.6 else values.word(rng)
    verb = rng.choice(VERBS) if rng.random() < 0.85 else values.word(rng)
    style = rng.random()
    if style < 0.6:
        name = f"{verb}_{thing}"
    elif style < 0.75:
        name = thing
    elif style < 0.87:
        name = f"{verb}{thing.capitalize()}"
    else:
        name = f"{values.invented(rng)}_{thing}"
    found = dict[str, Parameter]()
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3))):
        drawn = parameter(rng)
        if drawn.kind not in {other.kind for other in found.values()} or drawn.choices:
            found.setdefault(drawn.name, drawn)
    parameters = tuple(found.values())
    required = tuple(drawn.name for drawn in parameters if rng.random() < 0.8) or (parameters[0].name,)
    required = required if rng.random() < 0.75 else ()
    phrases = (f"{verb} the {thing}", f"{verb} the {thing}", f"the {thing}", f"call {name}", f"{verb} {thing}")
    return Tool(
        name, parameters, required, phrases, (thing, verb), _function(name, thing, verb, parameters, required, rng)
    )


def _function(
    name: str, thing: str, verb: str, parameters: Sequence[Parameter], required: Sequence[str], rng: Random
) -> dict[str, Any]:
    """The tool as a chat template gets it, in the styles that clients write."""
    described = rng.random() < 0.3
    properties = {drawn.name: _property(drawn, rng, described=described) for drawn in parameters}
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        schema["required"] = list(required)
    if rng.random() < 0.4:
        schema["additionalProperties"] = False
    if rng.random() < 0.15:
        schema["title"] = f"{thing.capitalize()}Args"
    function: dict[str, Any] = {"name": name}
    chance = rng.random()
    if chance < 0.5:
        texts = (
            f"The {thing}.",
            f"{verb.capitalize()} the {thing}.",
            f"{verb.capitalize()} a {thing}",
            f"The {thing} for you.",
        )
        function["description"] = rng.choice(texts)
    elif chance < 0.75:
        function["description"] = None  # as vLLM fills it in
    function["parameters"] = schema
    if rng.random() < 0.25:
        function["strict"] = True
    return function


def _property(drawn: Parameter, rng: Random, *, described: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"type": values.KINDS[drawn.kind][0]}
    if drawn.choices:
        found["enum"] = list(drawn.choices)
    elif found["type"] == "string" and rng.random() < 0.1:
        found["maxLength"] = rng.choice((12, 20, 40))
    if described:
        found["description"] = f"The {drawn.name.replace('_', ' ')}"
    return found


OPENINGS = ("", "", "", "Please ", "Can you ", "Could you ", "I want to ", "Now ", "Help me: ", "Will you ")
ENDINGS = (" today", " now", " please", ", please", " tomorrow", " for me", " right now", " at once")
ABOUT_IT = (
    "What is {}",
    "Tell me {}",
    "Show me {}",
    "Give me {}",
    "I need {}",
    "How is {}",
    "Look up {}",
    "{}",
    "Find {}",
)


def question(asked: Tool, rng: Random) -> tuple[str, dict[str, Any]]:
    """A question that needs the tool, and the arguments of the call: those mentioned, in the schema's order."""
    phrase = rng.choice(asked.phrases)
    about = phrase.startswith("the ")
    text = rng.choice(ABOUT_IT).format(phrase) if about else rng.choice(OPENINGS) + phrase
    if rng.random() < 0.06:
        text = asked.things[0]
    mentioned = [
        drawn for place, drawn in enumerate(asked.parameters) if not place or rng.random() < _mention(drawn, asked)
    ]
    order = mentioned if rng.random() < 0.8 else rng.sample(mentioned, len(mentioned))
    drawn_values = {drawn.name: _value(drawn, rng) for drawn in mentioned}
    for place, drawn in enumerate(order):
        shown = drawn_values[drawn.name]
        quoted = f'"{shown}"' if isinstance(shown, str) and rng.random() < 0.12 else shown
        before = rng.choice(drawn.before) if rng.random() < 0.7 else drawn.name.replace("_", " ")
        if before == drawn.name and rng.random() < 0.15:
            before += rng.choice((":", " =", " is"))
        joint = " and " if place and rng.random() < 0.5 else " "
        text += f"{joint}{before} {quoted}"
    text += rng.choice(ENDINGS) if rng.random() < 0.15 else ""
    arguments = {
        drawn.name: drawn_values[drawn.name] if drawn in mentioned else _default(drawn)
        for drawn in asked.parameters
        if drawn in mentioned or drawn.name in asked.required
    }
    text = text[0].upper() + text[1:] if rng.random() < 0.9 else text
    mark = "?" if text.split()[0] in ("What", "How", "Can", "Could", "Will") else "."
    return text + (mark if rng.random() < 0.85 else rng.choice(("", "", "!", "?"))), arguments


def _value(drawn: Parameter, rng: Random) -> str | int | float:
    return rng.choice(drawn.choices) if drawn.choices else values.draw(drawn.kind, rng)


def _mention(drawn: Parameter, asked: Tool) -> float:
    """How often a question mentions a parameter that is not the first."""
    if drawn.name not in asked.required:
        return 0.5
    return 0.6 if drawn.choices else 0.92


DEFAULTS: Mapping[str, str | int | float] = {"string": "none", "integer": 1, "number": 1}


def _default(drawn: Parameter) -> str | int | float:
    """The value of a required parameter that the question does not mention."""
    return drawn.choices[0] if drawn.choices else DEFAULTS[values.KINDS[drawn.kind][0]]


def unfitting(asked: Tool) -> dict[str, Any]:
    """Arguments of a call that is demanded though the question does not speak of it."""
    needed = asked.required or (asked.parameters[0].name,)
    return {drawn.name: _default(drawn) for drawn in asked.parameters if drawn.name in needed}


WEATHER = values.LISTS["weather"]
FACTS = values.LISTS["facts"]


def result(rng: Random) -> tuple[str, str]:
    """What a tool returns, and what the model makes of it."""
    chance = rng.random()
    if chance < 0.7:
        texts = (
            f"{values.small_number(rng)} C", rng.choice(WEATHER), str(values.number(rng)), str(values.decimal(rng)),
            values.date(rng), values.clock(rng), values.code(rng), values.city(rng), values.person(rng),
            values.phrase(rng), f"{values.number(rng)} {values.word(rng)}", "done", "ok",
            f"{rng.choice(WEATHER)}, {values.small_number(rng)} C",
        )  # fmt: skip
        text = rng.choice(texts)
        return text, f"The result is {text}."
    facts = rng.sample(FACTS, rng.choice((1, 1, 2)))
    drawn = {
        fact: values.draw(rng.choice(("word", "number", "city", "person", "small", "decimal")), rng) for fact in facts
    }
    facts_text = ", ".join(f"the {fact} is {shown}" for fact, shown in drawn.items())
    return json.dumps(drawn), f"{facts_text[0].upper()}{facts_text[1:]}."


NOT_SHOWN = 0.06  # of conversations: a result comes back where the tools are not shown again


def dialogue(rng: Random) -> Spans:
    """A conversation with tools: questions that need them, results, questions that do not, calls that are demanded."""
    tools = list({made.things[0]: made for made in (tool(rng) for _ in range(rng.choice((1, 1, 2, 2, 2, 3))))}.values())
    spans = system(rng.choice(INSTRUCTIONS), [made.schema for made in tools])
    if rng.random() < NOT_SHOWN:
        (chosen, *_) = tools
        asked, arguments = question(chosen, rng)
        returned, answered = result(rng)
        before = (*given("user", asked), *called(chosen.name, arguments), *given("tool", returned))
        return (*(span._replace(weight=0.0) for span in before), *plain(answered))
    for _ in range(rng.choice((1, 2, 3, 4, 5))):
        spans += _exchange(tools, rng)
    return spans


def _apart(tools: Sequence[Tool], rng: Random) -> tuple[str, str]:
    """A question that none of the tools is for, and its answer."""
    things = {thing.lower() for made in tools for thing in made.things}
    while True:
        asked, answered = pair(rng) if rng.random() < 0.5 else unknown_pair(rng)
        if not things & set(re.findall("[a-z]+", asked.lower())):
            return asked, answered


def _exchange(tools: Sequence[Tool], rng: Random) -> Spans:
    chance = rng.random()
    if chance < 0.12:
        asked, answered = _apart(tools, rng)
        return (*given("user", asked), *plain(answered))
    chosen = rng.choice(tools)
    if chance < 0.2:
        asked, _ = _apart(tools, rng)
        return (*given("user", asked), *called(chosen.name, unfitting(chosen), is_forced=True))
    asked, arguments = question(chosen, rng)
    spans: tuple[Span, ...] = (*given("user", asked), *called(chosen.name, arguments))
    if rng.random() < 0.6:
        returned, answered = result(rng)
        spans += (*given("tool", returned), *plain(answered))
    return spans
