"""The files of the console, from the package.

Invariant: only the names found at the start are served, so no path leads outside. A browser asks each time whether a
file has changed, so a new release is there at once.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources
from pathlib import PurePosixPath

from serve_app.errors import NotFound
from serve_app.http.error_responses import Answer, Headers

FOLDER = "serve_app.http.console"
INDEX = "index.html"
SHOWN_NAME_CHARS = 64
DIGEST_BYTES = 16  # of a file's digest, in its ETag
TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".mjs": b"text/javascript; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".svg": b"image/svg+xml",
    ".png": b"image/png",
    ".ico": b"image/x-icon",
    ".woff2": b"font/woff2",
    ".json": b"application/json",
    ".map": b"application/json",
}
TEXT = b"text/plain; charset=utf-8"  # licences
# No inline script or style, nothing from elsewhere, in no frame.
POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SECURE_HEADERS: Headers = [
    (b"content-security-policy", POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
]
NO_COPY: Headers = [(b"cache-control", b"no-store")]


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file."""

    content: bytes
    etag: bytes
    content_type: bytes


class PageFiles:
    """The files by name, read once."""

    def __init__(self) -> None:
        folder = resources.files(FOLDER).joinpath("files")
        found = {one.name: one.read_bytes() for one in folder.iterdir() if one.is_file()}
        self.by_name = {name: _file(name, content) for name, content in found.items() if not name.startswith(".")}

    def answer(self, name: str, known_etags: bytes) -> Answer:
        """A file, or 304 if the browser has it. `known_etags`: the header If-None-Match.

        Raises:
            NotFound: there is no file of this name.
        """
        file = self.by_name.get(name)
        if file is None:
            raise NotFound(f"the console has no file {name[:SHOWN_NAME_CHARS]!r}", code="unknown_url")
        kept = [*SECURE_HEADERS, (b"cache-control", b"no-cache"), (b"etag", file.etag)]
        # a proxy that compresses makes the ETag a weak one
        if file.etag in {one.strip().removeprefix(b"W/") for one in known_etags.split(b",")}:
            return 304, kept, b""
        return 200, [(b"content-type", file.content_type), *kept], file.content


def redirect() -> Answer:
    """From `/console` to the folder; relative, since a proxy may have put both below another path."""
    return 308, [*SECURE_HEADERS, (b"location", b"console/"), (b"cache-control", b"no-cache")], b""


def _file(name: str, content: bytes) -> PageFile:
    etag = b'"%s"' % hashlib.sha256(content).hexdigest()[: 2 * DIGEST_BYTES].encode()
    return PageFile(content, etag, TYPES.get(PurePosixPath(name).suffix, TEXT))
