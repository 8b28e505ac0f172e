"""The errors that a client can get, with status, code and class, and whether a repeat can succeed, from the code.

The classes are those of `serve_app.errors`. Codes are found where an error is raised (`code=...`), in the reasons of
the queue and of limits, and in HAProxy's own pages. Only what a code means is written here, in `MEANINGS`.
"""

from __future__ import annotations

import ast
import importlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from serve_app import errors
from serve_app.core.grammar_bounds import GRAMMAR_TOO_COMPLEX
from serve_app.core.limits import LimitReason
from serve_app.core.queue import RefusalReason, Refuse, refusal_error
from serve_app.errors import BadRequest, ConfigError, RateLimited, ServeAppError
from serve_app.http.error_responses import NO_RETRY, error_response
from serve_app.system import haproxy

ROOT = Path(__file__).resolve().parents[2]
# what is raised there is an exit status, a message in a log, or an error of a call from Python
NO_ANSWERS = (
    "cli/",
    "client/",
    "cluster/",
    "system/",
    "engine/start/",
    "batch/",
    "agents.py",
    "autoscaling/operations/draining.py",
)
ANSWERING = ("serve_app", "autoscaling/operations")
HAPROXY = "HAProxy"  # in place of a class
AT_ONCE = "yes"
LATER = "later"
NEVER = "no"
# between our own processes; an answer has another code in its place
INTERNAL = frozenset({"connection_lost", "lease_not_found", ConfigError.code})

MEANINGS: Mapping[str, str] = {
    # 400
    "invalid_request_error": "A field is wrong (`param` names it), or HAProxy cannot read the request.",
    "invalid_json": "The body is not a JSON object.",
    "invalid_http": "The bytes are no HTTP request.",
    "context_length_exceeded": "Prompt, or prompt and answer, exceed `max_model_len`.",
    "too_large": "More sequences, tokens or pixels than the model takes.",
    "grammar_too_complex": "The schema, regex or grammar takes too long to compile (`models[].grammar_cpu_s`).",
    "idempotency_key_reused": "The `Idempotency-Key` belongs to another request.",
    "session_too_large": "The session can never fit.",
    "empty_file": "The file has no line.",
    "too_many_rows": "The file has more than `batch.max_rows` lines.",
    "no_batch_workers": "`batch.workers` is 0.",
    # 401 to 405
    "invalid_api_key": "No key, or an unknown, expired, revoked or replaced key.",
    "invalid_token": "The token is not accepted; the message has the reason.",
    "permission_denied": "The class is above the key's `max_class`.",
    "not_admin": "The route is for operators.",
    "csrf": "Another page used the console's cookie.",
    "no_deploy_right": "The key may not deploy.",
    "needs_api_key": "A batch or background response needs a key: a token ends before it.",
    "only_from_machine": "Only the machine changes this.",
    "model_not_allowed": "The key may not use this model.",
    "model_not_found": "There is no such model.",
    "unknown_url": "There is no such route.",
    "not_found": "There is nothing at this path.",
    "session_not_found": "The session is unknown or has ended.",
    "session_taken_back": "Other tenants needed the session's memory. Open it again.",
    "request_not_ended": "The request waits or runs, and has no receipt yet.",
    "request_not_found": "The tenant has no request of this id.",
    "key_not_found": "There is no such key.",
    "deploy_not_found": "No such deployment.",
    "replica_not_found": "The quota actor does not know the replica.",
    "file_not_found": "The tenant has no such file.",
    "batch_not_found": "The tenant has no such batch.",
    "response_not_found": "The tenant has no such response, or its time is over.",
    "previous_response_not_found": "The same, of one that is continued.",
    "item_not_found": "The same, of an item.",
    "response_in_progress": "It has not ended, and cannot be continued yet.",
    "method_not_allowed": "`Allow` names the methods of the path.",
    "request_timeout": "The request arrives too slowly.",
    # 409 to 415
    "lease_conflict": "The state of the session does not allow the call.",
    "idempotency_answer_not_kept": "The answer was above 4 MiB.",
    "idempotency_run_lost": "Five routers died with the run of this key.",
    "key_conflict": "The key is of the configuration, revoked, or was changed meanwhile.",
    "deploy_conflict": "Another deployment runs.",
    "batch_conflict": "The batch has ended and cannot be cancelled.",
    "file_in_use": "A batch that has not ended reads this file.",
    "body_too_large": "Above `http.max_body_bytes`, or a file above `batch.max_file_bytes`.",
    "storage_quota_exceeded": "The tenant's files would exceed `batch.max_bytes_per_tenant`.",
    "unsupported_content_type": "The body is not JSON (of an upload: no form), or compressed, but not with gzip.",
    # 429
    "queue_full": "The queue is full of requests with as much right to wait.",
    "shed": "Evicted for a higher class or a lighter tenant.",
    "deadline": "It cannot start before its `X-Deadline-Ms`.",
    "timeout": "It waited `admission.max_wait_s`, or is predicted to.",
    "sessions": "Agent sessions hold the KV tokens that the request needs.",
    "rate_limit": "A limit a minute; without `Retry-After` the request can never be within it.",
    "concurrency": "The key or tenant has `max_concurrent` requests.",
    "quota": "The allowance of the day or the month is used up.",
    "insufficient_memory": "No memory for the session; the message has figures.",
    "too_many_sessions": "The tenant has `sessions.per_tenant` sessions.",
    "too_many_connections": "More than 512 connections of the client's address, or 20 logins in 10 s.",
    # 500 and above
    "internal_error": "A failure of serve-app; the log has its cause.",
    "request_failed": "The engine failed at this request and lives. A repeat would fail too.",
    "engine_failed": "The engine died after a part of the answer, or several engines died.",
    "engine_unreachable": "No engine got the request.",
    "not_continuable": "No other replica can [continue the stream](../explanation/continuity.md).",
    "slow_client": "The client left too much of the answer unread.",
    "slow_router": "The router read the engine's answer too slowly.",
    "run_lost": "The run that this request joined was lost with its router.",
    "router_lost": "The router died; whether the request ran is not known.",
    "no_replica": "No replica within `admission.no_replica_wait_s`.",
    "request_lost": "Router or quota actor failed at the request.",
    "not_ready": "`/ready`: no model has a replica.",
    "no_router": "No router takes requests.",
    "no_quota": "The quota actor does not answer.",
    "too_many_consoles": "Too many consoles at this router.",
    "no_controller": "Serve's controller or Ray does not answer.",
    "node_not_drained": "Ray refuses to drain the node.",
    "quota_away": "The same, or it waits for Ray's GCS.",
    "quota_recovering": "The quota actor rebuilds its ledger.",
    "session_closed": "The session was closed while its opening waited.",
    "limits_unavailable": "The limits of the key cannot be charged now.",
    "no_store": "The store is away; the log has the cause.",
    "no_jwks": "The keys of the identity provider (`auth.jwt`) cannot be read.",
    "no_storage": "The folder or bucket of files cannot be used.",
    "unknown_operation": "All replicas are of an earlier release.",
    "file_damaged": "The file is shorter than its record says.",
    "router_silent": "The router did not answer HAProxy in time.",
    "storage_full": "The disk of files is full; nothing of the file is kept.",
}


def classes() -> list[type[ServeAppError]]:
    """All classes of the tree, as they stand in the module."""
    return [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ServeAppError)]


def found() -> set[tuple[int, str, str]]:
    """Status, code and class of every error that an answer may have."""
    by_class = {(kind, kind.code) for kind in classes()} | set(_raised()) | {(BadRequest, GRAMMAR_TOO_COMPLEX)}
    refusals = (refusal_error(Refuse("", reason, None)) for reason in RefusalReason)
    by_class |= {(type(error), error.code) for error in refusals}
    by_class |= {(RateLimited, reason.value) for reason in LimitReason}
    known = {(kind.status, code, kind.__name__) for kind, code in by_class if code not in INTERNAL}
    codes = {(status, code) for status, code, _ in known}
    pages = {(status, code) for status, (_, code, _, _) in haproxy.ERRORS.items()}
    return known | {(status, code, HAPROXY) for status, code in pages - codes}


def _raised() -> Iterator[tuple[type[ServeAppError], str]]:
    """Each call of a class of the tree with a `code` that is a text or a constant, in the rooms that answer."""
    for file in sorted(file for folder in ANSWERING for file in (ROOT / folder).rglob("*.py")):
        path = file.relative_to(ROOT).as_posix().removeprefix("serve_app/")
        if path.startswith(NO_ANSWERS):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                kind = getattr(errors, node.func.id, None)
                values = [keyword.value for keyword in node.keywords if keyword.arg == "code"]
                if isinstance(kind, type) and values and (code := _text(values[0], file)) is not None:
                    yield kind, code


def _text(value: ast.expr, file: Path) -> str | None:
    """The text of a constant or of a module's name; None: it is known only when it is raised."""
    if isinstance(value, ast.Constant):
        return str(value.value)
    if not isinstance(value, ast.Name):
        return None
    module = importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
    text = getattr(module, value.id, None)
    return text if isinstance(text, str) else None


def repeat(status: int, code: str, name: str) -> str:
    """Whether a client should send the request again, as the headers of the answer say."""
    kind = getattr(errors, name, ServeAppError)
    error = kind("", code=code, retry_after_s=1.0)
    error.status = status
    if NO_RETRY in error_response(error)[1]:
        return NEVER
    return LATER if status in (429, 503, 504) else AT_ONCE


def answers() -> str:
    """A list for each status. Behind the status stand the usual class and repeat, in an item what differs."""
    classes_of: dict[tuple[int, str], list[str]] = {}
    for status, code, name in sorted(found()):
        classes_of.setdefault((status, code), []).append(name)
    parts = []
    for status in sorted({status for status, _ in classes_of}):
        rows = [
            (code, ", ".join(names), repeat(status, code, names[0]))
            for code in MEANINGS
            if (names := classes_of.get((status, code)))
        ]
        _, usual_class, usual_repeat = (Counter(column).most_common(1)[0][0] for column in zip(*rows, strict=True))
        parts += ["", f"**{status}** `{usual_class}`, repeat: {usual_repeat}", ""]
        for code, class_names, again in rows:
            differs = [f"`{class_names}`"] if class_names != usual_class else []
            differs += [f"repeat: {again}"] if again != usual_repeat else []
            in_parentheses = f" ({', '.join(differs)})" if differs else ""
            parts.append(f"- `{code}`{in_parentheses}: {MEANINGS[code]}")
    return "\n".join(parts)
