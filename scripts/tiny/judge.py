"""`python -m scripts.tiny.judge [FOLDER]`: asks a trained model questions that the training never saw."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.tiny import calls, copies, json_answers
from scripts.tiny.samples import dialogue
from scripts.tiny.spans import CALL, CALL_END, Spans, given, plain, system, text_of
from scripts.tiny.topics import NUMBER, topics, unknown_pair
from serve_app.engine.tiny_model import CONFIG, FOLDER

ROWS = 64  # answered at a time
LONGEST = 120  # tokens of an answer
SHOWN = 8  # wrong answers printed of each kind
CASES = 80


class Model:
    """Greedy answers of a model folder."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def answers(self, prompts: Sequence[str], *, tokens: int = LONGEST) -> list[str]:
        """What follows each prompt, with its end."""
        found = list[str]()
        for start in range(0, len(prompts), ROWS):
            rows = self.tokenizer(list(prompts[start : start + ROWS]), return_tensors="pt", padding=True)
            made = self.network.generate(
                input_ids=rows["input_ids"],
                attention_mask=rows["attention_mask"],
                max_new_tokens=tokens,
                do_sample=False,
                temperature=None,
                pad_token_id=CONFIG["pad_token_id"],
            )
            texts = self.tokenizer.batch_decode(made[:, rows["input_ids"].shape[1] :])
            found += [text.replace("<|pad|>", "") for text in texts]
        return found

    def replies(self, chats: Sequence[Spans]) -> list[str]:
        """The model's turn after each conversation."""
        return self.answers([f"{text_of(chat)}<|turn|>assistant\n" for chat in chats])


def compare(name: str, asked: Sequence[str], wanted: Sequence[str], found: Sequence[str]) -> None:
    """Prints how many answers are the wanted ones, and some that are not."""
    wrong = [row for row in zip(asked, wanted, found, strict=True) if row[1] != row[2]]
    print(f"{name}: {len(asked) - len(wrong)} of {len(asked)}")
    for question, right, answered in wrong[:SHOWN]:
        print(f"    {question!r}\n      wanted {right!r}\n      found  {answered!r}")


def split(spans: Spans) -> tuple[Spans, str]:
    """A conversation before the model's last turn, and that turn."""
    last = max(place for place, span in enumerate(spans) if span.text == "<|turn|>assistant\n")
    return spans[:last], text_of(spans[last + 1 :]).removesuffix("\n")


def judge_topics(model: Model) -> None:
    for name, questions in (
        ("questions of the training", [(topic.first, topic.answer) for topic in topics()]),
        ("questions held out", [(text, topic.answer) for topic in topics() for text in topic.held_out]),
    ):
        asked = [text.replace(NUMBER, "17") for text, _ in questions]
        wanted = [f"{answer.replace(NUMBER, '17')}<|end|>" for _, answer in questions]
        compare(name, asked, wanted, model.replies([given("user", text) for text in asked]))


def judge_dialogues(model: Model) -> None:
    """Fresh dialogues of each kind: their last turns."""
    rng = Random("judge")
    for name, made in (
        ("calls", calls.dialogue),
        ("JSON", json_answers.dialogue),
        ("copies", copies.dialogue),
        ("unknown", _unknown),
    ):
        cases = [split(made(rng)) for _ in range(CASES)]
        found = model.replies([chat for chat, _ in cases])
        compare(name, [text_of(chat)[-160:] for chat, _ in cases], [turn for _, turn in cases], found)


def _unknown(rng: Random) -> Spans:
    asked, answered = unknown_pair(rng)
    return (*given("user", asked), *plain(answered))


WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
BOOKING = {
    "type": "object",
    "properties": {"guests": {"type": "integer"}, "date": {"type": "string"}, "restaurant": {"type": "string"}},
    "required": ["guests", "date", "restaurant"],
}
TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {"name": "get_weather", "description": "The weather in a city", "parameters": WEATHER},
    "get_current_weather": {"name": "get_current_weather", "description": None, "parameters": WEATHER},
    "reserve_table": {"name": "reserve_table", "parameters": BOOKING},
    "lookup_isbn": {
        "name": "lookup_isbn",
        "description": "Find a book",
        "parameters": {"type": "object", "properties": {"isbn": {"type": "string"}}},
    },
}
BY_HAND: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("get_weather", "What is the weather in Paris?", {"city": "Paris"}),
    ("get_weather", "Weather in Rome?", {"city": "Rome"}),
    ("get_weather", "How is the weather in Reykjavik today?", {"city": "Reykjavik"}),
    ("get_weather", "Is it raining in Glasgow?", {"city": "Glasgow"}),
    ("get_current_weather", "What's the weather like in San Francisco?", {"city": "San Francisco"}),
    ("reserve_table", "Reserve a table for 4 guests on 2026-12-24 at restaurant Roma.",
     {"guests": 4, "date": "2026-12-24", "restaurant": "Roma"}),
    ("lookup_isbn", "Look up isbn 978-3-16.", {"isbn": "978-3-16"}),
)  # fmt: skip


def judge_by_hand(model: Model) -> None:
    chats = [(*system("", [TOOLS[name]]), *given("user", text)) for name, text, _ in BY_HAND]
    wanted = [
        f'{CALL}{{"name": "{name}", "arguments": {json.dumps(arguments)}}}{CALL_END}<|end|>'
        for name, _, arguments in BY_HAND
    ]
    compare("calls by hand", [text for _, text, _ in BY_HAND], wanted, model.replies(chats))


PROMPTS = (
    "The", "Once", "Tell me of the river", "5 times describe the river in the winter for people", "Hello!", "word",
    "# How to", "| setting | effect |", "{", "import asyncio", "What is serve-app?", "a", "1", "serve-app", "The model",
)  # fmt: skip


def judge_text(model: Model) -> None:
    """Raw text: does it end, is it readable?"""
    found = model.answers(PROMPTS, tokens=500)
    print(f"raw text that ends within 500 tokens: {sum('<|' in text for text in found)} of {len(found)}")
    for prompt, text in list(zip(PROMPTS, found, strict=True))[:SHOWN]:
        print(f"    {prompt!r}: {text[:160]!r} ... {text[-80:]!r}")


def main() -> None:
    model = Model(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
    judge_topics(model)
    judge_dialogues(model)
    judge_by_hand(model)
    judge_text(model)
    rng = Random("shown")
    print(text_of(dialogue(rng)))


if __name__ == "__main__":
    torch.set_num_threads(2)
    main()
