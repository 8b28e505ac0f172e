"""How much is asked of any endpoint: lengths, clients, bounds, and their options on a command line.

The functions that parse an option raise ValueError, which argparse shows with the option.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass

PROMPT_WORDS = (16, 128)
ANSWER_TOKENS = (64, 384)
DRAWN = 512  # lengths, once; requests draw from them
CLIENTS = 16  # of a closed loop, and where capacity is measured: more than the slots of a small engine
MAX_REQUESTS = 20_000  # of one load; each that waits holds a connection
DRAIN_S = 120.0  # for what runs when a load ends: an answer of ANSWER_TOKENS takes less on any engine that is of use


@dataclass(frozen=True, slots=True)
class Size:
    """How much is asked for: words of prompts and tokens of answers from and to, and the bounds."""

    prompt_words: tuple[int, int] = PROMPT_WORDS
    answer_tokens: tuple[int, int] = ANSWER_TOKENS
    clients: int = CLIENTS
    max_requests: int = MAX_REQUESTS
    drain_s: float = DRAIN_S

    def lengths(self, seed: int) -> list[tuple[int, int]]:
        """Words and tokens of requests."""
        draw = random.Random(seed)
        return [(draw.randint(*self.prompt_words), draw.randint(*self.answer_tokens)) for _ in range(DRAWN)]


def add_size_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of a `Size`, and of how the load comes."""
    group = parser.add_argument_group("load on any endpoint")
    group.add_argument("--closed", action="store_true", help="clients with one request in flight, and no arrivals")
    group.add_argument(
        "--clients", type=count, default=CLIENTS, help="of a closed loop; capacity is measured with them"
    )
    group.add_argument("--rate", type=positive, help="requests/s that the endpoint serves: not measured then")
    group.add_argument("--seconds", type=positive, help="of each load")
    group.add_argument("--prompt-words", type=from_to, default=PROMPT_WORDS, metavar="FROM-TO")
    group.add_argument("--answer-tokens", type=from_to, default=ANSWER_TOKENS, metavar="FROM-TO")
    group.add_argument("--max-requests", type=count, default=MAX_REQUESTS, help="of each load: more are not sent")
    group.add_argument("--drain-seconds", type=positive, default=DRAIN_S, help="for what runs when a load ends")


def from_to(text: str) -> tuple[int, int]:
    least, _, most = text.partition("-")
    found = int(least), int(most or least)
    if not 1 <= found[0] <= found[1]:
        raise ValueError(text)
    return found


def count(text: str) -> int:
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def positive(text: str) -> float:
    if not float(text) > 0:
        raise ValueError(text)
    return float(text)


def size_of(options: argparse.Namespace) -> Size:
    return Size(
        options.prompt_words, options.answer_tokens, options.clients, options.max_requests, options.drain_seconds
    )
