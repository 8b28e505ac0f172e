"""What `serve-app batch` does over HTTP: files and batches as OpenAI defines them, and how one is shown.

Invariant: no file is ever whole in memory, a file of results appears complete or not at all, and a batch that is not
made leaves no uploaded file behind where that can be known.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

import requests
from rich.console import Console

from serve_app.cli.batch_upload import FormUpload
from serve_app.cli.batch_watch import Forecast, Sample, counts, duration, forecast, moment
from serve_app.cli.endpoint import SILENCE_S, Endpoint, fetch, request, session
from serve_app.cli.layout import Listing
from serve_app.cli.progress import ByteProgress
from serve_app.core.batches import ENDED, BatchStatus
from serve_app.errors import DROPPED, NO_ROUTER, BadRequest, NotFound, ServeAppError, Unavailable

FILES = "/v1/files"
BATCHES = "/v1/batches"
PAGE = 100  # batches of one answer, OpenAI's bound
CHUNK_BYTES = 256 * 1024  # read from a connection at once
COLUMNS = ("batch", "status", "completed", "failed", "total", "endpoint", "created", "ended")
STYLES = {"completed": "green", "failed": "red", "expired": "red", "cancelled": "yellow", "cancelling": "yellow"}
ENDS = ("completed_at", "failed_at", "expired_at", "cancelled_at")


def submit(
    endpoint: Endpoint, path: Path, size: int, route: str, window: str, metadata: Mapping[str, str], errors: Console
) -> dict[str, Any]:
    """The new batch of a file.

    Args:
        size: of the file, in bytes.
        route: that every row is for.
        errors: for the progress of the upload.

    Raises:
        ServeAppError: refused or unreachable. The uploaded file is deleted again if the batch was refused.
    """
    ask(endpoint, "GET", BATCHES, params={"limit": 1})  # a wrong key is known before the upload
    file_id = _upload(endpoint, path, size, errors)
    body = {"input_file_id": file_id, "endpoint": route, "completion_window": window, "metadata": dict(metadata)}
    try:
        return _batch(ask(endpoint, "POST", BATCHES, json=body), endpoint)
    except Unavailable as error:
        message = f"{error.message}; {path} is uploaded as {file_id}, see `serve-app batch list` for its batch"
        raise Unavailable(message, code=error.code) from None
    except ServeAppError:
        with contextlib.suppress(ServeAppError):  # the refusal is what the user has to know
            ask(endpoint, "DELETE", f"{FILES}/{quote(file_id, safe='')}")
        raise


def _upload(endpoint: Endpoint, path: Path, size: int, errors: Console) -> str:
    with ByteProgress(errors, f"uploading {path.name}", size) as progress:
        form = FormUpload(path, size, {"purpose": "batch"}, progress.advance)
        headers = {"Content-Type": form.content_type}
        try:
            found = ask(
                endpoint, "POST", FILES, data=form, headers=headers, timeout=(SILENCE_S, SILENCE_S)
            )  # the first of the two bounds each write, too, and a slow disk there may take a while
        except Unavailable as error:
            if error.code != NO_ROUTER:
                raise
            message = f"the connection broke after {form.sent:,} of {len(form):,} bytes; nothing was submitted"
            raise Unavailable(message, code=DROPPED) from None
    return str(found.get("id"))


def get(endpoint: Endpoint, batch_id: str, *, cancel: bool = False) -> dict[str, Any]:
    """The batch, cancelled first where that is asked for. Raises ServeAppError."""
    path = f"{BATCHES}/{quote(batch_id, safe='')}"
    found = ask(endpoint, "POST", f"{path}/cancel") if cancel else ask(endpoint, "GET", path)
    return _batch(found, endpoint)


def page(endpoint: Endpoint, limit: int, after: str | None) -> dict[str, Any]:
    """At most `limit` batches, the newest first, with `has_more` and `last_id`. Raises ServeAppError."""
    found: list[dict[str, Any]] = []
    more = True
    while more and len(found) < limit:
        query = {"limit": min(PAGE, limit - len(found)), "after": found[-1]["id"] if found else after}
        answer = ask(endpoint, "GET", BATCHES, params=query)
        batches = [_batch(one, endpoint) for one in answer.get("data") or ()]
        found += batches
        more = bool(answer.get("has_more") and batches)
    return {"object": "list", "data": found, "has_more": more, "last_id": found[-1]["id"] if found else None}


def file_of_results(batch: Mapping[str, Any], *, errors: bool) -> str | None:
    """The id of the output file, or of the error file; None: no row failed.

    Raises:
        NotFound: there is none yet, or no row succeeded.
    """
    batch_id = batch["id"]
    status = batch["status"]
    file_id = batch.get("error_file_id" if errors else "output_file_id")
    if file_id:
        return str(file_id)
    if status not in ENDED:
        raise NotFound(
            f"{batch_id} is {status}, its files are there when it has ended; `serve-app batch watch {batch_id}`"
        )
    if errors:
        return None
    failed = f"; `serve-app batch results {batch_id} --errors` has them" if batch.get("error_file_id") else ""
    why = "".join(f": {one['message']}" for one in errors_of(batch)[:1])
    raise NotFound(f"{batch_id} has {status} without the answer of any row{why}{failed}")


def content(endpoint: Endpoint, file_id: str, progress: ByteProgress | None = None) -> Iterator[bytes]:
    """The bytes of a file, as they come. Raises ServeAppError."""
    with session(endpoint) as http:
        path = f"{FILES}/{quote(file_id, safe='')}/content"
        response = request(http, endpoint, "GET", path, stream=True)
        if progress is not None and (length := response.headers.get("Content-Length", "")).isdigit():
            progress.expect(int(length))
        try:
            for chunk in response.iter_content(CHUNK_BYTES):
                if progress is not None:
                    progress.advance(len(chunk))
                yield chunk
        except requests.RequestException as error:
            raise Unavailable(f"the connection broke: {type(error).__name__}; begin again", code=DROPPED) from None


def write_results(chunks: Iterator[bytes], target: Path) -> int:
    """Write a file in the place of `target`, complete or not at all; its size in bytes. Raises ServeAppError."""
    temporary: Path | None = None
    try:
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as out:
            temporary = Path(out.name)
            size = copy(chunks, out)
            out.flush()
            os.fsync(out.fileno())
        temporary.chmod(_usual_mode())
        temporary.replace(target)
    except OSError as error:
        raise BadRequest(f"{target}: {error.strerror}", param="--out") from None
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
    return size


def copy(chunks: Iterator[bytes], out: BinaryIO | Any) -> int:
    return sum(out.write(chunk) for chunk in chunks)


def _usual_mode() -> int:
    """Of a new file of this user; a temporary one is private."""
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def ask(endpoint: Endpoint, method: str, path: str, **options: Any) -> dict[str, Any]:
    """The object that a route answers. Raises ServeAppError."""
    try:
        found = fetch(endpoint, method, path, **options)
    except requests.RequestException:
        raise _foreign(endpoint) from None
    if not isinstance(found, dict):
        raise _foreign(endpoint)
    return found


def _batch(found: Any, endpoint: Endpoint) -> dict[str, Any]:
    if not (isinstance(found, dict) and {"id", "status"} <= found.keys()):
        raise _foreign(endpoint)
    return found


def _foreign(endpoint: Endpoint) -> BadRequest:
    return BadRequest(f"{endpoint.url} does not answer as OpenAI's API does", param="--url")


def show(batch: Mapping[str, Any], console: Console) -> None:
    """Print a batch: where it stands, its times, its files, its metadata and the first errors of its file."""
    listing = Listing(console)
    completed, failed, total = counts(batch)
    head = [f"{batch['id']}: {batch['status']}"]
    if total:
        head += [f"{completed + failed:,} of {total:,} rows", f"{failed:,} failed"]
    listing.flow(head, ("batch", *_row(batch)), style=STYLES.get(batch["status"], ""))
    if batch["status"] == BatchStatus.IN_PROGRESS and batch.get("in_progress_at"):
        now = time.time()
        expected = forecast([Sample(batch["in_progress_at"], 0), Sample(now, completed + failed)], total)
        _show_forecast(listing, batch, expected, now)
    times = [f"created {moment(batch.get('created_at'))}"]
    end = next((batch[name] for name in ENDS if batch.get(name)), None)
    expires = batch.get("expires_at")
    times += [f"ended {moment(end)}"] if end else [f"expires {moment(expires)}"] if expires else []
    listing.flow([str(batch.get("endpoint")), *times], (), indent=1)
    for name, content in (("input_file_id", "input"), ("output_file_id", "output"), ("error_file_id", "errors")):
        if batch.get(name):
            listing.flow([content, str(batch[name])], ("file", content, str(batch[name])), indent=1)
    for name, value in (batch.get("metadata") or {}).items():
        listing.say(f"{name}={value}", ("metadata", name, str(value)), indent=1)
    for error in errors_of(batch):
        line = "" if error.get("line") is None else str(error["line"])
        text = f"line {line}: {error['message']}" if line else str(error["message"])
        listing.say(text, ("error", line, str(error.get("code") or ""), str(error["message"])), style="red", indent=1)


def _show_forecast(listing: Listing, batch: Mapping[str, Any], expected: Forecast, now: float) -> None:
    if expected.rows_per_s is None:
        return
    parts = [f"{expected.rows_per_s:,.1f} rows/s since it began"]
    record = ["forecast", f"{expected.rows_per_s:.3f}", ""]
    if expected.left_s is not None:
        end = now + expected.left_s
        late = batch.get("expires_at") and end > batch["expires_at"]
        parts.append(f"expected end {moment(end)}, in {duration(expected.left_s)}")
        parts += ["after it expires"] if late else []
        record[-1] = moment(end)
    listing.flow(parts, record, indent=1)


def show_list(found: Mapping[str, Any], console: Console) -> None:
    """Print a row for each batch, and how to see those before them."""
    listing = Listing(console)
    batches = found["data"]
    styles = [STYLES.get(one["status"], "") for one in batches]
    if not batches:
        listing.say("There is no batch.", ())
    listing.table("batch", COLUMNS, map(_row, batches), styles=styles)
    if found["has_more"]:
        listing.say(f"Older ones: serve-app batch list --after {found['last_id']}", ())


def _row(batch: Mapping[str, Any]) -> tuple[str, ...]:
    end = next((batch[name] for name in ENDS if batch.get(name)), None)
    rows = (f"{count}" for count in counts(batch))
    times = moment(batch.get("created_at")), moment(end)
    return str(batch["id"]), str(batch["status"]), *rows, str(batch.get("endpoint") or ""), *times


def errors_of(batch: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What is wrong with the lines of its file."""
    return (batch.get("errors") or {}).get("data") or []
