"""Requests with an `Idempotency-Key`: each runs once, whatever router its repeats reach.

Decides: whether a request runs here, joins a run, or gets a kept answer, and which answers are kept.
In: a request with its key; the quota actor's word on the claim. Out: the bytes of one run.
Never: runs the request itself, which its caller gives as a function; decides which of two routers runs a key.
"""

from serve_app.http.keyed.answers import fingerprint, key_digest, reused
from serve_app.http.keyed.runs import KeyedRequest, KeyedRuns

__all__ = ["KeyedRequest", "KeyedRuns", "fingerprint", "key_digest", "reused"]
