"""TLS of the endpoint: HAProxy ends it, with a certificate that changes while connections go on.

HAProxy reads certificate, chain and key from one file, `tls.pem` in the wrapper's folder. A node's supervisor looks at
the files that it was made of. When they have changed it is made anew, for every HAProxy that starts later, and the
HAProxy that runs gets it over its admin socket, without a reload.

Invariant: `tls.pem` is whole, for its owner alone, and its key belongs to its certificate; files that do not fit
together are logged and change nothing.
"""

from __future__ import annotations

import logging
import os
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from serve_app.errors import ConfigError

logger = logging.getLogger("serve_app")

TLS_VARIABLES = ("SERVE_APP_TLS_CERTIFICATE", "SERVE_APP_TLS_KEY")
PEM = "tls.pem"
ADMIN_SOCKETS = "h/*/admin.sock"  # of HAProxy, in the wrapper's folder: Serve puts its node's id between
ANSWER_S = 2.0  # HAProxy answers within a millisecond; else it is asked again at the next look


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files: the certificate with its chain, and its key without a password."""

    certificate: Path
    key: Path

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Tls | None:
        """From SERVE_APP_TLS_CERTIFICATE and SERVE_APP_TLS_KEY; None: neither is set.

        Raises:
            ConfigError: one is set without the other.
        """
        files = [environ.get(name, "") for name in TLS_VARIABLES]
        if not any(files):
            return None
        for name, file in zip(TLS_VARIABLES, files, strict=True):
            if not file:
                raise ConfigError(f"{name} is not set, and TLS needs certificate and key", param=name)
        return cls.at(*files)

    @classmethod
    def at(cls, certificate: str, key: str) -> Tls:
        """These files, from the current folder on or the user's own (`~`)."""
        return cls(Path(certificate).expanduser().absolute(), Path(key).expanduser().absolute())

    def environment(self) -> dict[str, str]:
        """What `of` reads."""
        return dict(zip(TLS_VARIABLES, (str(self.certificate), str(self.key)), strict=True))

    def read(self) -> bytes:
        """Both in one, as HAProxy reads them.

        Raises:
            ConfigError: a file cannot be read, is not PEM, or the key is another's or has a password.
        """
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.key, password="")
            parts = [file.read_bytes() for file in (self.certificate, self.key)]
        except (OSError, ValueError) as error:  # an SSLError is an OSError
            raise ConfigError(f"http.tls: {self.certificate} and {self.key}: {error}", param="http.tls") from None
        lines = [line for part in parts for line in part.splitlines() if line.strip()]  # an empty one ends a command
        return b"\n".join(lines) + b"\n"

    def stamp(self) -> list[tuple[int, int, int] | None]:
        """Differs once a file has changed; None: it cannot be seen."""
        return [_stamp(self.certificate), _stamp(self.key)]


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def write_pem(folder: Path, pem: bytes) -> None:
    """Put `tls.pem` into the folder, atomically."""
    draft = folder / f"{PEM}.new"
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(pem)
    draft.replace(folder / PEM)


class Certificate:
    """Keeps the certificate of a node's HAProxy up to date. `tls` None: there is none.

    Args:
        folder: the wrapper's.
    """

    def __init__(self, folder: Path, tls: Tls | None) -> None:
        self._folder = folder
        self._tls = tls
        self._seen: list[tuple[int, int, int] | None] | None = None
        self._pending: bytes | None = None  # what the HAProxy that runs has not taken yet

    def check(self) -> None:
        """Look at the files. Call it often."""
        if self._tls is None:
            return
        seen = self._tls.stamp()
        is_new = seen != self._seen
        if is_new:
            self._seen = seen
            try:
                pem = self._tls.read()
                held = self._folder / PEM
                if not held.exists() or pem != held.read_bytes():
                    write_pem(self._folder, pem)
                    self._pending = pem
            except ConfigError as error:
                logger.warning(
                    "Certificate %s is not used, and the endpoint keeps the old one: %s",
                    self._tls.certificate,
                    error.message,
                )
                return
            except OSError as error:  # a full disk; the node goes on with the certificate that it has
                logger.warning(
                    "Certificate %s cannot be stored yet, and the endpoint keeps the old one: %s",
                    self._tls.certificate,
                    error,
                )
                self._seen = None
                return
        if self._pending is None:
            return
        if any(self._hand_over(admin, self._pending) for admin in self._folder.glob(ADMIN_SOCKETS)):
            logger.info("Certificate %s is used by the endpoint from now on", self._tls.certificate)
            self._pending = None
        elif is_new:
            logger.warning("HAProxy did not take certificate %s yet and serves the old one", self._tls.certificate)

    def _hand_over(self, admin: Path, pem: bytes) -> bool:
        """Give it to the HAProxy of this socket; False: HAProxy did not take it."""
        name = str(self._folder / PEM).encode()
        try:
            _ask(admin, b"set ssl cert %s <<\n%s\n" % (name, pem))
            return b"Success" in _ask(admin, b"commit ssl cert %s\n" % name)
        except OSError:  # it starts, or has ended
            return False


def _ask(admin: Path, command: bytes) -> bytes:
    """HAProxy's answer to a command."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_S)
        connection.connect(str(admin))
        connection.sendall(command)
        return b"".join(iter(lambda: connection.recv(65_536), b""))
