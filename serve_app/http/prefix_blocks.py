"""Hashes of the blocks of a prompt, for the request log: a simulator sees from them which requests share a prefix.

A block is `BLOCK_BYTES` of the prompt as JSON: tools, then messages. Its hash covers all blocks before it, too, so two
prompts with one hash have the same beginning up to there. The key is the tenant's own salt: prefix caches are a
tenant's own, and a hash does not tell its text to who has a guess.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from serve_app.types import Operation

BLOCK_BYTES = 2048  # some 512 tokens, as traces of the field have them
MAX_BLOCKS = 64  # 32,000 tokens; each costs 3 us
DIGEST_BYTES = 6  # a million blocks have one pair by chance with 0.2%


def prefix_blocks(operation: Operation, body: Mapping[str, Any], salt: str) -> tuple[str, ...]:
    """The hashes of the prompt's whole blocks; a list of prompts, and what generates nothing, has none."""
    match operation:
        case Operation.CHAT | Operation.MESSAGES:
            parts: list[Any] = [body.get("tools"), body.get("messages")]
        case Operation.RESPONSES:
            parts = [body.get("instructions"), body.get("tools"), body.get("input")]
        case Operation.COMPLETION:
            prompt = body.get("prompt")
            if type(prompt) is list and any(type(entry) is not int for entry in prompt[:1]):
                return ()
            parts = [prompt]
        case _:
            return ()
    data = msgspec.json.encode(parts)
    key = salt.encode()[: hashlib.blake2b.MAX_KEY_SIZE]
    found = []
    digest = b""
    for begin in range(0, min(len(data) // BLOCK_BYTES, MAX_BLOCKS) * BLOCK_BYTES, BLOCK_BYTES):
        block = hashlib.blake2b(digest, digest_size=DIGEST_BYTES, key=key)
        block.update(memoryview(data)[begin : begin + BLOCK_BYTES])
        digest = block.digest()
        found.append(digest.hex())
    return tuple(found)
