"""The output tokens of a stream's continued runs inside vLLM's engine: in EngineCore and its workers.

They are put where output tokens belong, the state that a request has after vLLM's own preemption, so that grammars,
penalties, `min_tokens` and seeds continue (docs/decisions/routing-and-continuity.md).

Invariant: a request without such tokens runs as vLLM runs it, and without any one of `ENGINE_NAMES` nothing is patched.
No import of vLLM at the top: EngineCore loads this module, and a name that has moved must break nothing else.
"""

from __future__ import annotations

import logging
from typing import Any

from serve_app.engine.vllm_adapter.private_names import ENGINE_NAMES, missing

logger = logging.getLogger("ray.serve")

PRODUCED = "serve_app_produced"  # in `extra_args`: the tokens; the router drops `vllm_xargs`, which clients could use
ENGINE_HALF = "serve_app_continues"  # a method of EngineCore, there if these patches are


def install() -> None:
    """Patch this process, EngineCore or one of its workers; once."""
    lacking = missing(ENGINE_NAMES)
    if lacking:
        logger.warning(
            "vLLM has changed and lacks %s; the engine continues no streams of a lost replica", ", ".join(lacking)
        )
        return
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    make_request: Any = Request.from_engine_core_request
    create_grammar: Any = StructuredOutputManager._create_grammar
    post_init: Any = CachedRequestState.__post_init__

    def continued_request(request: Any, block_hasher: Any) -> Any:
        found = make_request(request, block_hasher)
        tokens = _produced(request.sampling_params)
        if tokens:
            found.append_output_token_ids(tokens)
            found.prefill_stats = None  # else a cached prefix that reaches into these tokens ends EngineCore
        return found

    def continued_grammar(self: Any, request: Any) -> Any:
        grammar = create_grammar(self, request)
        tokens = _produced(request.sampling_params)
        if tokens:
            start, _ = self._get_constraint_bounds(request, tokens, spec_tokens_committed=True)
            if start <= len(tokens):  # else all of them are reasoning
                request.structured_output_request.reasoning_ended = True
                if not grammar.accept_tokens(request.request_id, tokens[start:]):
                    raise ValueError("the tokens of continued runs do not fit the grammar")
        return grammar

    def continued_state(self: Any) -> None:
        post_init(self)  # only model runner V1 has such states; V2 gets these tokens from the scheduler
        tokens = _produced(self.sampling_params)
        self.output_token_ids.extend(tokens)
        if self.generator is not None:
            _advance(self.generator, len(tokens))

    for owner, name, patch in (
        (Request, "from_engine_core_request", staticmethod(continued_request)),
        (StructuredOutputManager, "_create_grammar", continued_grammar),
        (CachedRequestState, "__post_init__", continued_state),
        (EngineCore, ENGINE_HALF, lambda self: True),
    ):
        setattr(owner, name, patch)


def _produced(params: Any) -> list[int]:
    arguments = getattr(params, "extra_args", None) or {}
    tokens: list[int] = arguments.get(PRODUCED, [])
    return tokens


def _advance(generator: Any, tokens: int) -> None:
    """Draw what vLLM's sampler on the CPU has drawn for so many tokens."""
    import torch

    for _ in range(tokens):
        torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long)
