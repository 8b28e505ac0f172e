"""Bounds the CPU time of a grammar's masks while its answer is generated.

EngineCore's only scheduling thread fills the masks of a step, so all sequences wait for the slowest mask; the masks of
an ambiguous grammar take longer with every token (1.2 s after 150 tokens, observed). vLLM ends a sequence whose grammar
rejects its token; this module lets a grammar reject it once its masks have used more CPU than its tokens earned.
"""

from __future__ import annotations

import logging
import time
from typing import Any

logger = logging.getLogger("ray.serve")

FIRST_S = 0.25  # the first masks of a large grammar are the most expensive
TOKEN_S = 0.004  # ordinary schemas take 0.1 ms a token, with 128,000 tokens to choose from up to 2.3 ms


def install() -> None:
    """Bound the grammars of this process, EngineCore or one of its workers."""
    from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

    bound_grammar(XgrammarGrammar)


def bound_grammar(grammar: Any) -> None:
    """Make grammars of this class (vLLM's `XgrammarGrammar`) reject the next token once they are over budget."""
    fill_bitmask = grammar.fill_bitmask
    accept_tokens = grammar.accept_tokens

    def fill(self: Any, bitmask: Any, index: int) -> None:
        begun = time.thread_time()
        fill_bitmask(self, bitmask, index)
        self.spent_s = getattr(self, "spent_s", 0.0) + time.thread_time() - begun

    def accept(self: Any, request_id: str, tokens: list[int]) -> bool:
        spent_s = getattr(self, "spent_s", 0.0)
        earned_s = FIRST_S + TOKEN_S * self.num_processed_tokens
        if spent_s > earned_s:
            logger.warning("Request %s ends early because its grammar took %.2f s of CPU", request_id, spent_s)
            return False
        begun = time.thread_time()
        accepted: bool = accept_tokens(self, request_id, tokens)
        self.spent_s = spent_s + time.thread_time() - begun
        return accepted

    grammar.fill_bitmask = fill
    grammar.accept_tokens = accept
