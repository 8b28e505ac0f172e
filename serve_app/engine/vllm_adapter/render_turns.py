"""vLLM's rendering in its one thread: tenants take turns, and of a text no more is read than can be kept.

vLLM submits each prompt of a request to that thread at once and takes them in the order of arrival, so that one call
with 2,000 texts holds up the single text of another tenant. A text that is truncated it tokenizes whole, and the texts
of a score that are truncated each by itself it tokenizes in the event loop.

Invariant: a tenant's next prompt waits for at most one prompt of each other tenant. The tokens that a prompt keeps are
those that vLLM would keep. Without one of `private_names.RENDER_NAMES` nothing is changed.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from vllm.entrypoints.pooling.base.serving import PoolingBaseServing
from vllm.entrypoints.pooling.scoring import io_processor as scoring
from vllm.renderers.params import TokenizeParams

from serve_app.core.turns import TenantTurns
from serve_app.engine.token_recorder import recorder_of_request
from serve_app.engine.vllm_adapter.private_names import RENDER_NAMES, missing
from serve_app.engine.vllm_adapter.wrapped import wrap

logger = logging.getLogger("ray.serve")


class RenderTurns:
    """The works that wait for an executor.

    Args:
        submit: the executor's own.
        tenant: whose work is submitted now.
    """

    def __init__(self, submit: Callable[[Callable[[], None]], Any], tenant: Callable[[], str]) -> None:
        self._submit = submit
        self._tenant = tenant
        self._turns = TenantTurns[tuple[Callable[[], Any], Future[Any]]]()  # calls, and where their results go
        self._lock = threading.Lock()

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As `Executor.submit`; what the executor runs then is the work whose turn it is."""
        result = Future[Any]()
        with self._lock:
            self._turns.arrive(self._tenant(), (functools.partial(call, *args, **kwargs), result))
        self._submit(self._run_next)
        return result

    def _run_next(self) -> None:
        with self._lock:
            begun = self._turns.begin()
            if begun is None:
                return
            tenant, (call, result) = begun
            self._turns.end(tenant)  # the executor bounds how many run; a turn is over when the next may be chosen
        if not result.set_running_or_notify_cancel():
            return
        try:
            result.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
            result.set_exception(error)


def take_turns(renderer: Any) -> None:
    """Make this renderer of vLLM work so."""
    if lacking := missing(RENDER_NAMES):
        logger.warning(
            "vLLM has changed and lacks %s; prompts are rendered by arrival, and a tenant can delay others", lacking
        )
        return
    executor: Any = renderer._executor
    pooling: Any = PoolingBaseServing
    # the executor stays: vLLM's objects hold it, and replace what is in it
    executor.submit = RenderTurns(executor.submit, _tenant).submit
    wrap(TokenizeParams, "_text_len_check", _checked_and_cut)
    pooling._preprocessing = preprocess
    wrap(scoring, "truncate_text_to_tokens", _cut_before)


def _tenant() -> str:
    recorder = recorder_of_request.get()
    return "" if recorder is None else recorder.tenant


def _checked_and_cut(check: Callable[[Any, Any, str], str], params: Any, tokenizer: Any, text: str) -> str:
    """vLLM's check of a text's length, which cuts only the texts of requests that name the side."""
    text = check(params, tokenizer, text)
    if params.truncate_prompt_tokens is None or params.truncation_side is not None or tokenizer is None:
        return text
    most = params.max_input_tokens
    if most is None or len(text) <= (chars := most * tokenizer.max_chars_per_token) or chars <= 0:
        return text
    return text[-chars:] if tokenizer.truncation_side == "left" else text[:chars]


def _cut_before(truncate: Callable[[str, Any, int], str], text: str, tokenizer: Any, max_tokens: int) -> str:
    # one token more, so that it still sees where the last one that is kept ends
    return truncate(text[: (max_tokens + 1) * tokenizer.max_chars_per_token], tokenizer, max_tokens)


async def preprocess(self: Any, io_processor: Any, ctx: Any) -> None:
    """As vLLM's `PoolingBaseServing._preprocessing`, which makes the prompts of a score in the event loop."""
    loop = asyncio.get_running_loop()
    prompts = await loop.run_in_executor(self.renderer._executor, io_processor.get_request_factory_online, ctx)
    if not prompts:
        raise ValueError("You must pass at least one prompt")
    ctx.engine_inputs = await asyncio.gather(*(io_processor.render_async(prompt) for prompt in prompts))
