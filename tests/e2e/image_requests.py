"""Requests with pictures to an engine behind a router: in the body, behind links, and what the queue counted for them.

By name: the `status` of each answer, its `error` or `text`, the `tokens` of its prompt, and those that its router
`counted` for it before (`core.estimate`).
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from tests.e2e.continued_streams import GO_ON, WEATHER
from tests.e2e.images import MOVED_PATH, PictureServer, chat_messages, data_url, picture
from tests.fakes.asgi_client import CHAT, Client
from tests.fakes.engines import MODEL

ALLOWED = "127.0.0.2"  # in `media_domains` as an address
NAME = "localhost"  # in `media_domains` as a name, which leads to another address
DOMAINS = (ALLOWED, NAME)
TOKENS = 12
UNSEEN = (
    WEATHER
    | {"required": ["city", "days", "station", "rain"]}
    | {"properties": WEATHER["properties"] | {"rain": {"type": "boolean"}}}
)
SCHEMA = {"type": "json_schema", "json_schema": {"name": "unseen", "schema": UNSEEN, "strict": True}}


async def ask_about_pictures(client: Client, data: bytes, server: PictureServer) -> dict[str, Any]:
    links = {
        "data": data_url(data),
        "address": server.url(),
        "name": server.url(NAME),
        "other_address": server.url("127.0.0.1"),
        "redirect": server.url(path=MOVED_PATH),
        "no_picture": data_url(b"no picture"),
    }
    found: dict[str, Any] = {name: await ask(client, chat_messages(link)) for name, link in links.items()}
    found["two"] = await ask(client, {"messages": 2 * chat_messages(links["data"])["messages"]})
    found["three"] = await ask(client, {"messages": 3 * chat_messages(links["data"])["messages"]})
    new = chat_messages(data_url(picture(seed=7)))
    # A grammar is compiled after its request was rendered, so the other one reaches EngineCore before it.
    waits = {"response_format": SCHEMA, "max_tokens": TOKENS, "model": MODEL} | new
    answers = await asyncio.gather(client.post(waits, CHAT), client.post(waits | {"response_format": None}, CHAT))
    return found | {"fetched": server.asked, "at_once": [one.status for one in answers]}


async def ask(client: Client, messages: dict[str, Any]) -> dict[str, Any]:
    body = {"model": MODEL, "temperature": 0, "max_tokens": TOKENS} | messages | GO_ON
    reply = await client.post(body, CHAT)
    answer = json.loads(reply.body)
    if reply.status != 200:
        return {"status": reply.status, "error": answer["error"]}
    parts = client.edge.parts
    receipt = parts.receipts.find(reply.headers["x-serve-app-request-id"], None)
    assert receipt is not None
    measure = receipt.trace.measure
    return {
        "status": reply.status,
        "text": answer["choices"][0]["message"]["content"],
        "tokens": answer["usage"]["prompt_tokens"],
        "counted": measure.cost.prompt_tokens,
    }
