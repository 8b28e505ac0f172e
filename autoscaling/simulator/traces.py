"""Readers of request traces: Azure's and BurstGPT's CSV, Mooncake's JSON lines, `serve-app requests --export`. Pure: a
caller opens the file and hands in its lines.

Every reader gives requests in the order of their moments, which count from the first one. An answer has at least one
token, and a prompt, too: engines run nothing less. A file that is not what it should be is refused, with the line and
the field.
"""

from __future__ import annotations

import calendar
import csv
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autoscaling.simulator.requests import SimulatedRequest
from serve_app.errors import BadRequest
from serve_app.types import CLASS_ALIASES, Outcome, RequestClass

AZURE_FIELDS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURST_GPT_FIELDS = ("Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type")
MOONCAKE_FIELDS = ("timestamp", "input_length", "output_length")
EXPORT_FIELDS = ("at", "tenant", "request_class", "model", "outcome")
NOT_OFFERED = frozenset({Outcome.BAD_REQUEST, Outcome.UNAUTHORIZED})
_MOMENT = re.compile(r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(\.\d+)?(?:Z|[+-]00:?00)?")


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One row of a trace, and its line in the file."""

    line: int
    fields: Mapping[str, Any]

    def error(self, name: str, why: str) -> BadRequest:
        """What is wrong with a field."""
        return BadRequest(f"line {self.line} of the trace: {name}: {why}", param=name)

    def value(self, name: str) -> Any:
        found = self.fields.get(name)
        if found is None:
            raise self.error(name, "it is missing")
        return found

    def number(self, name: str) -> float:
        """A finite number of at least zero."""
        value = self.value(name)
        try:
            found = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            found = math.nan
        if not 0.0 <= found < math.inf:
            raise self.error(name, f"{value!r} is not a number of at least 0")
        return found

    def tokens(self, name: str) -> int:
        """A whole number of tokens; at least one."""
        found = self.number(name)
        if not found.is_integer():
            raise self.error(name, f"{self.value(name)!r} is not a whole number")
        return max(1, int(found))

    def text(self, name: str) -> str:
        found = self.value(name)
        if not isinstance(found, str):
            raise self.error(name, f"{found!r} is not a text")
        return found

    def moment(self, name: str) -> float:
        """A date and time of UTC, in seconds since 1970."""
        text = self.text(name)
        parts = _MOMENT.fullmatch(text.strip())
        try:
            if parts is not None:
                whole = calendar.timegm(tuple(map(int, parts.group(1, 2, 3, 4, 5, 6))))
                return whole + float(parts.group(7) or 0.0)
        except ValueError:
            pass  # no such day: refused below
        raise self.error(name, f"{text!r} is not a date and time as 2023-11-16 18:15:46.68")


def azure(lines: Iterable[str], model: str) -> list[SimulatedRequest]:
    """Azure's traces of LLM services: one tenant. Raises BadRequest."""
    return _in_order(
        SimulatedRequest(
            row.moment("TIMESTAMP"),
            "azure",
            RequestClass.NORMAL,
            model,
            row.tokens("ContextTokens"),
            row.tokens("GeneratedTokens"),
        )
        for row in _csv_rows(lines, AZURE_FIELDS)
    )


def burst_gpt(lines: Iterable[str], model: str) -> list[SimulatedRequest]:
    """BurstGPT's trace: its models are the tenants. Raises BadRequest."""
    return _in_order(
        SimulatedRequest(
            row.number("Timestamp"),
            row.text("Model"),
            RequestClass.NORMAL,
            model,
            row.tokens("Request tokens"),
            row.tokens("Response tokens"),
        )
        for row in _csv_rows(lines, BURST_GPT_FIELDS)
    )


def mooncake(lines: Iterable[str], model: str) -> list[SimulatedRequest]:
    """Mooncake's traces: one tenant, prompts with the hashes of their blocks. Raises BadRequest."""
    return _in_order(
        SimulatedRequest(
            row.number("timestamp") / 1000,
            "mooncake",
            RequestClass.NORMAL,
            model,
            row.tokens("input_length"),
            row.tokens("output_length"),
            prefix_blocks=_blocks(row, "hash_ids"),
        )
        for row in _json_rows(lines, MOONCAKE_FIELDS)
    )


def exported(lines: Iterable[str]) -> list[SimulatedRequest]:
    """Records of `serve-app requests --export`: what was offered, with its own models and classes. Of a request that
    did not run the estimate counts. Bad requests, and those that took no slot, are left out. Raises BadRequest."""
    return _in_order(
        _exported_request(row)
        for row in _json_rows(lines, EXPORT_FIELDS)
        if row.text("outcome") not in NOT_OFFERED and row.fields.get("slots") != 0
    )


def read_trace(lines: Iterable[str], model: str) -> list[SimulatedRequest]:
    """A trace of any of these kinds, as its first line says.

    Args:
        model: that the requests ask for, where the trace does not say it.

    Raises:
        BadRequest: the first line is of no known kind, or a line is wrong.
    """
    coming = iter(lines)
    first = next(coming, "")
    read = _reader_of(first)
    if read is None:
        kinds = "Azure's or BurstGPT's CSV, Mooncake's JSON lines, or a file of `serve-app requests --export`"
        raise BadRequest(f"line 1 of the trace is not that of {kinds}: {first[:80]!r}", param="trace")
    return read(itertools.chain([first], coming), model)


def _reader_of(first: str) -> Callable[[Iterable[str], str], list[SimulatedRequest]] | None:
    names = frozenset(name.strip() for name in first.lstrip("\ufeff").split(","))
    if names >= {"ContextTokens"}:
        return azure
    if names >= {"Request tokens"}:
        return burst_gpt
    if '"input_length"' in first:
        return mooncake
    if '"request_class"' in first:
        return lambda lines, _: exported(lines)
    return None


def _exported_request(row: TraceRow) -> SimulatedRequest:
    label = row.text("request_class")
    if label not in CLASS_ALIASES:
        raise row.error("request_class", f"{label!r} is no class")
    prompt = "prompt_tokens" if row.fields.get("prompt_tokens") is not None else "estimated_prompt"
    output = "output_tokens" if row.fields.get("output_tokens") is not None else "estimated_output"
    session = row.fields.get("session_id")
    return SimulatedRequest(
        row.number("at"),
        row.text("tenant"),
        CLASS_ALIASES[label],
        row.text("model"),
        row.tokens(prompt),
        row.tokens(output),
        None if session is None else str(session),
        _blocks(row, "prefix_blocks"),
    )


def _blocks(row: TraceRow, name: str) -> tuple[str, ...]:
    found = row.fields.get(name, [])
    if not isinstance(found, list):
        raise row.error(name, "it is not a list")
    return tuple(map(str, found))


def _csv_rows(lines: Iterable[str], wanted: tuple[str, ...]) -> Iterator[TraceRow]:
    reader = csv.DictReader(lines)
    try:
        names = {name.lstrip("\ufeff") for name in reader.fieldnames or ()}
        missing = [name for name in wanted if name not in names]
        if missing:
            raise BadRequest(f"line 1 of the trace: the column {missing[0]} is missing", param=missing[0])
        for fields in reader:
            yield TraceRow(reader.line_num, {name.lstrip("\ufeff"): value for name, value in fields.items() if name})
    except csv.Error as error:
        raise BadRequest(f"line {reader.line_num} of the trace: {error}", param="trace") from None


def _json_rows(lines: Iterable[str], wanted: tuple[str, ...]) -> Iterator[TraceRow]:
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            fields = json.loads(text)
        except ValueError:
            fields = None
        if not isinstance(fields, dict):
            raise BadRequest(f"line {number} of the trace is no JSON object: {text[:80]!r}", param="trace")
        row = TraceRow(number, fields)
        for name in wanted:
            row.value(name)
        yield row


def _in_order(requests: Iterable[SimulatedRequest]) -> list[SimulatedRequest]:
    """Requests by their moments, which count from the first one."""
    found = sorted(requests, key=lambda request: request.at_s)
    if not found:
        raise BadRequest("the trace has no request", param="trace")
    began_s = found[0].at_s
    return [replace(request, at_s=request.at_s - began_s) for request in found]
