"""`serve-app batch`: files of requests for a running endpoint, through its /v1/files and /v1/batches.

Invariant: nothing is sent of a file with a line that is wrong.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from serve_app.cli import batch as batches
from serve_app.cli.batch_upload import checked
from serve_app.cli.batch_watch import (
    PIPED_POLL_S,
    POLL_S,
    BarDisplay,
    LineDisplay,
    Watch,
)
from serve_app.cli.command_line import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EndpointOptions,
    JsonOption,
    command,
    print_found,
)
from serve_app.cli.endpoint import Endpoint
from serve_app.cli.layout import say
from serve_app.cli.progress import ByteProgress
from serve_app.core.batches import BatchStatus
from serve_app.errors import BadRequest

DEFAULT_WINDOW = "24h"  # the only one that OpenAI has
DEFAULT_LIMIT = 20  # batches of a list: a screen

app = typer.Typer(help="Run files of requests when the models have time for them.", no_args_is_help=True)
_command = command(app)

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="Id of the batch, as `serve-app batch list` shows it.")]


@_command
def submit(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="JSON Lines, a request each: custom_id, method, url, body.")
    ],
    at: EndpointOptions,
    route: Annotated[
        str | None,
        typer.Option("--endpoint", help="Endpoint of its rows; by default the `url` of its first row."),
    ] = None,
    window: Annotated[str, typer.Option("--window", help="Rows that have not run by then expire.")] = DEFAULT_WINDOW,
    metadata: Annotated[
        list[str] | None, typer.Option("--metadata", metavar="K=V", help="Kept with the batch; may be given again.")
    ] = None,
    watch_it: Annotated[bool, typer.Option("--watch", help="Then follow it, as `serve-app batch watch` does.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Check a file, upload it and make a batch of it. Nothing is sent if a line is wrong."""
    errors = Console(stderr=True)
    pairs = _pairs(metadata or ())
    found = checked(file, route, errors)
    endpoint = at.endpoint()
    batch = batches.submit(endpoint, file, found.size, found.route, window, pairs, errors)
    if watch_it:
        return _follow(endpoint, batch, at.repeated, as_json=as_json)
    print_found(batch, as_json, batches.show)
    _hint(f"follow it: serve-app batch watch {batch['id']}{at.repeated}", as_json)
    return 0


@command(app, "list")
def list_batches(
    at: EndpointOptions,
    limit: Annotated[int, typer.Option("--limit", min=1, help="So many batches, at most.")] = DEFAULT_LIMIT,
    after: Annotated[str | None, typer.Option("--after", metavar="ID", help="Batches made before this one.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the batches, the newest first."""
    print_found(batches.page(at.endpoint(), limit, after), as_json, batches.show_list)


@_command
def status(
    batch_id: IdArgument,
    at: EndpointOptions,
    as_json: JsonOption = False,
) -> None:
    """Show a batch: its rows, rate and expected end, its files, what is wrong with its lines."""
    print_found(batches.get(at.endpoint(), batch_id), as_json, batches.show)


@_command
def watch(
    batch_id: IdArgument,
    at: EndpointOptions,
    as_json: JsonOption = False,
) -> int:
    """Follow a batch until it ends; exit status 0 if it completed. Ctrl-C ends only the watch."""
    endpoint = at.endpoint()
    return _follow(endpoint, batches.get(endpoint, batch_id), at.repeated, as_json=as_json)


@_command
def cancel(
    batch_id: IdArgument,
    at: EndpointOptions,
    as_json: JsonOption = False,
) -> None:
    """End a batch: no other row begins, running rows have ten minutes. What is answered stays in its files."""
    found = batches.get(at.endpoint(), batch_id, cancel=True)
    print_found(found, as_json, batches.show)


@_command
def results(
    batch_id: IdArgument,
    at: EndpointOptions,
    of_errors: Annotated[bool, typer.Option("--errors", help="The rows that failed, instead of the answers.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write them here, complete or not at all.")
    ] = None,
) -> None:
    """Print the answers of a batch that has ended, a line each."""
    endpoint = at.endpoint()
    batch = batches.get(endpoint, batch_id)
    file_id = batches.file_of_results(batch, errors=of_errors)
    if file_id is None:
        _hint(f"no row of {batch_id} failed", quiet=False)
    elif out is None:
        batches.copy(batches.content(endpoint, file_id), sys.stdout.buffer)
        sys.stdout.buffer.flush()
    else:
        with ByteProgress(Console(stderr=True), f"downloading {file_id}", None) as progress:
            size = batches.write_results(batches.content(endpoint, file_id, progress), out)
        _hint(f"{out}: {size:,} bytes", quiet=False)
    if not of_errors and batch.get("error_file_id"):
        _hint(f"rows failed: serve-app batch results {batch_id} --errors{at.repeated}", quiet=False)


def _follow(endpoint: Endpoint, batch: dict[str, Any], options: str, *, as_json: bool) -> int:
    console = Console()
    errors = Console(stderr=True)
    live = console.is_terminal and not as_json
    batch_id = str(batch["id"])
    display = BarDisplay(console) if live else LineDisplay(console, errors, as_json=as_json)
    try:
        ended = Watch(lambda: batches.get(endpoint, batch_id), POLL_S if live else PIPED_POLL_S).run(batch, display)
    except KeyboardInterrupt:
        _hint(f"{batch_id} goes on; come back with: serve-app batch watch {batch_id}{options}", quiet=False)
        return EXIT_INTERRUPTED
    if live:
        batches.show(ended, console)
    elif wrong := batches.errors_of(ended):
        _hint(f"{batch_id} has {ended['status']}: {wrong[0]['message']}", as_json)
    if ended.get("output_file_id"):
        _hint(f"its answers: serve-app batch results {batch_id}{options}", as_json)
    if ended.get("error_file_id"):
        _hint(f"rows failed: serve-app batch results {batch_id} --errors{options}", as_json)
    return 0 if ended["status"] == BatchStatus.COMPLETED else EXIT_FAILED


def _hint(text: str, quiet: bool) -> None:
    """What to do next, beside the output."""
    if not quiet:
        say(Console(stderr=True), text)


def _pairs(given: list[str] | tuple[str, ...]) -> dict[str, str]:
    found = {}
    for pair in given:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise BadRequest(f"--metadata {pair}: a name, = and a value", param="--metadata")
        found[name] = value
    return found
