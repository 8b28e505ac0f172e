"""Conversations that the server keeps: a turn's whole input, and the answer as it is sent and stored.

Decides: what a request of the Responses API asks of the store, and when its answer's end may be sent.
In: bodies, the store, the bytes of an answer. Out: expanded bodies, bytes with the store's fields, records.
Never: runs a request; what a record has is decided in `core.responses`.
"""

from serve_app.http.responses.following import follow
from serve_app.http.responses.memory import BackgroundKey, ResponseMemory
from serve_app.http.responses.turn import Turn, own_paths

__all__ = ["BackgroundKey", "ResponseMemory", "Turn", "follow", "own_paths"]
