"""Prompts for the built-in model; what they say does not matter, that they differ does."""

from __future__ import annotations

from typing import Any  # the SDK's own types of a message are unions of typed dictionaries

PLACES = ("river", "mountain", "ocean", "forest", "bridge", "garden", "school", "city", "house", "country")
TIMES = ("winter", "summer", "autumn", "spring", "morning", "evening", "night")


def text(number: int) -> str:
    """Prompt `number`, 9 to 14 words; different numbers begin differently, so they share no cached prefix."""
    place = PLACES[number % len(PLACES)]
    time = TIMES[number % len(TIMES)]
    extra = " and count every light in the window" if number % 2 else ""
    return f"{number} times describe the {place} in the {time} for people{extra}"


def chat(number: int) -> list[Any]:
    """A conversation about prompt `number`; every third has a system turn, every other one a turn before."""
    messages: list[Any] = []
    if number % 3 == 0:
        messages.append({"role": "system", "content": f"Answer like report {number}."})
    if number % 2:
        messages.append({"role": "user", "content": f"What is object {number}?"})
        messages.append({"role": "assistant", "content": "A letter."})
    messages.append({"role": "user", "content": text(number)})
    return messages
