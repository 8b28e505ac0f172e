"""Texts that the grammar of a schema accepts, drawn at random from xgrammar as the engine asks it."""

from __future__ import annotations

import json
import random
from typing import Any

import xgrammar

# Without a backslash: a name in `properties` that comes again in escapes is not told apart (docs/reference/http.md).
LETTERS = list('abxyz019-+.eE{}[]",:_@/tTZrufalsnkd é')
STOP = len(LETTERS)
MOST_TOKENS = 160
INFO = xgrammar.TokenizerInfo([*LETTERS, "</s>"], stop_token_ids=[STOP])
COMPILER = xgrammar.GrammarCompiler(INFO, max_threads=1, cache_enabled=False)
CLOSING = frozenset(LETTERS.index(letter) for letter in '"}]')


def accepts(schema: Any, text: str) -> bool:
    """Whether the schema's grammar accepts a text."""
    matcher = xgrammar.GrammarMatcher(COMPILER.compile_json_schema(json.dumps(schema)))
    return bool(matcher.accept_string(text) and matcher.is_completed())


def drawn(schema: Any, source: random.Random, texts: int) -> list[str]:
    """Texts of the schema's grammar, those that end soon. Raises RuntimeError: xgrammar cannot build it."""
    compiled = COMPILER.compile_json_schema(json.dumps(schema))
    found = (_one(xgrammar.GrammarMatcher(compiled), source) for _ in range(texts))
    return [text for text in found if text is not None]


def _one(matcher: Any, source: random.Random) -> str | None:
    mask = xgrammar.allocate_token_bitmask(1, STOP + 1)
    text = ""
    for step in range(MOST_TOKENS):
        matcher.fill_next_token_bitmask(mask, 0)
        allowed = [token for token in range(STOP + 1) if mask[0, token // 32] >> (token % 32) & 1]
        if not allowed:
            return None
        closing = [token for token in allowed if token in CLOSING or token == STOP]
        token = source.choice(closing if closing and source.random() < step / 40 else allowed)
        if token == STOP:
            return text
        matcher.accept_token(token)
        text += LETTERS[token]
    return None
