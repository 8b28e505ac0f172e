"""An OpenAI-compatible endpoint that is measured: where it is, and how each tenant and class asks it.

A *scope* is a tenant, a class (high, normal, low) or `all`. Each header and each field of the body has a scope. A class
overrides `all`, and a tenant overrides both. Examples: one endpoint wants `priority: "high"`, another `priority: 0`.
Where the key does not name the tenant, a header or the field `user` can.

Invariant: keys and the values of headers are sent, and shown nowhere.
"""

from __future__ import annotations

import argparse
import json
import os
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from benchmarks.common.workload import STREAMED, post

ALL = "all"
CLASSES = ("high", "normal", "low")
VERSION = "/v1"
CHAT = "/chat/completions"
ENVIRONMENT = "env:"  # before the name of a variable that holds a key, which a list of processes does not show
PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Target:
    """One endpoint.

    Args:
        where: host and port, as the `host` header has them.
        path: of chat completions.
        keys: by tenant, in the order in which they were named; an empty one is not sent.
        headers: by scope, then by name; `fields` of the body as well.
    """

    url: str
    host: str
    port: int
    where: str
    path: str
    tls: ssl.SSLContext | None
    model: str
    keys: Mapping[str, str] = field(repr=False)
    headers: Mapping[str, Mapping[str, str]] = field(repr=False)
    fields: Mapping[str, Mapping[str, Any]]

    @property
    def tenants(self) -> list[str]:
        return list(self.keys)

    def request_bytes(self, tenant: str, group: str, prompt: str, max_tokens: int) -> bytes:
        """A streamed chat completion of a tenant; `group` is its class, or nothing."""
        body: dict[str, Any] = {"model": self.model, "messages": [{"role": "user", "content": prompt}]}
        body |= {"max_tokens": max_tokens, "temperature": 0, **STREAMED}
        headers: dict[str, str] = {}
        for scope in (ALL, group, tenant):
            body |= self.fields.get(scope, {})
            headers |= self.headers.get(scope, {})
        return post(self.where, self.path, self.keys[tenant], body, **headers)

    def conditions(self) -> dict[str, Any]:
        """What a report may show of it."""
        headers = {scope: sorted(named) for scope, named in self.headers.items()}
        keyed = [tenant for tenant, key in self.keys.items() if key]
        return {
            "url": self.url,
            "model": self.model,
            "tenants": self.tenants,
            "tenants_with_a_key": keyed,
            "headers": headers,
            "fields": {scope: dict(named) for scope, named in self.fields.items()},
        }


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that make a `Target`."""
    group = parser.add_argument_group("any endpoint", "measure an OpenAI-compatible server that runs already")
    group.add_argument("--url", help="its address, with or without /v1")
    group.add_argument("--model", help="the model that is asked for")
    group.add_argument(
        "--key", action="append", default=[], metavar="TENANT=KEY",
        help="a tenant and its key, the lightest tenant first; again for each. KEY may be empty, or env:VARIABLE",
    )  # fmt: skip
    group.add_argument(
        "--header", action="append", default=[], metavar="SCOPE:NAME=VALUE",
        help="a header of the requests of a tenant, of a class (high, normal, low), or of all",
    )  # fmt: skip
    group.add_argument("--field", action="append", default=[], metavar="SCOPE:NAME=JSON", help="a field of the body")
    group.add_argument(
        "--priority", action="append", default=[], metavar="CLASS=JSON", help="short for --field CLASS:priority=JSON"
    )


def is_asked_for(parser: argparse.ArgumentParser, options: argparse.Namespace) -> bool:
    """Whether a command line names an endpoint; exits with code 2 when it only says how to ask it."""
    if options.url is None and (options.model or options.key):
        parser.error("--model and --key need --url")
    return options.url is not None


def target_of(parser: argparse.ArgumentParser, options: argparse.Namespace, tenants: int) -> Target:
    """The endpoint of a command line, of so many tenants or more; exits with code 2 and a message if it is wrong."""
    try:
        made = _target(options)
    except ValueError as error:
        parser.error(str(error))
    if len(made.keys) < tenants:
        parser.error(f"--url needs {tenants} tenants at least: --key TENANT=KEY for each")
    return made


def _target(options: argparse.Namespace) -> Target:
    """Raises ValueError: an option makes no sense."""
    if not options.model:
        raise ValueError("--url needs --model")
    parts = urlsplit(options.url)
    if parts.scheme not in PORTS or not parts.hostname or parts.username or parts.query or parts.fragment:
        raise ValueError(f"--url takes http(s)://HOST[:PORT][/PATH]: {options.url}")
    base = parts.path.rstrip("/")
    keys = dict(_pair(text, "--key") for text in options.key)
    if len(keys) < len(options.key) or keys.keys() & {ALL, *CLASSES}:
        raise ValueError(f"--key takes each tenant once, and none that is called {ALL} or as a class")
    priorities = [
        f"{group}:priority={value}" for group, value in (_pair(each, "--priority") for each in options.priority)
    ]
    fields = _by_scope([*options.field, *priorities], keys, "--field")
    headers = _by_scope(options.header, keys, "--header")
    return Target(
        url=options.url,
        host=parts.hostname,
        port=parts.port or PORTS[parts.scheme],
        where=parts.netloc,
        path=(base if base.endswith(VERSION) else base + VERSION) + CHAT,
        tls=ssl.create_default_context() if parts.scheme == "https" else None,
        model=options.model,
        keys={tenant: _key(tenant, key) for tenant, key in keys.items()},
        headers={scope: {name.lower(): value for name, value in named.items()} for scope, named in headers.items()},
        fields={scope: {name: _value(text) for name, text in named.items()} for scope, named in fields.items()},
    )


def _pair(text: str, option: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals or not f"{name}{value}".isprintable():
        raise ValueError(f"{option} takes NAME=VALUE, in printable characters: {name}")
    return name, value


def _by_scope(texts: Sequence[str], keys: Mapping[str, str], option: str) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for text in texts:
        scope, _, rest = text.partition(":")
        if scope not in (ALL, *CLASSES, *keys):
            raise ValueError(f"{option} takes a tenant of --key, a class ({', '.join(CLASSES)}) or {ALL}: {scope}")
        name, value = _pair(rest, option)
        found.setdefault(scope, {})[name] = value
    return found


def _key(tenant: str, text: str) -> str:
    if not text.startswith(ENVIRONMENT):
        return text
    variable = text.removeprefix(ENVIRONMENT)
    if variable not in os.environ:
        raise ValueError(f"--key {tenant}: the environment has no {variable}")
    return os.environ[variable]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
