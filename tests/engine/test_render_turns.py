"""vLLM's rendering: tenants take turns in its one thread, and a truncated text is not tokenized to its end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from types import SimpleNamespace
from typing import Any

import pytest

from tests.requires import requires

requires("vllm")

from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: E402
from vllm.entrypoints.pooling.base.serving import PoolingBaseServing  # noqa: E402
from vllm.entrypoints.pooling.scoring import io_processor as scoring  # noqa: E402
from vllm.renderers import renderer_from_config  # noqa: E402
from vllm.renderers.params import TokenizeParams  # noqa: E402

from serve_app.engine.tiny_model import ensure_tiny_model  # noqa: E402
from serve_app.engine.token_recorder import TokenRecorder, recorder_of_request  # noqa: E402
from serve_app.engine.vllm_adapter.render_turns import RenderTurns, preprocess, take_turns  # noqa: E402

SOON_S = 60.0  # on a machine that others use
TOKENS = 64  # of the model's longest sequence
CHANGED = (
    (TokenizeParams, "_text_len_check"),
    (PoolingBaseServing, "_preprocessing"),
    (scoring, "truncate_text_to_tokens"),
)
LONG = "Once upon a time there was a bench. " * 20_000


class Thread:
    """An executor whose works run when the test says so."""

    def __init__(self) -> None:
        self.works: list[Callable[[], None]] = []

    def submit(self, work: Callable[[], None]) -> None:
        self.works.append(work)

    def run(self) -> None:
        while self.works:
            self.works.pop(0)()


@pytest.fixture
def renderer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One that takes turns; what `take_turns` changes in vLLM is undone."""
    for where, name in CHANGED:
        monkeypatch.setattr(where, name, getattr(where, name))
    arguments = AsyncEngineArgs(model=str(ensure_tiny_model()), dtype="float32", max_model_len=TOKENS)
    return renderer_from_config(arguments.create_engine_config())


def test_a_tenants_prompt_waits_for_one_of_each_other_tenant() -> None:
    thread = Thread()
    tenant = [""]
    done = list[str]()
    turns = RenderTurns(thread.submit, lambda: tenant[0])
    for name, count in (("many", 2000), ("one", 1), ("two", 2)):
        tenant[0] = name
        for number in range(count):
            turns.submit(done.append, f"{name}-{number}")
    thread.run()
    assert done[:6] == ["many-0", "one-0", "two-0", "many-1", "two-1", "many-2"]
    assert len(done) == 2003


def test_a_result_an_error_and_a_cancelled_work_end_as_of_any_executor() -> None:
    thread = Thread()
    turns = RenderTurns(thread.submit, str)
    doubled = turns.submit(lambda x: 2 * x, 4)
    failed = turns.submit(int, "x")
    left = turns.submit(pytest.fail)
    assert left.cancel()
    thread.run()
    assert doubled.result() == 8
    with pytest.raises(ValueError, match="invalid literal"):
        failed.result()
    with pytest.raises(CancelledError):
        left.result()


@pytest.mark.parametrize("keep", [5, TOKENS])
def test_a_truncated_text_is_cut_before_it_is_tokenized_and_keeps_the_same_tokens(renderer: Any, keep: int) -> None:
    params = TokenizeParams(max_total_tokens=TOKENS, max_output_tokens=0, truncate_prompt_tokens=keep)
    before = renderer.tokenize_prompt({"prompt": LONG}, params)["prompt_token_ids"]
    take_turns(renderer)
    read = params.apply_pre_tokenization(renderer.tokenizer, {"prompt": LONG})["prompt"]
    assert len(read) <= TOKENS * renderer.tokenizer.max_chars_per_token
    assert renderer.tokenize_prompt({"prompt": LONG}, params)["prompt_token_ids"] == before
    assert len(before) == keep


@pytest.mark.parametrize("keep", [1, 5, TOKENS])
def test_a_text_of_a_score_is_cut_before_it_is_tokenized_and_stays_the_same(renderer: Any, keep: int) -> None:
    before = scoring.truncate_text_to_tokens(LONG, renderer.tokenizer, keep)
    take_turns(renderer)
    read = list[int]()

    def tokenizer(text: str, **more: Any) -> Any:
        read.append(len(text))
        return renderer.tokenizer(text, **more)

    tokenizer.max_chars_per_token = renderer.tokenizer.max_chars_per_token  # type: ignore[attr-defined]
    assert scoring.truncate_text_to_tokens(LONG, tokenizer, keep) == before
    assert max(read) <= (keep + 1) * renderer.tokenizer.max_chars_per_token


def test_a_tenants_text_is_rendered_among_the_many_of_another(renderer: Any) -> None:
    """Through vLLM's own rendering, whose executor is the renderer's."""
    take_turns(renderer)
    params = TokenizeParams(max_total_tokens=TOKENS, max_output_tokens=0)
    ended = list[str]()

    async def render(tenant: str, text: str) -> None:
        recorder_of_request.set(TokenRecorder(1, (), tenant))
        await renderer.tokenize_prompt_async({"prompt": text}, params)
        ended.append(tenant)

    async def both() -> None:
        all_are_there = threading.Event()
        held = asyncio.get_running_loop().run_in_executor(vars(renderer)["_executor"], all_are_there.wait, SOON_S)
        many = [asyncio.create_task(render("many", "a b c")) for _ in range(200)]
        first = asyncio.create_task(render("one", "a"))
        await asyncio.sleep(0)  # they are submitted
        all_are_there.set()
        await asyncio.gather(held, first, *many)

    asyncio.run(both())
    assert ended.index("one") < 3, "whatever the thread has done before it is of the others"


def test_the_prompts_of_a_score_are_not_made_in_the_event_loop(renderer: Any) -> None:
    take_turns(renderer)
    threads = list[str]()

    def prompts(_ctx: Any) -> list[str]:
        threads.append(threading.current_thread().name)
        return ["a"]

    async def rendered(prompt: str) -> str:
        return prompt

    async def prepared() -> Any:
        ctx = SimpleNamespace(engine_inputs=None)
        processor = SimpleNamespace(get_request_factory_online=prompts, render_async=rendered)
        await preprocess(SimpleNamespace(renderer=renderer), processor, ctx)
        return ctx.engine_inputs

    assert asyncio.run(prepared()) == ["a"]
    assert threads != [threading.current_thread().name]
