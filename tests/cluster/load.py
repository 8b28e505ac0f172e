"""Clients of the endpoint that ask one request after the other: run on the driver host, one JSON object a request;
ends with its input.

    python -m tests.cluster.load URL --models a,b --clients 4 --tokens 64    (key in SERVE_APP_API_KEY)

Each client streams and waits; what a request came to is one word:
    ok        all of it came
    refused   an answer that is an error, before any token; `detail` has its status and code
    cut       an error after the first token: an error event, or a connection that broke
    broken    a connection that broke before anything came
`silence_s` is the longest time in which nothing came, the wait for the first token or one after it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from typing import Any

import openai

PATIENCE_S = 150.0  # the longest a request may hang before this counts as broken; above every bound of the server's


async def ask(client: openai.AsyncOpenAI, model: str, tokens: int) -> dict[str, Any]:
    """One streamed request and what it came to."""
    began = last = time.time()
    first: float | None = None
    silence_s = 0.0
    pieces = 0
    outcome = "ok"
    detail = ""
    try:
        stream = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Hello!"}],
            max_tokens=tokens,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        finished = False
        async for chunk in stream:
            choice = chunk.choices[0] if chunk.choices else None
            if choice is not None and choice.delta.content:
                now = time.time()
                first = first or now
                silence_s, last = max(silence_s, now - last), now
                pieces += 1
            finished = finished or (choice is not None and choice.finish_reason is not None)
        if not finished:
            outcome = "cut"
            detail = "the stream ended early"
    except openai.APIStatusError as error:
        outcome = "refused"
        detail = f"{error.status_code} {error.code}"
    except openai.APIError as error:
        outcome = "cut" if first else "broken"
        detail = f"{type(error).__name__}: {error}"[:200]
    end = time.time()
    return {
        "model": model,
        "began": began,
        "wait_s": None if first is None else first - began,
        "silence_s": silence_s,
        "total_s": end - began,
        "pieces": pieces,
        "outcome": outcome,
        "detail": detail,
    }


async def ask_plainly(client: openai.AsyncOpenAI, model: str, tokens: int) -> dict[str, Any]:
    """One request without streaming; an error ends the program."""
    answer = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Hello!"}],
        max_tokens=tokens,
        extra_body={"ignore_eos": True},
    )
    usage = answer.usage
    return {
        "model": answer.model,
        "text": answer.choices[0].message.content,
        "tokens": usage.completion_tokens if usage else None,
    }


async def client_loop(client: openai.AsyncOpenAI, model: str, tokens: int, over: asyncio.Event) -> None:
    while not over.is_set():
        print(json.dumps(await ask(client, model, tokens)), flush=True)
        await asyncio.sleep(0.05)  # bound: until `over`; a client that is refused does not spin


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--models", required=True)
    parser.add_argument("--clients", type=int, default=1, help="for each model")
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--once", action="store_true", help="one plain and one streamed request for each model")
    options = parser.parse_args()
    async with openai.AsyncOpenAI(
        base_url=f"{options.url}/v1", api_key=os.environ["SERVE_APP_API_KEY"], max_retries=0, timeout=PATIENCE_S
    ) as client:
        if options.once:
            for model in options.models.split(","):
                print(json.dumps(await ask_plainly(client, model, options.tokens)), flush=True)
                print(json.dumps(await ask(client, model, options.tokens)), flush=True)
            return
        over = asyncio.Event()
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), over.set)  # the end of our input
        asking = [
            client_loop(client, model, options.tokens, over)
            for model in options.models.split(",")
            for _ in range(options.clients)
        ]
        await asyncio.gather(*asking)


if __name__ == "__main__":
    asyncio.run(main())
