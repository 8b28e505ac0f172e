"""What the commands share: options, exit statuses, errors as one line, and the endpoint that a command asks.

Invariant: every error a user can cause is one line on stderr and an exit status, never a traceback.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import typer
from rich.console import Console

from serve_app.cli import chat as talk
from serve_app.cluster.local import InstanceState
from serve_app.errors import BadRequest, ConfigError, ServeAppError
from serve_app.names import DISTRIBUTION, RELEASE

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NOTHING_RUNS = 3
EXIT_INTERRUPTED = 130  # the shells' convention: 128 + SIGINT

P = ParamSpec("P")

InstanceOption = Annotated[str, typer.Option("--instance", help="Name of the instance.")]
CONFIG_HELP = "YAML configuration; `serve-app help settings` lists what it may have."
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
    typer.Option("--key", envvar="SERVE_APP_API_KEY", help="API key; of `keys`, `explain` an operator's."),
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


def command(app: typer.Typer, name: str | None = None) -> Callable[[Callable[P, int | None]], Callable[P, None]]:
    """Add a function to `app`. Its result becomes the exit status, a `ServeAppError` one line."""

    def add(function: Callable[P, int | None]) -> Callable[P, None]:
        @app.command(name)
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            try:
                code = function(*args, **kwargs) or 0
            except ServeAppError as error:
                Console(stderr=True).print(
                    f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True
                )
                code = EXIT_USAGE if isinstance(error, ConfigError | BadRequest) else EXIT_FAILED
            except KeyboardInterrupt:
                code = EXIT_INTERRUPTED
            raise typer.Exit(code)

        return run

    return add


def print_found(found: dict[str, Any], as_json: bool, show: Callable[[dict[str, Any], Console], None]) -> None:
    if as_json:
        print(json.dumps(found))
    else:
        show(found, Console())


def endpoint_at(url: str | None, key: str | None, instance: str, state_dir: str | None) -> talk.Endpoint:
    """The endpoint at `url`, by default the instance's.

    Raises:
        typer.Exit: the instance does not run, and a message was printed.
        ConfigError: the instance's key cannot be read.
    """
    if url is not None:
        return talk.Endpoint(url, key)
    found = InstanceState(instance, state_dir).read()
    if found is None:
        Console(stderr=True).print(f"{instance}: nothing runs; start it with `serve-app up`", markup=False)
        raise typer.Exit(EXIT_NOTHING_RUNS)
    path = found.api_key_file
    try:
        return talk.Endpoint(found.url, key or (Path(path).read_text().strip() if path else None), found.certificate)
    except OSError as error:
        raise ConfigError(f"{path}: the API key cannot be read: {error.strerror}; give one with --key") from None
