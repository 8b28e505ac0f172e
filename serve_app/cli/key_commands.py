"""`serve-app keys`: the keys of a running endpoint, through its /admin/keys; with an operator's key.

Invariant: a key is printed once, by the command that made it, and is in no file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Console

from serve_app.cli.command_line import (
    EndpointOptions,
    JsonOption,
    command,
    print_found,
)
from serve_app.cli.endpoint import Endpoint, fetch
from serve_app.cli.layout import Listing
from serve_app.errors import BadRequest

PATH = "/admin/keys"
COLUMNS = ("id", "name", "tenant", "state", "class", "models", "rights", "expires")
LIMIT_COLUMNS = ("of", "limit", "value")
STYLES = {"revoked": "dim", "expired": "yellow"}  # by state
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
NO_LIMIT = "none"  # takes a limit away
NEVER = "never"  # takes the end of a key away
DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)")
MAX_DURATION_S = 100 * 365 * 86_400  # a century; a longer one is a mistake, and datetime ends

app = typer.Typer(help="Make, change, list and end API keys while the endpoint runs.", no_args_is_help=True)
_command = command(app)

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="Id of the key, as `serve-app keys list` shows it.")]
ExpiryOption = Annotated[
    str | None, typer.Option("--expires", help="A date (2027-01-31), a time, or from now on: 90d, 12h.")
]
BatchLimitOption = Annotated[
    list[str] | None,
    typer.Option("--batch-limit", help="Limit of batch rows, such as tokens_per_day=1000000; may be given again."),
]


def limit(flag: str, text: str) -> Any:
    return typer.Option(flag, help=text, show_default=False)


@dataclass(frozen=True)
class LimitOptions:
    """The options that limit a new key, by the names of its limits."""

    requests_per_minute: Annotated[float | None, limit("--requests-per-minute", "Requests a minute.")] = None
    tokens_per_minute: Annotated[
        float | None, limit("--tokens-per-minute", "Tokens a minute, of prompts and answers.")
    ] = None
    burst_requests: Annotated[
        int | None, limit("--burst-requests", "Requests at once; by default those of a minute.")
    ] = None
    burst_tokens: Annotated[int | None, limit("--burst-tokens", "Tokens at once; by default those of a minute.")] = None
    max_concurrent: Annotated[int | None, limit("--max-concurrent", "Requests that run or wait at once.")] = None
    requests_per_day: Annotated[int | None, limit("--requests-per-day", "Requests a day, from midnight UTC.")] = None
    tokens_per_day: Annotated[int | None, limit("--tokens-per-day", "Tokens a day, from midnight UTC.")] = None
    budget_per_month: Annotated[float | None, limit("--budget-per-month", "Cost a month, by the models' prices.")] = (
        None
    )


@_command
def create(
    name: Annotated[str, typer.Argument(help="Its name in reports: whose it is, or what for.")],
    limits: LimitOptions,
    at: EndpointOptions,
    tenant: Annotated[str, typer.Option("--tenant", help="Its tenant.")] = "default",
    model: Annotated[
        list[str] | None, typer.Option("--model", help="A model that it may use; may be given again. By default all.")
    ] = None,
    max_class: Annotated[str, typer.Option("--max-class", help="The highest class that it may ask for.")] = "high",
    default_class: Annotated[
        str | None,
        typer.Option("--default-class", help="Class of requests that name none; by default normal or below."),
    ] = None,
    admin: Annotated[bool, typer.Option("--admin", help="May do what operators may.")] = False,
    metrics: Annotated[bool, typer.Option("--metrics", help="May read /metrics.")] = False,
    deploy: Annotated[bool, typer.Option("--deploy", help="May deploy by --url; made with a key that may.")] = False,
    expires: ExpiryOption = None,
    batch_limit: BatchLimitOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a key and print it, this once. Every router takes it within a second."""
    given = {name: value for name, value in asdict(limits).items() if value is not None}
    body = {
        "name": name,
        "tenant": tenant,
        "models": model,
        "max_class": max_class,
        **({} if default_class is None else {"default_class": default_class}),
        "admin": admin,
        "metrics": metrics,
        **({"deploy": True} if deploy else {}),
        "expires_at": None if expires is None else expiry(expires, datetime.now(UTC)),
        "limits": given or None,
        "batch_limits": limit_changes("--batch-limit", batch_limit or ()) or None,
    }
    print_found(_ask(at.endpoint(), "POST", json=body), as_json, show_change)


def limit_changes(option: str, given: Iterable[str]) -> dict[str, float | None]:
    """Limits as NAME=NUMBER, or NAME=none for no limit, checked by the endpoint. Raises BadRequest: another form."""
    found: dict[str, float | None] = {}
    for text in given:
        name, _, value = text.partition("=")
        try:
            number = None if value == NO_LIMIT else float(value)
        except ValueError:
            raise BadRequest(f"{option} {text}: give a name and a number, such as max_concurrent=8") from None
        found[name] = int(number) if number is not None and number.is_integer() else number
    return found


@_command
def update(
    key_id: IdArgument,
    at: EndpointOptions,
    name: Annotated[str | None, typer.Option("--name", help="Whose it is, or what for.")] = None,
    model: Annotated[
        list[str] | None, typer.Option("--model", help="The models that it may use, in place of those before.")
    ] = None,
    all_models: Annotated[bool, typer.Option("--all-models", help="It may use every model.")] = False,
    max_class: Annotated[str | None, typer.Option("--max-class", help="The highest class.")] = None,
    default_class: Annotated[
        str | None, typer.Option("--default-class", help="Class of requests that name none.")
    ] = None,
    admin: Annotated[bool | None, typer.Option("--admin/--no-admin", help="May do what operators may.")] = None,
    metrics: Annotated[bool | None, typer.Option("--metrics/--no-metrics", help="May read /metrics.")] = None,
    deploy: Annotated[bool | None, typer.Option("--deploy/--no-deploy", help="May deploy by --url.")] = None,
    expires: Annotated[str | None, typer.Option("--expires", help="As of `create`; or never.")] = None,
    limits: Annotated[
        list[str] | None,
        typer.Option("--limit", help="A limit, tokens_per_day=1000000, or tokens_per_day=none; may be given again."),
    ] = None,
    batch_limit: Annotated[list[str] | None, typer.Option("--batch-limit", help="The same for batch rows.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Change what a key may do, not the key itself; what is not named stays. Every router takes it within a second."""
    if model and all_models:
        raise BadRequest("--model and --all-models: give one of them", param="--model")
    given = {
        "name": name,
        "models": model or None,
        "max_class": max_class,
        "default_class": default_class,
        "admin": admin,
        "metrics": metrics,
        "deploy": deploy,
        "limits": limit_changes("--limit", limits or ()) or None,
        "batch_limits": limit_changes("--batch-limit", batch_limit or ()) or None,
    }
    body: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if all_models:
        body["models"] = None
    if expires is not None:
        body["expires_at"] = None if expires == NEVER else expiry(expires, datetime.now(UTC))
    if not body:
        raise BadRequest("nothing is to be changed: `serve-app keys update --help` has the options", param="update")
    print_found(_ask(at.endpoint(), "POST", key_id, json=body), as_json, show_change)


@command(app, "list")
def list_keys(
    at: EndpointOptions,
    as_json: JsonOption = False,
) -> None:
    """Show all keys, those of the configuration and revoked ones too; never a key itself."""
    print_found(_ask(at.endpoint(), "GET"), as_json, show)


@_command
def revoke(
    key_id: IdArgument,
    at: EndpointOptions,
    as_json: JsonOption = False,
) -> None:
    """End a key: every router refuses it within a second. Requests that run are finished."""
    print_found(_ask(at.endpoint(), "DELETE", key_id), as_json, show_change)


@_command
def rotate(
    key_id: IdArgument,
    at: EndpointOptions,
    grace: Annotated[
        str, typer.Option("--grace", help="How long the old key stays valid; 0: it ends at once.")
    ] = "24h",
    as_json: JsonOption = False,
) -> None:
    """Replace a key by a new one with the same id and rights, and print the new one, this once."""
    body = {"grace_s": seconds(grace, "--grace")}
    print_found(_ask(at.endpoint(), "POST", key_id, "/rotate", json=body), as_json, show_change)


@_command
def show_limits(
    key_id: IdArgument,
    at: EndpointOptions,
    as_json: JsonOption = False,
) -> None:
    """Show all limits that requests of a key have to be within: its own, its tenant's, those of single models."""
    print_found(_ask(at.endpoint(), "GET", key_id), as_json, show_key_limits)


def _ask(endpoint: Endpoint, method: str, key_id: str = "", after: str = "", **options: Any) -> dict[str, Any]:
    """The answer of a route of keys. Raises ServeAppError."""
    path = f"{PATH}/{quote(key_id, safe='')}{after}" if key_id else PATH
    return fetch(endpoint, method, path, **options)  # type: ignore[no-any-return]


def seconds(text: str, option: str) -> float:
    """Seconds of `90d`, `12h`, `30m`, `45s` or `45`. Raises BadRequest."""
    found = DURATION.fullmatch(text)
    length = float(found[1]) * UNITS_S[found[2] or "s"] if found else -1.0
    if not 0 <= length <= MAX_DURATION_S:
        raise BadRequest(f"{option} {text}: a number with s, m, h or d, such as 24h", param=option)
    return length


def expiry(text: str, now: datetime) -> str:
    """A time in ISO 8601 with its offset, of a date (of UTC), a time or a duration from now on. Raises BadRequest."""
    if DURATION.fullmatch(text):
        return (now + timedelta(seconds=seconds(text, "--expires"))).isoformat(timespec="seconds")
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise BadRequest(f"--expires {text}: a date (2027-01-31), a time, or 90d, 12h", param="--expires") from None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).isoformat()


def show_change(found: Mapping[str, Any], console: Console) -> None:
    """Print a key that was made, replaced or ended."""
    listing = Listing(console)
    record = ("key", *_row(found), found.get("key", ""))
    if "key" in found:
        listing.flow((found["key"],), record, style="bold")
        listing.say(f"Shown this once: the key {found['id']} of {found['name']!r}, tenant {found['tenant']}.", ())
        if found["previous_until"]:
            listing.say(f"The old one is valid until {found['previous_until']}.", ())
    else:
        listing.say(f"{found['id']} of {found['name']!r} is {found['state']}.", record)


def show(found: Mapping[str, Any], console: Console) -> None:
    """Print the list of keys."""
    keys = found["data"]
    Listing(console).table("key", COLUMNS, map(_row, keys), styles=[STYLES.get(one["state"], "") for one in keys])


def show_key_limits(found: Mapping[str, Any], console: Console) -> None:
    """Print what limits a key."""
    listing = Listing(console)
    limits = found["effective_limits"]
    listing.say(f"{found['id']} of {found['name']!r}, tenant {found['tenant']}", ())
    scopes = [("key", limits["key"]), (f"tenant {found['tenant']}", limits["tenant"])]
    scopes += [(f"{model} of tenant {found['tenant']}", one) for model, one in limits["models"].items()]
    batches = limits.get("batches", {})  # an endpoint of an earlier release has none
    scopes += [(f"batches of {of}", batches.get(name, {})) for name, of in (("key", "this key"), ("tenant", "tenant"))]
    rows = [(scope, name, f"{value:.15g}") for scope, one in scopes for name, value in one.items()]
    if rows:
        listing.table("limit", LIMIT_COLUMNS, rows)
        listing.say(f"Over a limit: {limits['over_limit']}.", ("over_limit", limits["over_limit"]))
    else:
        listing.say("Nothing limits it.", ())


def _row(record: Mapping[str, Any]) -> tuple[str, ...]:
    rights = " ".join(right for right in ("admin", "metrics", "deploy") if record.get(right))
    models = "all" if record["models"] is None else " ".join(record["models"])
    named = (record[name] for name in ("id", "name", "tenant", "state", "max_class"))
    return *named, models, rights, record["expires_at"] or ""
