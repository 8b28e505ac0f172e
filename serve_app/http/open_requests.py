"""The requests of this router that have not ended: which of them wait now, in the queue or aside, and for how long.

Invariant: a request is here from its arrival to its end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from typing import Any

from serve_app.core.receipts import bare_id
from serve_app.core.records import Group, full_record
from serve_app.http.request_record import RequestRecord
from serve_app.router import ModelRouter, RequestLog

LOOK_S = 2.0  # between two looks for the history; a look at 1,000 waiting requests takes a millisecond


class OpenRequests:
    """See the module.

    Args:
        models: the models served now, by name.
    """

    def __init__(self, models: Mapping[str, ModelRouter], log: RequestLog) -> None:
        self._models = models
        self._log = log
        self._records: dict[int, RequestRecord] = {}

    def add(self, record: RequestRecord) -> None:
        """A request has arrived."""
        self._records[id(record)] = record

    def remove(self, record: RequestRecord) -> None:
        """A request has ended."""
        self._records.pop(id(record), None)

    def waiting(self, tenant: str | None) -> list[dict[str, Any]]:
        """The records of the requests that wait now, of a tenant or (None) of all. `queued_as`: their ids at the quota
        actor."""
        now = time.monotonic()
        return [self._shown(record, now) for record in self._waiting() if tenant in (None, record.tenant)]

    def find(self, request: str, tenant: str | None) -> dict[str, Any] | None:
        """A request that has not ended, by our id, that of its answer, or the client's; of a tenant or (None) of all.
        `waits`: whether it waits now. `since_s`: for how long, else since its arrival."""
        now = time.monotonic()
        names = (request, bare_id(request))
        for record in self._records.values():
            if tenant in (None, record.tenant) and (record.request_id in names or record.client_id == request):
                waits = self._waits(record)
                since = _waits_since(record) if waits else record.started
                return {"waits": waits, "since_s": now - since, "replica_id": record.trace.replica_id}
        return None

    async def look(self) -> None:
        """Note again and again, for the history, how many wait."""
        while True:
            groups = [_group(record) for record in self._waiting()]
            if groups:
                self._log.waiting(groups)
            await asyncio.sleep(LOOK_S)

    def _waiting(self) -> Iterator[RequestRecord]:
        yield from filter(self._waits, list(self._records.values()))

    def _waits(self, record: RequestRecord) -> bool:
        """Whether a request waits now, in the queue or aside."""
        model = self._models.get(record.model)
        if model is None:
            return False
        return record.runs.aside is not None or any(model.queue.is_waiting(name) for name in _queued_as(record))

    def _shown(self, record: RequestRecord, now: float) -> dict[str, Any]:
        receipt = record.receipt(now).to_json_fields()
        aside = record.runs.aside
        place = {"router": self._log.router, "node": self._log.node}
        present = {
            "at": time.time() - receipt["total_s"],
            "outcome": None,
            "slo": None,
            "waits_for": None if aside is None else aside.reason,  # the quota actor knows the others' reasons
            "wait_s": now - _waits_since(record),
            "queued_as": self._tickets(record),
        }
        return full_record(receipt | record.own_fields() | place | present)

    def _tickets(self, record: RequestRecord) -> list[str]:
        model = self._models[record.model]
        return [ticket for name in _queued_as(record) if (ticket := model.queue.ticket_of(name))]


def _group(record: RequestRecord) -> Group:
    asked_model = "" if record.trace.is_shadow else record.trace.asked_model or ""
    return Group(record.model, record.request_class.label, record.tenant, asked_model)


def _waits_since(record: RequestRecord) -> float:
    aside = record.runs.aside
    return record.waits_since() if aside is None else aside.since


def _queued_as(record: RequestRecord) -> list[str]:
    """The ids of a request in the router's queue: a list of prompts has one for each."""
    return [part.request_id for part in record.parts or [record]]
