"""What the commands share: options, exit statuses, errors as one line, and the endpoint that a command asks.

Invariant: every error a user can cause is one line on stderr and an exit status, never a traceback.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from serve_app.cli.contexts import Context, read_contexts
from serve_app.cli.endpoint import Endpoint, key_in, root_of
from serve_app.cli.layout import say
from serve_app.cluster.local import DEFAULT_INSTANCE, InstanceState
from serve_app.errors import BadRequest, ConfigError, ServeAppError, Unavailable
from serve_app.names import DISTRIBUTION, RELEASE

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NOTHING_RUNS = 3
WATCH_PERIOD_S = 2.0  # routers give the same answer for a second
EXIT_INTERRUPTED = 130  # the shells' convention: 128 + SIGINT

InstanceOption = Annotated[str, typer.Option("--instance", help="Name of the instance.")]
CONFIG_HELP = "YAML configuration (see `serve-app help settings`)."
ConfigOption = Annotated[Path, typer.Option("--config", help=CONFIG_HELP)]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")]
AddressOption = Annotated[
    str | None, typer.Option("--address", help="A cluster instead of an instance here.", show_default=False)
]
WatchOption = Annotated[bool, typer.Option("--watch", help="Show it again every 2 s, until Ctrl-C.")]
CheckOption = Annotated[
    bool, typer.Option("--check/--no-check", help="Check the configuration first, as `serve-app check` does.")
]
URL_VARIABLE = "SERVE_APP_URL"
CONTEXT_VARIABLE = "SERVE_APP_CONTEXT"
KEY_VARIABLE = "SERVE_APP_API_KEY"
UrlOption = Annotated[
    str | None, typer.Option("--url", envvar=URL_VARIABLE, help="Another endpoint than the instance's.")
]
KeyOption = Annotated[
    str | None,
    typer.Option("--key", envvar=KEY_VARIABLE, help="API key; what operators do needs an operator's."),
]
ContextOption = Annotated[
    str | None,
    typer.Option(
        "--context", envvar=CONTEXT_VARIABLE, help="An endpoint of contexts.yaml, by its name.", show_default=False
    ),
]
StateOption = Annotated[
    str | None,
    typer.Option("--state-dir", envvar="SERVE_APP_STATE", help="Where instances are recorded.", show_default=False),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"{DISTRIBUTION} {RELEASE}")
        raise typer.Exit


def options_of_all(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """The options of `serve-app` itself, before a command."""


@dataclass(frozen=True)
class InstanceOptions:
    """The options that name an instance of this machine."""

    instance: InstanceOption = DEFAULT_INSTANCE
    state_dir: StateOption = None

    @property
    def state(self) -> InstanceState:
        return InstanceState(self.instance, self.state_dir)


@dataclass(frozen=True)
class EndpointOptions:
    """The options that name an endpoint: `url`, else `context`, else `instance`, else the current context, else the
    instance `default`. An instance that is named comes before what the environment says."""

    url: UrlOption = None
    key: KeyOption = None
    context: ContextOption = None
    instance: InstanceOption = DEFAULT_INSTANCE
    state_dir: StateOption = None

    def endpoint(self) -> Endpoint:
        """The endpoint to ask.

        Raises:
            typer.Exit: the instance does not run, and a message was printed.
            ConfigError: a key, a certificate or the file of contexts cannot be read, or has no such context.
        """
        return self.elsewhere() or self.of_instance()

    def elsewhere(self) -> Endpoint | None:
        """The endpoint of `url` or of a context; None: an instance of this machine is meant. Raises ConfigError."""
        url = self._given("url", URL_VARIABLE)
        if url is not None:
            return Endpoint(root_of(url), self.key)
        context = self._given("context", CONTEXT_VARIABLE)
        if context is not None:
            return self._of_context(read_contexts().named(context))
        if self._names_instance:
            return None
        found = read_contexts()
        return None if found.current is None else self._of_context(found.named(found.current))

    def _of_context(self, context: Context) -> Endpoint:
        """A context's own key comes before the one of the environment, which is another endpoint's."""
        is_of_environment = self.key is not None and self.key == os.environ.get(KEY_VARIABLE)
        return context.endpoint(None if context.key_file and is_of_environment else self.key)

    def of_instance(self) -> Endpoint:
        """The endpoint of the instance of this machine. Raises as `endpoint`."""
        found = self.state.read()
        if found is None:
            text = f"{self.instance}: nothing runs; start it with `serve-app up`, or name an endpoint with --url"
            say(Console(stderr=True), text)
            raise typer.Exit(EXIT_NOTHING_RUNS)
        key = self.key or (key_in(found.api_key_file) if found.api_key_file else None)
        return Endpoint(found.url, key, found.certificate)

    @property
    def state(self) -> InstanceState:
        return InstanceState(self.instance, self.state_dir)

    @property
    def repeated(self) -> str:
        """What the next command needs to find the same endpoint."""
        if (url := self._given("url", URL_VARIABLE)) is not None:
            return f" --url {url}"
        if (context := self._given("context", CONTEXT_VARIABLE)) is not None:
            return f" --context {context}"
        return f" --instance {self.instance}" if self._names_instance else ""

    @property
    def _names_instance(self) -> bool:
        return self.instance != DEFAULT_INSTANCE

    def _given(self, option: str, variable: str) -> str | None:
        """The value of an option, by the command line or the environment."""
        value: str | None = getattr(self, option)
        return None if self._names_instance and value == os.environ.get(variable) else value


def command(app: typer.Typer, name: str | None = None) -> Callable[[Callable[..., int | None]], Callable[..., None]]:
    """Add a function to `app`. Its result becomes the exit status, a `ServeAppError` one line. A parameter of a class
    of options, a dataclass such as `InstanceOptions`, stands for all of them."""

    def add(function: Callable[..., int | None]) -> Callable[..., None]:
        parameters = inspect.signature(function, eval_str=True).parameters.values()
        groups: dict[str, Any] = {
            one.name: one.annotation for one in parameters if dataclasses.is_dataclass(one.annotation)
        }
        shown = [one for one in parameters if one.name not in groups]
        for group in groups.values():
            shown += inspect.signature(group, eval_str=True).parameters.values()

        @functools.wraps(function)
        def run(**given: Any) -> None:
            for parameter, group in groups.items():
                given[parameter] = group(**{one.name: given.pop(one.name) for one in dataclasses.fields(group)})
            try:
                code = function(**given) or 0
            except ServeAppError as error:
                say(Console(stderr=True), f"error: {error}", "red")
                code = EXIT_USAGE if isinstance(error, ConfigError | BadRequest) else EXIT_FAILED
            except KeyboardInterrupt:
                code = EXIT_INTERRUPTED
            raise typer.Exit(code)

        run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in shown}
        app.command(name)(run)
        return run

    return add


def print_again(
    ask: Callable[[], dict[str, Any]], as_json: bool, show: Callable[[dict[str, Any], Console], None]
) -> None:
    """Print what is asked for, again every `WATCH_PERIOD_S` until Ctrl-C; on a terminal in the place of what was there.
    The first question raises what `ask` raises, later ones are repeated."""
    console = Console()
    found = ask()
    while True:
        if console.is_terminal and not as_json:
            console.clear()
        print_found(found, as_json, show)
        sys.stdout.flush()
        while True:
            time.sleep(WATCH_PERIOD_S)  # bound: until Ctrl-C
            try:
                found = ask()
                break
            except Unavailable as error:
                say(Console(stderr=True), f"error: {error}", "red")


def print_found(found: dict[str, Any], as_json: bool, show: Callable[[dict[str, Any], Console], None]) -> None:
    if as_json:
        print(json.dumps(found))
    else:
        show(found, Console())
