"""Log probabilities of prompts are those that vLLM makes, in slices that tenants take in turn."""

from __future__ import annotations

import asyncio
import functools
import importlib
import itertools
import random
from collections.abc import AsyncGenerator, Iterator
from functools import reduce
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from serve_app.engine.client_names import in_client_words
from serve_app.engine.tiny_model import ensure_tiny_model
from serve_app.engine.vllm_adapter import log_probabilities
from serve_app.engine.vllm_adapter.log_probabilities import (
    MAX_PROMPT_ENTRIES,
    SLICE_ENTRIES,
    PromptEntries,
    ScoringTurns,
    decoded_once,
    keep_entries,
    made_in_turns,
    too_many_entries,
)
from serve_app.engine.vllm_adapter.private_names import SCORING_NAMES
from tests.requires import requires

requires("vllm")

# six slices
TOKENS = 300
EACH = 20


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from vllm.tokenizers import get_tokenizer

    return get_tokenizer(str(ensure_tiny_model()))


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left patched after the test."""
    for name in SCORING_NAMES:
        *owners, last = name.path.split(".")
        owner = reduce(getattr, owners, importlib.import_module(name.module))
        monkeypatch.setattr(owner, last, getattr(owner, last))


def tensors(tokens: list[int], rows: int, draw: random.Random) -> Any:
    import torch
    from vllm.v1.outputs import LogprobsTensors

    ids = [[draw.choice(tokens) for _ in range(EACH + 1)] for _ in range(rows)]
    probabilities = [[-draw.random() for _ in range(EACH + 1)] for _ in range(rows)]
    ranks = [draw.randrange(1, 2000) for _ in range(rows)]
    return LogprobsTensors(torch.tensor(ids), torch.tensor(probabilities), torch.tensor(ranks))


def processed(tokenizer: Any, *chunks: Any) -> Any:
    """What vLLM's processor has for a request once EngineCore has sent these log probabilities."""
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine.logprobs import LogprobsProcessor

    processor = LogprobsProcessor(tokenizer, None, [None], None, None, EACH)
    for chunk in chunks:
        processor.update_from_output(EngineCoreOutput("r", [], new_prompt_logprobs_tensors=chunk))
    return processor.pop_prompt_logprobs()


async def source(*outputs: Any) -> AsyncGenerator[Any, None]:
    for output in outputs:
        yield output


def read(*entries: Any) -> list[Any]:
    """The entries of outputs with these, as a request reads them."""

    async def scenario() -> list[Any]:
        outputs = source(*(SimpleNamespace(prompt_logprobs=one) for one in entries))
        return [output.prompt_logprobs async for output in made_in_turns(outputs, "t", ScoringTurns())]

    return asyncio.run(scenario())


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("only_parts_of_characters", [False, True])
def test_the_entries_of_a_prompt_are_those_that_vllm_makes(tokenizer: Any, only_parts_of_characters: bool) -> None:
    draw = random.Random(7)
    tokens = list(range(len(tokenizer)))
    if only_parts_of_characters:
        tokens = [token for token in tokens if tokenizer.decode([token]).endswith("�")]
    chunks = tensors(tokens, TOKENS, draw), tensors(tokens, 1, draw), tensors(tokens, 70, draw)
    expected = processed(tokenizer, *chunks)
    log_probabilities.install()
    kept = processed(tokenizer, *chunks)
    assert isinstance(kept, PromptEntries)
    made, empty, nothing = read(kept, [None], None)
    assert made == expected
    assert [list(position or ()) for position in made] == [list(position or ()) for position in expected], "their order"
    assert type(made) is list
    assert (empty, nothing) == ([None], None)


@pytest.mark.usefixtures("restored")
def test_nothing_is_made_of_a_prompt_until_it_is_read_and_then_in_slices(tokenizer: Any) -> None:
    log_probabilities.install()
    kept = processed(tokenizer, tensors([5, 6], TOKENS, random.Random(7)))
    assert kept.made == [None]
    sizes = [len(kept.made)]
    for _ in kept.slices():
        sizes.append(len(kept.made))
    assert sizes[-1] == TOKENS + 1
    steps = [after - before for before, after in itertools.pairwise(sizes)]
    assert max(steps) * (EACH + 1) <= SLICE_ENTRIES
    assert len(steps) == 7


def test_a_name_that_has_moved_leaves_vllm_as_it_is(
    restored: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = importlib.import_module("vllm.v1.engine.logprobs")
    before = module.convert_ids_list_to_tokens
    monkeypatch.delattr("vllm.v1.engine.output_processor.RequestState._new_request_output")
    with caplog.at_level("WARNING", "ray.serve"):
        log_probabilities.install()
    assert "RequestState._new_request_output" in caplog.text
    assert module.convert_ids_list_to_tokens is before


def answer_of(method: str, tokenizer: Any, positions: int, *, echo: bool = False) -> Any:
    """What vLLM's serving object makes of these log probabilities of a choice."""
    from vllm.logprobs import Logprob

    (name,) = (name for name in SCORING_NAMES if name.path.endswith(method))
    owner, called = name.path.split(".")
    serving = object.__new__(getattr(importlib.import_module(name.module), owner))
    serving.return_tokens_as_token_ids = False
    draw = random.Random(5)
    tokens = [draw.randrange(len(tokenizer)) for _ in range(positions)]
    entries: list[Any] = [
        {one: Logprob(-draw.random(), draw.randrange(9), f"é{one}") for one in (token, *draw.sample(range(2000), EACH))}
        for token in tokens
    ]
    if echo:
        entries[0] = None
    return getattr(serving, called)(
        token_ids=tokens, top_logprobs=entries, num_output_top_logprobs=EACH, tokenizer=tokenizer
    )


METHODS = pytest.mark.parametrize("method", ["_create_chat_logprobs", "_create_completion_logprobs"])


@pytest.mark.usefixtures("restored")
@METHODS
@pytest.mark.parametrize("echo", [False, True])
def test_the_log_probabilities_of_a_whole_answer_are_those_that_vllm_makes(
    tokenizer: Any, method: str, echo: bool
) -> None:
    log_probabilities.install()
    assert keep_entries(is_whole=False) == []
    expected = answer_of(method, tokenizer, TOKENS, echo=echo)
    kept = keep_entries(is_whole=True)
    answer = answer_of(method, tokenizer, TOKENS, echo=echo)
    (entries,) = kept
    assert entries.made is answer
    assert answer != expected, "nothing is made yet"
    asyncio.run(ScoringTurns().run("t", entries.slices()))
    assert answer.model_dump_json() == expected.model_dump_json()
    keep_entries(is_whole=False)


@pytest.mark.usefixtures("restored")
@METHODS
def test_a_slice_of_an_answer_is_as_long_as_one_of_a_prompt(tokenizer: Any, method: str) -> None:
    log_probabilities.install()
    kept = keep_entries(is_whole=True)
    answer_of(method, tokenizer, SLICE_ENTRIES // (EACH + 1))
    assert kept == [], "a short one is made at once"
    answer_of(method, tokenizer, 0)
    answer_of(method, tokenizer, TOKENS)
    (entries,) = kept
    assert sum(1 for _ in entries.slices()) == 7
    keep_entries(is_whole=False)


@pytest.mark.usefixtures("restored")
def test_the_response_that_holds_them_is_filled(tokenizer: Any) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponseChoice, ChatMessage
    from vllm.entrypoints.openai.completion.protocol import CompletionResponseChoice

    log_probabilities.install()
    kept = keep_entries(is_whole=True)
    chat = ChatCompletionResponseChoice(
        index=0,
        message=ChatMessage(role="assistant", content="x"),
        logprobs=answer_of("_create_chat_logprobs", tokenizer, TOKENS),
    )
    completion = CompletionResponseChoice(
        index=0, text="x", logprobs=answer_of("_create_completion_logprobs", tokenizer, TOKENS)
    )
    for entries in kept:
        for _ in entries.slices():
            pass
    assert len(chat.model_dump()["logprobs"]["content"]) == TOKENS
    assert len(completion.model_dump()["logprobs"]["tokens"]) == TOKENS
    keep_entries(is_whole=False)


def test_each_token_of_a_tokenizer_is_decoded_once() -> None:
    asked: list[list[int]] = []

    def convert(tokenizer: Any, tokens: list[int]) -> list[str]:
        asked.append(tokens)
        return [f"{tokenizer.name}{token}" for token in tokens]

    class Tokenizer:
        def __init__(self, name: str) -> None:
            self.name = name

    once = functools.partial(decoded_once, WeakKeyDictionary(), convert)
    first = Tokenizer("a")
    second = Tokenizer("b")
    assert once(first, [3, 4, 3]) == ["a3", "a4", "a3"]
    assert once(first, [4, 5, 5, 3]) == ["a4", "a5", "a5", "a3"]
    assert once(first, [3]) == ["a3"]
    assert once(second, [3]) == ["b3"]
    assert once(first, []) == []
    assert asked == [[3, 4], [5], [3]]


class Work:
    """Slices of a prompt, each noted in `seen` when it runs."""

    def __init__(self, seen: list[str], name: str, count: int, error: BaseException | None = None) -> None:
        self.seen = seen
        self.name = name
        self.count = count
        self.error = error

    def slices(self) -> Iterator[None]:
        for _ in range(self.count):
            self.seen.append(self.name)
            yield
        if self.error is not None:
            raise self.error


def test_tenants_take_turns_and_of_a_tenant_the_first_prompt_is_first() -> None:
    seen: list[str] = []

    async def scenario() -> None:
        turns = ScoringTurns()
        heavy = [Work(seen, f"h{n}", 3) for n in range(3)]
        async with asyncio.TaskGroup() as group:
            for work in heavy:
                group.create_task(turns.run("heavy", work.slices()))
            group.create_task(turns.run("light", Work(seen, "light", 2).slices()))

    asyncio.run(scenario())
    assert [name for name in seen if name != "light"] == ["h0"] * 3 + ["h1"] * 3 + ["h2"] * 3
    assert seen[:4] == ["h0", "light", "h0", "light"]


def test_the_event_loop_turns_between_two_slices() -> None:
    seen: list[str] = []

    async def scenario() -> None:
        turns = ScoringTurns()

        async def another() -> None:
            while len(seen) < 30:
                seen.append("other")
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as group:
            for n in range(3):
                group.create_task(turns.run(f"t{n}", Work(seen, "slice", 4).slices()))
            group.create_task(another())

    asyncio.run(scenario())
    assert seen.count("slice") == 12
    assert all(pair != ("slice", "slice") for pair in itertools.pairwise(seen))


class Panic(BaseException):
    """What an extension in Rust raises."""


@pytest.mark.parametrize("error", [KeyError("x"), Panic("x")])
def test_a_prompt_whose_request_is_cancelled_or_fails_holds_nobody_up(error: BaseException) -> None:
    seen: list[str] = []

    async def scenario() -> None:
        turns = ScoringTurns()
        cancelled = asyncio.create_task(turns.run("a", Work(seen, "cancelled", 1000).slices()))
        failing = asyncio.create_task(turns.run("a", Work(seen, "failing", 2, error).slices()))
        last = asyncio.create_task(turns.run("a", Work(seen, "last", 2).slices()))
        await asyncio.wait([cancelled], timeout=0.0)
        cancelled.cancel()
        await last
        with pytest.raises(type(error)):
            await failing
        await turns.run("b", Work(seen, "later", 1).slices())

    asyncio.run(scenario())
    assert seen[seen.index("failing") :] == ["failing"] * 2 + ["last"] * 2 + ["later"]
    assert len(seen) < 1000


@pytest.mark.parametrize(("tokens", "entries"), [(2457, 20), (8192, 6), (24_576, 2), (MAX_PROMPT_ENTRIES, 1)])
def test_a_prompt_may_have_as_many_log_probabilities_as_its_bound(tokens: int, entries: int) -> None:
    assert too_many_entries(tokens, entries, 1) is None
    why = too_many_entries(tokens, entries + 1, 1)
    assert why is not None
    assert why.endswith(f"{entries + 1} for each of its {tokens} tokens are more")


def test_each_answer_repeats_the_log_probabilities_of_the_prompt() -> None:
    assert too_many_entries(1000, 6, 8) is None
    why = too_many_entries(1000, 6, 9)
    assert why is not None
    assert why.endswith("6 for each of its 1000 tokens are more in 9 answers")


@pytest.mark.parametrize("entries", [20, -1])
def test_more_log_probabilities_are_refused_before_the_request_begins(entries: int) -> None:
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams

    from serve_app.engine.vllm_adapter.recorded import RecordedLLM

    llm = RecordedLLM.__new__(RecordedLLM)
    llm.model_config = SimpleNamespace(get_vocab_size=lambda: 2048)
    prompt = {"type": "token", "prompt_token_ids": [1] * 4000}
    llm.prompt_turns = None
    with pytest.raises(VLLMValidationError) as refused:
        llm.generate(prompt, SamplingParams(prompt_logprobs=entries), "r")
    message = str(refused.value)
    for body, name in (({"prompt_logprobs": entries}, "prompt_logprobs"), ({"logprobs": 5, "echo": True}, "logprobs")):
        text, param = in_client_words(message, "prompt_logprobs", body)
        assert param == name
        assert text.startswith(f"`{name}`: a prompt may have {MAX_PROMPT_ENTRIES} log probabilities in all answers")
