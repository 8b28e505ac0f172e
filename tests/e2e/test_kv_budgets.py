"""KV budgets on a real engine whose pool is far smaller than what is asked of it.

Nothing is refused, and vLLM never has to take a running request's blocks away.
"""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

from tests.e2e import prompts
from tests.e2e.observe import Observer
from tests.e2e.stack import CONFIG, Stack
from tests.e2e.test_two_models import become

SMALL = "tiny-small"
SMALL_MODEL = {
    "name": SMALL,
    "path": "tiny",
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 32,
    "kv_cache_gb": 0.02,  # about 5,000 tokens: a quarter of what the batch's slots would fill
}
CLIENTS, REQUESTS = 48, 64
LOOK_S = 0.2


def test_requests_beyond_the_pool_wait_for_their_tokens_and_none_is_preempted(stack: Stack) -> None:
    observer = Observer(stack)
    try:
        become(stack, [*CONFIG["models"], SMALL_MODEL])
        fullest = 0.0
        over = threading.Event()

        def look() -> None:
            nonlocal fullest
            while not over.wait(LOOK_S):  # bound: the requests' own
                fullest = max(fullest, observer.value("serve_app_engine", model=SMALL, figure="kv_cache_usage"))

        def ask(number: int) -> str:
            draw = random.Random(number)
            prompt = " ".join(prompts.text(draw.randrange(16)) for _ in range(draw.randint(1, 8)))
            body = {"model": SMALL, "prompt": prompt, "max_tokens": draw.randint(100, 500), "ignore_eos": True}
            answer = stack.post("/v1/completions", body)
            return "ok" if answer.status_code == 200 else answer.text

        looking = threading.Thread(target=look, daemon=True)
        looking.start()
        with ThreadPoolExecutor(CLIENTS) as callers:
            answers = list(callers.map(ask, range(REQUESTS)))
        over.set()
        looking.join()
        assert set(answers) == {"ok"}
        assert fullest > 0.5, "the pool was never half full: this test shows nothing"
        assert observer.value("serve_app_engine", model=SMALL, figure="preemptions") == 0
    finally:
        become(stack, CONFIG["models"])
