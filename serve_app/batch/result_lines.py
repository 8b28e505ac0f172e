"""The lines of output and error files, in OpenAI's format, and what becomes of a row's answer.

Invariant: a line is one line of JSON in ASCII, whatever the answer is.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from serve_app.batch.interfaces import RowAnswer
from serve_app.core.batches import ClaimedRow, RowResult, intake
from serve_app.errors import RequestFailed

MAX_ATTEMPTS = 3  # of a row that engines fail on: the third failure is its result


def runs_again(row: ClaimedRow, answer: RowAnswer) -> bool:
    """Whether this answer is an engine's death, and the row has attempts left; else the answer is its result."""
    code = answer.error_code
    is_failure = code in intake.KEY_USED_UP or (answer.status >= 500 and code != RequestFailed.code)
    return is_failure and row.attempts + 1 < MAX_ATTEMPTS


def answer_result(row: ClaimedRow, answer: RowAnswer) -> RowResult:
    """The result of a row that was answered."""
    try:
        body: Any = json.loads(answer.body)
    except ValueError:  # an answer which is no JSON: its text
        body = answer.body.decode(errors="replace")
    response = {"status_code": answer.status, "request_id": answer.request_id or line_id(row), "body": body}
    return RowResult(row.batch_id, row.number, answer.status >= 400, _line(row, response, None))


def error_result(row: ClaimedRow, code: str, message: str) -> RowResult:
    """The result of a row that never gets an answer."""
    return RowResult(row.batch_id, row.number, True, _line(row, None, {"code": code, "message": message}))


def refused_result(result: RowResult) -> RowResult:
    """What stands for a result that the store does not take."""
    line = json.loads(result.line)
    line["response"] = None
    line["error"] = {
        "code": "result_not_stored",
        "message": "the request was answered, and its answer cannot be stored",
    }
    return RowResult(result.batch_id, result.number, True, json.dumps(line, separators=(",", ":")))


def line_id(row: ClaimedRow) -> str:
    """The same whoever writes the line."""
    return "batch_req_" + hashlib.sha256(row_key(row.batch_id, row.number).encode()).hexdigest()[:32]


def row_key(batch_id: str, number: int, attempts: int = 0) -> str:
    """The Idempotency-Key of a row: a row that still runs after its worker died is joined. A counted attempt has
    failed, and the next one is another run."""
    return f"{batch_id}-{number}" + (f"-{attempts}" if attempts else "")


def _line(row: ClaimedRow, response: dict[str, Any] | None, error: dict[str, str] | None) -> str:
    line = {"id": line_id(row), "custom_id": row.custom_id, "response": response, "error": error}
    return json.dumps(line, separators=(",", ":"))
