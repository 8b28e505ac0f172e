"""Log lines with the prompts of requests, where `logs.prompts` asks for them; by default no log has any.

Invariant: a prompt is in no other line, and each such line has `PROMPT_MARK`, by which a support bundle leaves it out.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec

logger = logging.getLogger("ray.serve")

FIELDS = (
    "messages",
    "prompt",
    "input",
    "instructions",
    "query",
    "queries",
    "documents",
    "text_1",
    "text_2",
    "texts",
    "inputs",
)
MAX_CHARS = 4_000  # of a line: what is longer is cut in the middle
CUT = " ... [cut] ... "


def prompt_text(body: Mapping[str, Any]) -> str:
    """The fields of a body that hold its prompt, as JSON in one line of ASCII, without the middle if it is long."""
    given = {name: body[name] for name in FIELDS if name in body}
    text = msgspec.json.encode(given).decode().encode("ascii", "backslashreplace").decode()
    half = (MAX_CHARS - len(CUT)) // 2
    return text if len(text) <= MAX_CHARS else text[:half] + CUT + text[-half:]


def log_prompt(request_id: str, tenant: str, text: str) -> None:
    """Write the line of a request."""
    logger.info("Request %s of tenant %r has the prompt: %s", request_id, tenant, text)


def warn_of_prompts() -> None:
    logger.warning(
        "Application writes prompts of all tenants to its logs, for everybody who may read these; logs.prompts is on"
    )
