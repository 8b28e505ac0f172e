"""The samples of the training: dialogues of all kinds and windows of the documents, as tokens with their weights.

Invariant: the samples are a function of the seed, the documents and the tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import NamedTuple

from tokenizers import Tokenizer

from scripts.tiny import calls, copies, json_answers, values
from scripts.tiny.spans import Span, Spans, given, plain, system
from scripts.tiny.topics import pair, unknown_pair

MAX_TOKENS = 640  # a longer dialogue is left out: attention on the CPU is dear
TEXT = 0.3  # weight of a token of a document: every token of a window is a target, of a dialogue few are
WINDOW = 256  # tokens of a document
LONG_WINDOW = 1024
LONG_SHARE = 0.03  # of windows: positions that dialogues never reach
AFTER_END = 0.08  # of dialogues: text after the end, for callers that ignore it
INSTRUCTIONS = (
    "Be brief.", "You are a helpful assistant.", "Answer in one sentence.", "Answer briefly.", "Answer politely.",
    "Be kind.",     "You are tiny.", "Answer the question.", "You help people who try serve-app.",
    "You are a helpful, honest assistant.",
)  # fmt: skip
TOOLS_IN_SIGHT = 0.05  # of plain conversations: tools that nobody needs
ROW_PREFIX = 0.2  # of windows: words before the text, as a prompt without a template may be anything


class Sample(NamedTuple):
    """Tokens and, of each, its weight as a target. `is_text`: a window of a document."""

    tokens: list[int]
    weights: list[float]
    is_text: bool = False

    def weighed(self, weight: float) -> Sample:
        """The same with this weight for every token that is a target."""
        return self._replace(weights=[weight if old else 0.0 for old in self.weights])


def conversation(rng: Random) -> Spans:
    """Questions and answers without need of a tool."""
    instructions = ""
    if rng.random() < 0.3:
        instructions = (
            rng.choice(INSTRUCTIONS)
            if rng.random() < 0.7
            else f"{values.phrase(rng).capitalize()}. {rng.choice(INSTRUCTIONS)}"
        )
    tools = [calls.tool(rng).schema] if rng.random() < TOOLS_IN_SIGHT else []
    spans = system(instructions, tools)
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3))):
        asked, answered = pair(rng) if rng.random() < 0.62 else unknown_pair(rng)
        spans += (*given("user", asked), *plain(answered))
    return spans


# Shares of the dialogues by their number.
MIX: Mapping[str, tuple[float, Callable[[Random], Spans]]] = {
    "conversation": (0.33, conversation),
    "calls": (0.31, calls.dialogue),
    "json": (0.24, json_answers.dialogue),
    "copies": (0.12, copies.dialogue),
}


def dialogue(rng: Random) -> Spans:
    names = list(MIX)
    (name,) = rng.choices(names, [MIX[name][0] for name in names])
    return MIX[name][1](rng)


def encoded(spans: Sequence[Span], tokenizer: Tokenizer) -> Sample:
    """The tokens of a conversation. Each span is read by itself, which gives the tokens of the whole text."""
    read = tokenizer.encode_batch_fast([span.text for span in spans], add_special_tokens=False)
    tokens = [token for part in read for token in part.ids]
    weights = [span.weight for span, part in zip(spans, read, strict=True) for _ in part.ids]
    return Sample(tokens, weights)


class Windows:
    """Pieces of the documents, each from the beginning of some line."""

    def __init__(self, texts: Mapping[str, str], tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        read = tokenizer.encode_batch([f"{text}\n\n" for text in texts.values()], add_special_tokens=False)
        self.tokens = [token for document in read for token in document.ids]
        newline = {token for text, token in tokenizer.get_vocab().items() if text.endswith("Ċ")}
        self._starts = [0, *(place + 1 for place, token in enumerate(self.tokens) if token in newline)]

    def window(self, rng: Random, length: int) -> list[int]:
        start = rng.choice(self._starts)
        doubled = self.tokens[start : start + length]
        return doubled + self.tokens[: length - len(doubled)]

    def sample(self, rng: Random) -> Sample:
        length = LONG_WINDOW if rng.random() < LONG_SHARE else WINDOW
        before = list[int]()
        if rng.random() < ROW_PREFIX:
            asked, _ = unknown_pair(rng) if rng.random() < 0.5 else pair(rng)
            joint = rng.choice(("\n\n", "\n", " ", " "))
            before = self._tokenizer.encode(in_ascii(asked) + joint, add_special_tokens=False).ids[:64]
        tokens = self.window(rng, length)
        return Sample(before + tokens, [0.0] * len(before) + [TEXT] * len(tokens), is_text=True)


def in_ascii(text: str) -> str:
    return text.encode("ascii", "ignore").decode()


def batches(
    windows: Windows, tokenizer: Tokenizer, *, seed: int, tokens: int, raw_share: float
) -> Iterator[list[Sample]]:
    """Batches of about so many tokens, without end; `raw_share`: of the tokens, those of the documents."""
    rng = Random(f"samples {seed}")
    raw = 0
    total = 1
    while True:
        batch = list[Sample]()
        size = 0
        while size < tokens:
            sample = windows.sample(rng) if raw < raw_share * total else _of_dialogue(rng, windows, tokenizer)
            if sample is None:
                continue
            raw += len(sample.tokens) if sample.is_text else 0
            total += len(sample.tokens)
            size += len(sample.tokens)
            batch.append(sample)
        yield batch


def _of_dialogue(rng: Random, windows: Windows, tokenizer: Tokenizer) -> Sample | None:
    """One dialogue; None: it is too long."""
    spans = dialogue(rng)
    goes_on = rng.random() < AFTER_END
    sample = encoded(spans[:-1] if goes_on else spans, tokenizer)
    if goes_on:
        more = windows.window(rng, 96)
        sample = Sample(sample.tokens + more, sample.weights + [TEXT] * len(more))
    return sample if len(sample.tokens) <= MAX_TOKENS else None
