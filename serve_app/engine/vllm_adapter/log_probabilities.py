"""Log probabilities of prompts and tokens, without a long turn of the engine's event loop.

vLLM 0.32.0 makes all entries of a prompt in one turn, for every answer of `n`, and decodes each entry's token anew:
8,000 tokens with 20 entries each took 3.7 s, in which the engine served nobody.

- EngineCore computes as many prompts at once as fill a step (`computed_in_turn`).
- Each token is decoded once (`decoded_once`).
- The entries of a prompt are made when its request reads them, by vLLM's own code, in slices: one slice in each turn of
  the event loop, tenants in turn, of a tenant the prompt that came first (`ScoringTurns`).
- Those of a whole answer are converted to OpenAI's format in the same way (`AnswerEntries`; `response_entries`).
- A prompt with more than `MAX_PROMPT_ENTRIES` is refused, since its answer is encoded in one turn.

Invariant: the entries are those that vLLM makes. Without one of `private_names.SCORING_NAMES` nothing is patched.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import functools
import importlib
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from serve_app.core.turns import TenantTurns
from serve_app.engine.prompt_turns import PrefillTurns, ScoredPrompt
from serve_app.engine.vllm_adapter.private_names import CHAT_SERVING, COMPLETION_SERVING, SCORING_NAMES, missing
from serve_app.engine.vllm_adapter.wrapped import wrap

logger = logging.getLogger("ray.serve")

MAX_PROMPT_ENTRIES = 49_152  # tokens times entries of a token times `n`, 8,192 x 6: encoded in 30 to 40 ms
SLICE_ENTRIES = 1024  # made in one turn of the event loop: 1 ms, and 10 ms where each is a part of a character

Convert = Callable[[Any, list[int]], list[str]]
Make = Callable[[Any, Any], None]
MakeAnswer = Callable[..., Any]


class PromptEntries:
    """In place of the entries of a prompt, until they are made.

    Args:
        processor: vLLM's processor of the request's log probabilities.
        make: vLLM's method of it, which makes entries of these log probabilities and adds them to the others.
    """

    def __init__(self, processor: Any, make: Make) -> None:
        self._processor = copy.copy(processor)  # with a list of its own: of the request's, no circle leads here
        self._processor.prompt_logprobs = list(processor.prompt_logprobs)
        self._make = make
        self.unmade: list[Any] = []  # as EngineCore sent them

    @property
    def made(self) -> list[Any]:
        return self._processor.prompt_logprobs  # type: ignore[no-any-return]

    def slices(self) -> Iterator[None]:
        """Makes the next entries at each step."""
        while self.unmade:
            tensors = self.unmade.pop(0)
            rows, columns = tensors.logprobs.shape
            step = tokens_of_slice(columns)
            for start in range(0, rows, step):
                part = slice(start, start + step)
                self._make(
                    self._processor,
                    tensors._replace(
                        logprob_token_ids=tensors.logprob_token_ids[part],
                        logprobs=tensors.logprobs[part],
                        selected_token_ranks=tensors.selected_token_ranks[part],
                    ),
                )
                yield


class Entries(Protocol):
    """Log probabilities that are made later."""

    def slices(self) -> Iterator[None]:
        """Makes the next entries at each step."""


class AnswerEntries:
    """The log probabilities of a choice of a whole answer, empty until they are made.

    Args:
        make: vLLM's method that makes them of tokens and their entries; `given` are its other arguments.
    """

    def __init__(self, make: MakeAnswer, tokens: Sequence[int], entries: Sequence[Any], given: dict[str, Any]) -> None:
        self._make = make
        self._tokens = tokens
        self._entries = entries
        self._given = given
        self.made = make(token_ids=[], top_logprobs=[], **given)

    def slices(self) -> Iterator[None]:
        """Makes the next entries at each step."""
        given = dict(self._given)
        step = tokens_of_slice(len(self._entries[-1] or ()))
        for start in range(0, len(self._tokens), step):
            part = slice(start, start + step)
            made = self._make(token_ids=self._tokens[part], top_logprobs=self._entries[part], **given)
            for name in type(made).model_fields:
                getattr(self.made, name).extend(getattr(made, name))
            if hasattr(made, "text_offset"):
                given["initial_text_offset"] = made.text_offset[-1] + len(made.tokens[-1])
            yield


# Of the whole answer that this task makes; None: none of its log probabilities are kept.
_kept: contextvars.ContextVar[list[Entries] | None] = contextvars.ContextVar("kept", default=None)


def keep_entries(is_whole: bool) -> list[Entries]:
    """The log probabilities of the answer that this task makes next, which it has to make itself; of a stream none."""
    kept: list[Entries] = []
    _kept.set(kept if is_whole else None)
    return kept


def keep(entries: Entries) -> bool:
    """Leave these of the answer that this task makes to it; False: it is a stream, which makes its own."""
    kept = _kept.get()
    if kept is not None:
        kept.append(entries)
    return kept is not None


class ScoringTurns:
    """Runs slices of work: one in each turn of the event loop, tenants in turn, each tenant's in order of arrival."""

    def __init__(self) -> None:
        self._turns = TenantTurns[tuple[Iterator[None], asyncio.Future[None]]]()  # slices, and when all have run

    async def run(self, tenant: str, slices: Iterator[None]) -> None:
        """Return when all slices have run; cancelling this leaves the others out. Raises what a slice raises."""
        if not self._turns.waiting:
            self._call_soon()
        done = asyncio.get_running_loop().create_future()
        self._turns.arrive(tenant, (slices, done))
        await done

    def _call_soon(self) -> None:
        asyncio.get_running_loop().call_soon(self._run_next, context=contextvars.Context())

    def _run_next(self) -> None:
        begun = self._turns.begin()
        if begun is None:
            return
        tenant, (slices, done) = begun
        if not done.done():  # else it was cancelled
            try:
                next(slices)
            except StopIteration:
                done.set_result(None)
            except BaseException as error:  # noqa: BLE001 - a panic of Rust, too; raised in the waiting `run`
                done.set_exception(error)
        if done.done():
            self._turns.end(tenant)
        else:
            self._turns.go_on(tenant, (slices, done))
        if self._turns.waiting:
            self._call_soon()


def tokens_of_slice(entries: int) -> int:
    """How many tokens with so many entries each are in a slice."""
    return max(1, SLICE_ENTRIES // max(1, entries))


def install() -> bool:
    """Patch vLLM's front end in this process; returns whether it has all the names."""
    if lacking := missing(SCORING_NAMES):
        logger.warning(
            "vLLM has changed and lacks %s; log probabilities of a long prompt delay other requests", ", ".join(lacking)
        )
        return False
    module: Any = importlib.import_module("vllm.v1.engine.logprobs")
    wrap(module, "convert_ids_list_to_tokens", functools.partial(decoded_once, WeakKeyDictionary()))
    wrap(module.LogprobsProcessor, "_update_prompt_logprobs", _kept_of_prompt)
    wrap(importlib.import_module(CHAT_SERVING).OpenAIServingChat, "_create_chat_logprobs", _kept_of_answer)
    completion: Any = importlib.import_module(COMPLETION_SERVING).OpenAIServingCompletion
    wrap(completion, "_create_completion_logprobs", _kept_of_answer)
    return True


def decoded_once(
    texts_of: WeakKeyDictionary[Any, dict[int, str]], convert: Convert, tokenizer: Any, token_ids: list[int]
) -> list[str]:
    """vLLM's texts of single tokens, with each token of a tokenizer converted once. Keeps one text a token of the
    vocabulary in `texts_of`: some 20 MB where that has 250,000 tokens."""
    texts = texts_of.setdefault(tokenizer, {})
    new = [token for token in dict.fromkeys(token_ids) if token not in texts]
    if new:
        texts.update(zip(new, convert(tokenizer, new), strict=True))
    return [texts[token] for token in token_ids]


def _kept_of_prompt(make: Make, processor: Any, tensors: Any) -> None:
    """vLLM's method that makes entries, less the making."""
    if not isinstance(processor.prompt_logprobs, PromptEntries):
        processor.prompt_logprobs = PromptEntries(processor, make)
    processor.prompt_logprobs.unmade.append(tensors)


def _kept_of_answer(
    make: MakeAnswer, serving: Any, *, token_ids: Sequence[int], top_logprobs: Sequence[Any], **given: Any
) -> Any:
    """vLLM's method that makes the log probabilities of a choice: many of a whole answer are left to `slices`."""
    made_here = functools.partial(make, serving)
    if token_ids and len(token_ids) > tokens_of_slice(len(top_logprobs[-1] or ())):
        entries = AnswerEntries(made_here, token_ids, top_logprobs, given)
        if keep(entries):
            return entries.made
    return made_here(token_ids=token_ids, top_logprobs=top_logprobs, **given)


def too_many_entries(tokens: int, entries: int, answers: int) -> str | None:
    """Why a prompt of so many tokens, with so many log probabilities each, is refused; None: it is not. Each answer
    repeats them."""
    if tokens * entries * answers <= MAX_PROMPT_ENTRIES:
        return None
    return (
        f"`prompt_logprobs`: a prompt may have {MAX_PROMPT_ENTRIES} log probabilities in all answers, and {entries} "
        f"for each of its {tokens} tokens are more" + (f" in {answers} answers" if answers > 1 else "")
    )


async def made_in_turns(
    outputs: AsyncGenerator[Any, None], tenant: str, turns: ScoringTurns
) -> AsyncGenerator[Any, None]:
    """The outputs of a request, with the entries of its prompt made."""
    async with aclosing(outputs):
        async for output in outputs:
            if isinstance(entries := output.prompt_logprobs, PromptEntries):
                await turns.run(tenant, entries.slices())
                output.prompt_logprobs = entries.made
            yield output


async def computed_in_turn(
    outputs: AsyncGenerator[Any, None], prompt: ScoredPrompt, turns: PrefillTurns
) -> AsyncGenerator[Any, None]:
    """The outputs of a request, which begins when its prompt has its turn."""
    async with turns.turn(prompt), aclosing(outputs):
        async for output in outputs:
            yield output
