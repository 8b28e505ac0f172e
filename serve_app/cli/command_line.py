"""What the commands share: options, exit statuses, errors as one line, and the endpoint that a command asks.

Invariant: every error a user can cause is one line on stderr and an exit status, never a traceback.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from serve_app.cli import chat as talk
from serve_app.cli.layout import say
from serve_app.cluster.local import DEFAULT_INSTANCE, InstanceState
from serve_app.errors import BadRequest, ConfigError, ServeAppError
from serve_app.names import DISTRIBUTION, RELEASE

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NOTHING_RUNS = 3
EXIT_INTERRUPTED = 130  # the shells' convention: 128 + SIGINT

InstanceOption = Annotated[str, typer.Option("--instance", help="Name of the instance.")]
CONFIG_HELP = "YAML configuration (see `serve-app help settings`)."
ConfigOption = Annotated[Path, typer.Option("--config", help=CONFIG_HELP)]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")]
AddressOption = Annotated[
    str | None, typer.Option("--address", help="A cluster instead of an instance here.", show_default=False)
]
CheckOption = Annotated[
    bool, typer.Option("--check/--no-check", help="Check the configuration first, as `serve-app check` does.")
]
UrlOption = Annotated[str | None, typer.Option("--url", help="Another endpoint than the instance's.")]
KeyOption = Annotated[
    str | None,
    typer.Option("--key", envvar="SERVE_APP_API_KEY", help="API key; of `keys` an operator's."),
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
    """The options that name an endpoint."""

    url: UrlOption = None
    key: KeyOption = None
    instance: InstanceOption = DEFAULT_INSTANCE
    state_dir: StateOption = None

    def endpoint(self) -> talk.Endpoint:
        """The endpoint at `url`, by default the instance's.

        Raises:
            typer.Exit: the instance does not run, and a message was printed.
            ConfigError: the instance's key cannot be read.
        """
        if self.url is not None:
            return talk.Endpoint(self.url, self.key)
        found = InstanceState(self.instance, self.state_dir).read()
        if found is None:
            Console(stderr=True).print(f"{self.instance}: nothing runs; start it with `serve-app up`", markup=False)
            raise typer.Exit(EXIT_NOTHING_RUNS)
        path = found.api_key_file
        try:
            key = self.key or (Path(path).read_text().strip() if path else None)
        except OSError as error:
            raise ConfigError(f"{path}: the API key cannot be read: {error.strerror}; give one with --key") from None
        return talk.Endpoint(found.url, key, found.certificate)

    @property
    def repeated(self) -> str:
        """What the next command needs to find the same endpoint."""
        if self.url is not None:
            return f" --url {self.url}"
        return "" if self.instance == DEFAULT_INSTANCE else f" --instance {self.instance}"


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


def print_found(found: dict[str, Any], as_json: bool, show: Callable[[dict[str, Any], Console], None]) -> None:
    if as_json:
        print(json.dumps(found))
    else:
        show(found, Console())
