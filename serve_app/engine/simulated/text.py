"""The output of the simulated engine: text as a pure function, a word tokenizer, and OpenAI's response formats.

Invariant: output token i of a choice depends on (seed, choice, prompt text, i) only, and the bytes of a response on its
tokens only; so batching, coalescing and a continuation on another replica cannot change either.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from serve_app.types import Operation

_MASK = 2**64 - 1
_SYLLABLES = [consonant + vowel for consonant in "bdklmnrs" for vowel in "aeio"]
WORDS = tuple(f" {first}{second}" for first in _SYLLABLES for second in _SYLLABLES)  # 1024, none needs a JSON escape
TOKEN_CHARS = 5  # of every output token, so that offsets need no table
_WORD_SHIFT = 54  # leaves the 10 best mixed bits of 64: one of 1024 words
MAX_KNOWN_WORDS = 65_536  # of prompts, kept for detokenizing: about 8 MB
EMBEDDING_SIZE = 64  # enough for distinct texts to be near orthogonal
UNKNOWN = "\N{REPLACEMENT CHARACTER}"

_TOKEN = re.compile(r"\s*\S+(?:\s+\Z)?|\A\s+\Z")


def token_id(token: str) -> int:
    """Stable 32-bit id of a token's text."""
    return zlib.crc32(token.encode("utf-8", "surrogatepass"))


WORD_IDS = tuple(token_id(word) for word in WORDS)
_WORD_BYTES = tuple(word.encode() for word in WORDS)


def text_key(seed: int, choice: int, prompt: str) -> int:
    """The key that determines the text of one choice."""
    seeded = f"{seed} {choice} {prompt}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(seeded, digest_size=8).digest(), "little")


def words_at(key: int, start: int, stop: int) -> list[int]:
    """Indices into `WORDS` of output tokens `start` to `stop` (SplitMix64: Steele, Lea and Flood, OOPSLA 2014)."""
    indices = []
    for i in range(start, stop):
        x = (key + i * 0x9E3779B97F4A7C15) & _MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
        indices.append((x ^ (x >> 31)) >> _WORD_SHIFT)
    return indices


def text_of(key: int, start: int, stop: int) -> str:
    """Text of output tokens `start` to `stop`."""
    return "".join([WORDS[k] for k in words_at(key, start, stop)])


def first_stop(key: int, max_tokens: int, stops: Sequence[str]) -> tuple[int, int] | None:
    """The end of the output at the stop string that completes first: (tokens produced, characters before it)."""
    text = text_of(key, 0, max_tokens)
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    if not found:
        return None
    end, at = min(found)
    return -(-end // TOKEN_CHARS), at


def count_tokens(text: str) -> int:
    """Length of `text` in tokens."""
    return len(text.split()) or (1 if text else 0)


class WordTokenizer:
    """A token is one word with the white space before it; white space after the last word belongs to that word."""

    def __init__(self) -> None:
        self._words = dict(zip(WORD_IDS, WORDS, strict=True))

    def encode(self, text: str) -> list[int]:
        """Token ids, `count_tokens(text)` of them."""
        ids = []
        for token in _TOKEN.findall(text):
            number = token_id(token)
            if number not in self._words and len(self._words) < MAX_KNOWN_WORDS:
                self._words[number] = token
            ids.append(number)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text; U+FFFD for an id of neither an output word nor a text encoded here before."""
        return "".join([self._words.get(number, UNKNOWN) for number in ids])


def embedding(seed: int, text: str) -> list[float]:
    """A unit vector of `EMBEDDING_SIZE`, a pure function of seed and text."""
    seeded = f"{seed} {text}".encode("utf-8", "surrogatepass")
    values = [byte - 127.5 for byte in hashlib.shake_128(seeded).digest(EMBEDDING_SIZE)]
    length = math.sqrt(sum(value * value for value in values))
    return [value / length for value in values]


class Piece(NamedTuple):
    """A token of an answer that is played by script. `part`: the number of its block."""

    part: int
    text: str


@dataclass(frozen=True, slots=True)
class SimulatedChoice:
    """One choice of a request; `max_tokens` are produced, and their text before character `cut` is sent. `script`: its
    tokens, if a script is played."""

    index: int
    key: int
    prompt_tokens: int
    max_tokens: int
    cut: int | None = None
    script: tuple[Piece, ...] = ()

    @property
    def finish_reason(self) -> str:
        return "stop" if self.ends_by_itself else "length"

    @property
    def ends_by_itself(self) -> bool:
        """Whether it is not cut off by its bound."""
        return self.cut is not None or 0 < len(self.script) <= self.max_tokens

    def ids(self, start: int, stop: int) -> list[int]:
        """Its tokens `start` to `stop`."""
        if self.script:
            return [token_id(text) for _, text in self.script[start:stop]]
        return [WORD_IDS[k] for k in words_at(self.key, start, stop)]


def tokens_made(choices: Sequence[SimulatedChoice], groups: Sequence[Sequence[int]]) -> list[int] | None:
    """The tokens of each choice in these groups; None: they are not groups of these choices."""
    made = [0] * len(choices)
    for group in groups:
        if not group or not 0 <= group[0] < len(choices):
            return None
        index, *tokens = group
        start = made[index]
        stop = made[index] + len(tokens)
        if stop > choices[index].max_tokens:
            return None
        if tokens != choices[index].ids(start, stop):
            return None
        made[index] = stop
    return made


def token_group(choice: SimulatedChoice, start: int, stop: int) -> list[int]:
    """The group of a choice's tokens `start` to `stop`."""
    return [choice.index, *choice.ids(start, stop)]


class Writer:
    """The bytes of one response to a chat or completion request.

    Every output token is one SSE event, however many are written at once. `ignored` fields of the request are named in
    the whole answer, or in the event that ends a choice.
    """

    def __init__(
        self,
        operation: Operation,
        request_id: str,
        model: str,
        created: int,
        *,
        stream: bool,
        ignored: Sequence[str] = (),
    ) -> None:
        self._chat = operation is Operation.CHAT
        kind = ("chat.completion" if self._chat else "text_completion") + (".chunk" if stream and self._chat else "")
        self._fields = {"id": request_id, "object": kind, "created": created, "model": model}
        self._warnings = {"warnings": [f"the simulated engine ignores {name}" for name in ignored]} if ignored else {}
        self._around: dict[int, tuple[bytes, bytes]] = {}  # by choice: the bytes before and after a token's text

    def event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return b"data: " + _json(self._fields | {"choices": choices} | more) + b"\n\n"

    def tokens(self, choice: SimulatedChoice, start: int, stop: int) -> tuple[bytes, list[int]]:
        """The events of a choice's tokens `start` to `stop`, and the token group behind them. An event before the first
        token gives the role in a chat, one after the last token ends the choice."""
        indices = words_at(choice.key, start, stop)
        texts = [_WORD_BYTES[k] for k in indices]
        if choice.cut is not None and choice.cut < stop * TOKEN_CHARS:
            left = [max(0, choice.cut - i * TOKEN_CHARS) for i in range(start, stop)]
            texts = [text[:room] for text, room in zip(texts, left, strict=True) if room]
        body = b""
        if not start and self._chat:
            body = self.event([self._delta(choice, {"role": "assistant", "content": ""})])
        if texts:
            if choice.index not in self._around:
                # The output words need no escapes, so no JSON is encoded per token.
                head, _, tail = self.event([self._delta(choice, {"content": "\0"})]).rpartition(b"\\u0000")
                self._around[choice.index] = head, tail
            head, tail = self._around[choice.index]
            body += head + (tail + head).join(texts) + tail
        if stop == choice.max_tokens:
            body += self.event([self._delta(choice, {}, choice.finish_reason)], **self._warnings)
        return body, [choice.index, *[WORD_IDS[k] for k in indices]]

    def end(self, usage: dict[str, int] | None) -> bytes:
        """The end of the stream, with `usage` if the client requested it."""
        event = b"" if usage is None else self.event([], usage=usage)
        return event + b"data: [DONE]\n\n"

    def document(self, choices: Sequence[SimulatedChoice], usage: dict[str, int]) -> bytes:
        """The whole response of a request that is not streamed."""
        answers = []
        for choice in choices:
            text = "".join([WORDS[k] for k in words_at(choice.key, 0, choice.max_tokens)])[: choice.cut]
            body = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
            answers.append({"index": choice.index} | body | {"logprobs": None, "finish_reason": choice.finish_reason})
        return _json(self._fields | {"choices": answers, "usage": usage} | self._warnings)

    def _delta(self, choice: SimulatedChoice, delta: dict[str, str], reason: str | None = None) -> dict[str, Any]:
        body: dict[str, Any] = {"delta": delta} if self._chat else {"text": delta.get("content", "")}
        return {"index": choice.index} | body | {"logprobs": None, "finish_reason": reason}


def embedding_document(model: str, vectors: Sequence[Sequence[float]], prompt_tokens: int, *, packed: bool) -> bytes:
    """The response to an embeddings request; `packed`: base64 of little-endian float32, as OpenAI's SDK asks for."""
    layout = struct.Struct(f"<{EMBEDDING_SIZE}f")
    encoded = [base64.b64encode(layout.pack(*vector)).decode() if packed else vector for vector in vectors]
    data = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(encoded)]
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    return _json({"object": "list", "data": data, "model": model, "usage": usage})


def score(seed: int, query: str, document: str) -> float:
    """The cosine of the two texts' embeddings."""
    return sum(a * b for a, b in zip(embedding(seed, query), embedding(seed, document), strict=True))


def score_document(request_id: str, model: str, created: int, scores: Sequence[float], prompt_tokens: int) -> bytes:
    """The response to a score request, as vLLM has it."""
    data = [{"index": index, "object": "score", "score": one} for index, one in enumerate(scores)]
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    head = {"id": f"score-{request_id}", "object": "list", "created": created, "model": model}
    return _json(head | {"data": data, "usage": usage})


def rerank_document(
    request_id: str, model: str, documents: Sequence[str], scores: Sequence[float], top_n: int, prompt_tokens: int
) -> bytes:
    """The response to a rerank request, as vLLM has it: the best `top_n` documents, the best first; 0: all."""
    order = sorted(range(len(documents)), key=lambda index: -scores[index])
    results = [
        {"index": index, "document": {"text": documents[index], "multi_modal": None}, "relevance_score": scores[index]}
        for index in order[: top_n or None]
    ]
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    return _json({"id": f"score-{request_id}", "model": model, "usage": usage, "results": results})


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
