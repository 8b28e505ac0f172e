"""The audit record as values: who changed what, and when. They cross process boundaries."""

from __future__ import annotations

import enum
import logging
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from serve_app.core.messages import message
from serve_app.store.records import KeyRecord
from serve_app.types import RequestClass

MACHINE = "machine"  # the author of what is done without a key: a command on a machine of the cluster
UNKNOWN = "unknown"  # the author of what a router of an earlier release changes
SECRET_FIELDS = ("digest", "previous_digest")  # of a key: the record only says that they changed


class AuditAction(enum.StrEnum):
    """What is recorded."""

    KEY_CREATE = "key.create"
    KEY_UPDATE = "key.update"
    KEY_ROTATE = "key.rotate"
    KEY_REVOKE = "key.revoke"
    DEPLOY = "deploy"
    ROLL_BACK = "deploy.roll_back"
    DRAIN = "drain"
    DEFRAG = "defrag"


@message
@dataclass(frozen=True, slots=True)
class Author:
    """Who changes something: the id of a key and its tenant, or `MACHINE`."""

    key_id: str = UNKNOWN
    tenant: str = ""


NOBODY_KNOWN = Author()


@message
@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One change.

    Args:
        action: an `AuditAction`, or one of another release.
        target: the id of a key, a replica or a node, or the name of an application.
        at: seconds since 1970 UTC.
        digest_before, digest_after: SHA-256 of the configuration, in hexadecimal digits.
        details: JSON values.
        entry_id: names the entry: added twice, it is there once.
        number: its place in the order in which entries became visible; the store sets it.
    """

    action: str
    target: str
    author: Author
    at: float
    digest_before: str | None = None
    digest_after: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    entry_id: str = field(default_factory=lambda: secrets.token_hex(16))
    number: int = 0


def unrecorded(entry: AuditEntry, error: BaseException, logger: logging.Logger) -> str:
    """Log that the record lacks something that was done, and why; returns the same for whoever did it."""
    reason = str(error) or type(error).__name__
    logger.warning("Store did not get the audit record of %s %s: %s", entry.action, entry.target, reason)
    return f"the audit record lacks this {entry.action}: {reason}"


def key_created(record: KeyRecord, author: Author, at: float) -> AuditEntry:
    details = {name: value for name, value in _shown(asdict(record)).items() if value is not None}
    return AuditEntry(AuditAction.KEY_CREATE, record.key_id, author, at, details=details)


def key_changed(before: KeyRecord, after: KeyRecord, author: Author, at: float) -> AuditEntry:
    """Of each field that differs its value before and after; of digests that they differ."""
    old, new = (_shown(asdict(record)) for record in (before, after))
    changed = {name: [old.get(name), new[name]] for name in new if old.get(name) != new[name]}
    action = AuditAction.KEY_UPDATE
    if before.digest != after.digest:
        action = AuditAction.KEY_ROTATE
    elif before.revoked_at != after.revoked_at:
        action = AuditAction.KEY_REVOKE
    details = {"name": after.name, "tenant": after.tenant, "changed": changed}
    return AuditEntry(action, after.key_id, author, at, details=details)


def _shown(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a key as JSON values."""
    shown = {name: value for name, value in fields.items() if name not in (*SECRET_FIELDS, "key_id", "version")}
    for name, value in shown.items():
        if isinstance(value, RequestClass):
            shown[name] = value.label
        elif isinstance(value, tuple):
            shown[name] = list(value)
        elif isinstance(value, dict):  # limits
            shown[name] = {limit: most for limit, most in value.items() if most is not None}
    return shown
