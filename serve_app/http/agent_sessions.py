"""How coding agents name their conversations: beside `X-Session-Id`, which OpenCode sends, in headers of their own.

Decided here: `AGENT_HEADERS`, as seen from the agents that `tests/clients/agents.json` pins.

Invariant: what cannot be the id of a session counts as not sent: these headers and fields are in no contract of ours.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

MAX_SESSION_ID_CHARS = 128  # a UUID has 36; session ids are kept in routing tables
# An agent's subagents send the same id as the agent.
AGENT_HEADERS: Mapping[bytes, str] = {
    b"x-claude-code-session-id": "Claude Code",
    b"session-id": "Codex",
}
# Claude Code has it in `metadata.user_id`, too, which passes through proxies that drop headers: in an object as JSON,
# or, in older versions, at the end of a text.
MAX_USER_ID_CHARS = 1024  # Claude Code's has 200
_USER_ID_END = re.compile(r"_session_(.+)\Z")
_ID = re.compile(rf"[\x21-\x7e]{{1,{MAX_SESSION_ID_CHARS}}}")


def agent_session(headers: Mapping[bytes, bytes], body: Mapping[str, Any]) -> str | None:
    """The session that an agent names; None: none.

    Args:
        headers: by name in lower case.
        body: as the client sent it.
    """
    return next((text for text in _named(headers, body) if _ID.fullmatch(text)), None)


def _named(headers: Mapping[bytes, bytes], body: Mapping[str, Any]) -> Iterator[str]:
    for name in AGENT_HEADERS:
        yield headers.get(name, b"").decode("latin-1")
    metadata = body.get("metadata")
    user_id = metadata.get("user_id") if type(metadata) is dict else None
    if type(user_id) is str and len(user_id) <= MAX_USER_ID_CHARS:
        yield _in_user_id(user_id)


def _in_user_id(user_id: str) -> str:
    """The session in Claude Code's `user_id`; empty: none."""
    ending = _USER_ID_END.search(user_id)
    if ending is not None:
        return ending[1]
    try:
        found = json.loads(user_id)
    except (ValueError, RecursionError):
        return ""
    session = found.get("session_id") if type(found) is dict else None
    return session if type(session) is str else ""
