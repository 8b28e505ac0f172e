"""Batches as a client runs them: the lines of an input file, the undisturbed answers to them, and the official SDK.

Invariant: a row's answer depends on its own text alone, so whatever ran it gives the same.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import openai

from benchmarks.common.arms import BenchmarkError
from serve_app.engine import simulated
from serve_app.settings import ModelSettings
from serve_app.transport import Submit
from serve_app.types import Operation

ENDPOINT: Final = "/v1/completions"
PROMPT_WORDS = 6  # of a row: tokens of the simulated engine
RETRY_S = 0.5  # between attempts of a client whose stack is being killed
OVER = ("completed", "failed", "expired", "cancelled")  # states of a batch that do not change any more

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One line of an input file."""

    custom_id: str
    prompt: str
    max_tokens: int

    def body(self, model: str) -> dict[str, Any]:
        return {"model": model, "prompt": self.prompt, "max_tokens": self.max_tokens, "ignore_eos": True}

    def line(self, model: str) -> str:
        row = {"custom_id": self.custom_id, "method": "POST", "url": ENDPOINT, "body": self.body(model)}
        return json.dumps(row, separators=(",", ":"))


def rows_of(count: int, tokens: tuple[int, int], seed: int) -> list[BatchRow]:
    """Rows with texts of their own, each of `PROMPT_WORDS` words and from the least to the most output tokens."""
    draw = random.Random(f"{seed} batch")
    found = []
    for number in range(1, count + 1):
        words = (f"w{draw.randrange(10**6):06d}" for _ in range(PROMPT_WORDS - 1))
        found.append(BatchRow(f"row-{number}", " ".join((f"r{number}", *words)), draw.randint(*tokens)))
    return found


def input_file(rows: Sequence[BatchRow], model: str) -> bytes:
    """The input file, one line a row."""
    return "".join(f"{row.line(model)}\n" for row in rows).encode()


async def undisturbed(rows: Sequence[BatchRow], model: ModelSettings) -> dict[str, str]:
    """What a simulated engine alone answers to each row, by custom id."""
    instant = model.simulated.model_copy(update={"decode_step_s": 0.0, "start_s": 0.0})
    engine = simulated.SimulatedEngine(model.model_copy(update={"simulated": instant}))
    await engine.start()
    found = {}
    for number, row in enumerate(rows):
        order = Submit(number, row.custom_id, Operation.COMPLETION, row.body(model.name))
        document = b"".join([frame.body async for frame in engine.run(order)])
        found[row.custom_id] = text_of(json.loads(document))
    await engine.shutdown()
    return found


def text_of(completion: Any) -> str:
    """The text of a completion's first choice."""
    return str(completion["choices"][0]["text"])


def persisting(call: Callable[[], Value], bound_s: float) -> Value:
    """The call's answer, asked for again while the stack is away.

    Raises:
        BenchmarkError: none within `bound_s`, or one that no repeat changes.
    """
    deadline = time.monotonic() + bound_s
    while True:
        try:
            return call()
        except openai.APIStatusError as error:
            last: openai.OpenAIError = error
            if error.status_code < 500 and error.status_code not in (408, 409, 429):
                raise BenchmarkError(f"{error.status_code}: {error.message}") from None
        except openai.OpenAIError as error:
            last = error
        if time.monotonic() > deadline:
            raise BenchmarkError(f"no answer within {bound_s:g} s; the last one: {last}")
        time.sleep(RETRY_S)  # bound: bound_s


@dataclass(frozen=True, slots=True)
class BatchClient:
    """One batch by the official SDK; every call is repeated while the stack is away."""

    sdk: openai.OpenAI
    bound_s: float = 120.0  # of one call with its repeats

    def submit(self, content: bytes) -> str:
        """Upload an input file and begin a batch; its id."""
        upload = persisting(lambda: self.sdk.files.create(file=("rows.jsonl", content), purpose="batch"), self.bound_s)
        batch = persisting(
            lambda: self.sdk.batches.create(
                input_file_id=upload.id, endpoint=ENDPOINT, completion_window="24h", metadata={"of": "benchmark"}
            ),
            self.bound_s,
        )
        return batch.id

    def batch(self, batch_id: str) -> openai.types.Batch:
        return persisting(lambda: self.sdk.batches.retrieve(batch_id), self.bound_s)

    def cancel(self, batch_id: str) -> None:
        persisting(lambda: self.sdk.batches.cancel(batch_id), self.bound_s)

    def until_over(self, batch_id: str, bound_s: float, poll_s: float = 0.5) -> openai.types.Batch:
        """The batch once its state does not change any more, or as it is after `bound_s`."""
        deadline = time.monotonic() + bound_s
        while (batch := self.batch(batch_id)).status not in OVER and time.monotonic() < deadline:
            time.sleep(poll_s)  # bound: bound_s
        return batch

    def content(self, file_id: str | None) -> str:
        """A file's text; nothing where there is no such file."""
        if not file_id:
            return ""
        return persisting(lambda: self.sdk.files.content(file_id).text, self.bound_s)
