"""The command line: `serve-app up | check | deploy | export | status | logs | doctor | quota | defrag | drain |
explain | requests | history | events | top | keys | batch | usage | audit | simulate | scaling | calibrate |
support-bundle | chat | down | help`.

Invariant: every error a user can cause is one line on stderr and an exit status, never a traceback: 1 for a failure, 2
for wrong arguments or settings, 3 for `status` and `chat` when nothing runs.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from autoscaling.operations import LogLevel, wanted_lines
from serve_app import settings as configuration
from serve_app.cli import (
    audit,
    batch_commands,
    calibrate,
    compare,
    instances,
    key_commands,
    operators,
    records,
    remote_deploy,
    remote_doctor,
    scaling,
    setting_help,
    simulate_command,
    support_bundle,
    top,
)
from serve_app.cli import chat as talk
from serve_app.cli import check_command as checking
from serve_app.cli import deploy as deploying
from serve_app.cli import detach as detaching
from serve_app.cli import doctor as examining
from serve_app.cli import drain as draining
from serve_app.cli import explain as explaining
from serve_app.cli import logs as reading
from serve_app.cli import presets as telling
from serve_app.cli import quota as ledger
from serve_app.cli import up as running
from serve_app.cli import usage as usages
from serve_app.cli.check import assumed_nodes
from serve_app.cli.command_line import (
    CONFIG_HELP,
    EXIT_FAILED,
    EXIT_NOTHING_RUNS,
    EXIT_USAGE,
    AddressOption,
    CheckOption,
    ConfigOption,
    EndpointOptions,
    InstanceOption,
    InstanceOptions,
    JsonOption,
    StateOption,
    WatchOption,
    command,
    options_of_all,
    print_again,
    print_found,
)
from serve_app.cli.layout import say
from serve_app.cli.usage import UsageGroup
from serve_app.cluster.local import DEFAULT_INSTANCE, LOOPBACK, InstanceState
from serve_app.errors import ConfigError
from serve_app.settings import ProxyLocation, Settings

DEPLOY_TIMEOUT_S = 900.0  # a large model loads for ten minutes from a cold disk
LINES = 100
MAX_LINES = 10_000

# `serve-app -h` lists these first: what a new user types, in that order. All others follow in the order of this module.
FIRST = ("up", "status", "chat", "down", "check", "deploy", "explain", "quota", "logs", "usage", "keys", "batch")


class FirstThingsFirst(TyperGroup):
    """The commands in the order in which they are needed."""

    def list_commands(self, ctx: Any) -> list[str]:
        named = super().list_commands(ctx)
        return sorted(named, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))


app = typer.Typer(
    cls=FirstThingsFirst,
    name="serve-app",
    help="Serve open-weight models on this machine through one OpenAI-compatible endpoint.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)

app.add_typer(key_commands.app, name="keys")
app.add_typer(batch_commands.app, name="batch")
_command = command(app)
app.callback()(options_of_all)
command(app, "help")(setting_help.help_setting)
command(app)(audit.audit)
command(app, "requests")(records.list_requests)
command(app)(records.history)
command(app)(records.events)
command(app)(compare.compare)
command(app)(simulate_command.simulate)
command(app)(scaling.scaling)
command(app)(calibrate.calibrate)
command(app)(top.top)
command(app, "support-bundle")(support_bundle.support_bundle)


def configured(config: Path | None, model: str | None) -> Settings:
    """The settings of a file, or the defaults; `model` replaces the models by one model of that name or path.

    Raises:
        ConfigError: wrong settings, or a path that does not exist.
    """
    chosen = configuration.load(config) if config is not None else Settings()
    if model is None:
        return chosen
    name = model
    if model.startswith(("/", ".", "~")):
        folder = Path(model).expanduser().resolve()
        if not folder.is_dir():
            raise ConfigError(f"--model {model}: there is no such folder", param="model")
        name = folder.name
        model = str(folder)
    data = chosen.model_dump(mode="json", exclude_unset=True)
    names = {part: one for part, one in chosen.names.items() if part != "models"}
    return configuration.parse({**data, "models": [{"name": name, "path": model}]}).with_names(names)


@_command
def up(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option("--config", help=CONFIG_HELP)] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Serve this instead of the configured models: 'tiny', an id, a folder."),
    ] = None,
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port of the endpoint.")] = running.DEFAULT_PORT,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; 0.0.0.0 to be reached from other machines.")
    ] = LOOPBACK,
    instance: InstanceOption = DEFAULT_INSTANCE,
    cpus: Annotated[
        int | None, typer.Option("--cpus", min=1, help="Logical CPUs Ray may place on; counted by default.")
    ] = None,
    dashboard: Annotated[bool, typer.Option("--dashboard", help="Run Ray's dashboard too (loopback).")] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="Start everything again when its Ray ends while it serves.")
    ] = False,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return once it serves; it goes on.")] = False,
    check_first: CheckOption = True,
    state_dir: StateOption = None,
) -> int:
    """Start an instance and keep it in the foreground; Ctrl-C ends all its processes."""
    if detach:
        again = detaching.same_command(context, without="detach")
        return detaching.detach(again, InstanceState(instance, state_dir), Console())
    if check_first and config is not None and not checking.readable(config, Console(stderr=True), here=True):
        return EXIT_USAGE
    chosen = configured(config, model)
    if check_first and not checking.passes(chosen, checking.this_machine(chosen.quota, cpus), Console(stderr=True)):
        return EXIT_USAGE
    options = running.UpOptions(chosen, instance, port, host, state_dir, cpus, dashboard, restart)
    return running.up(options, Console())


@_command
def check(
    config: Annotated[Path, typer.Argument(help=CONFIG_HELP)],
    at: InstanceOptions,
    as_json: JsonOption = False,
    address: AddressOption = None,
    assume: Annotated[
        list[str] | None,
        typer.Option(
            "--assume",
            help="Check against a node like 4xL4, or nodes like 2x4xH100, instead of this machine; may be given again.",
        ),
    ] = None,
) -> int:
    """Show all that is wrong with a configuration; exit status 2 for an error. Nothing is started or changed."""
    place = assumed_nodes(assume) if assume else checking.place(address, at.state)
    return EXIT_USAGE if checking.tell(config, place, as_json=as_json, with_plan=False) else 0


@_command
def deploy(
    config: ConfigOption,
    at: EndpointOptions,
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            help="Ray's GCS, host:port, or 'auto'; by default RAY_ADDRESS, else the instance on this machine.",
            show_default=False,
        ),
    ] = None,
    plan_only: Annotated[
        bool, typer.Option("--plan", help="Only check it, and show what would restart; exit status 2 for an error.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --plan: one JSON object.")] = False,
    check_first: CheckOption = True,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until it runs.")] = True,
    roll_back: Annotated[
        bool,
        typer.Option(
            "--roll-back/--no-roll-back", help="Back to the previous configuration if a model does not start."
        ),
    ] = True,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=1, help="The longest wait, in seconds.")
    ] = DEPLOY_TIMEOUT_S,
) -> int:
    """Send the configuration to a running instance or cluster. Unchanged models continue undisturbed."""
    console = Console()
    errors = Console(stderr=True)
    elsewhere = at.elsewhere()
    if elsewhere is not None:
        operators.require_one_place(address)
        options = remote_deploy.DeployOptions(plan_only, as_json, check_first, wait, roll_back, timeout_s)
        return remote_deploy.deploy(config, elsewhere, options, console, errors)
    state = at.state
    if plan_only:
        place = deploying.find(address, state)
        return EXIT_USAGE if checking.tell(config, place, as_json=as_json, with_plan=True) else 0
    if check_first and not checking.readable(config, errors, here=address is None):
        return EXIT_USAGE
    chosen = configured(config, None)
    target = deploying.find(address, state)
    if check_first and not checking.may_deploy(chosen, target, console, errors):
        return EXIT_USAGE
    return deploying.deploy(chosen, target, wait=wait, roll_back=roll_back, timeout_s=timeout_s, console=console)


@_command
def export(
    config: ConfigOption,
    host: Annotated[
        str | None, typer.Option("--host", help="Address to listen on; Serve's default is 0.0.0.0.")
    ] = None,
    port: Annotated[int | None, typer.Option("--port", min=1, max=65535, help="Port of the endpoint.")] = None,
    head_only: Annotated[
        bool,
        typer.Option("--head-only/--every-node", help="HAProxy on the head alone, or on every node with replicas."),
    ] = False,
) -> None:
    """Print the configuration in Serve's format, for `serve deploy` and Serve's REST interface. It holds no key."""
    where: ProxyLocation = "HeadOnly" if head_only else "EveryNode"
    print(deploying.export(configured(config, None), host=host, port=port, proxy_location=where), end="")


@_command
def status(
    at: EndpointOptions,
    as_json: JsonOption = False,
    watch: WatchOption = False,
) -> int:
    """Show models, replicas and their states. Exit status 3 when nothing runs."""
    found = instances.status(at)
    if found is None:
        nothing = {"instance": at.instance, "state": "stopped"}
        print(json.dumps(nothing) if as_json else instances.nothing_runs(at.state))
        return EXIT_NOTHING_RUNS
    if watch:
        stopped = {"state": "stopped", "message": "", "models": [], "routers": []}
        print_again(lambda: instances.status(at) or found | stopped, as_json, instances.show)
    print_found(found, as_json, instances.show)
    return 0


@_command
def quota(
    at: EndpointOptions,
    as_json: JsonOption = False,
    address: AddressOption = None,
    watch: WatchOption = False,
) -> None:
    """Show how GPU memory is used: devices, engines, sessions, and the engines that wait for memory."""
    ask = functools.partial(
        operators.ask, at, address, ledger.fetch_quota, functools.partial(ledger.ask_actor, "quota")
    )
    if watch:
        print_again(ask, as_json, ledger.show)
    print_found(ask(), as_json, ledger.show)


@_command
def defrag(
    at: EndpointOptions,
    plan_only: Annotated[bool, typer.Option("--plan", help="Only print the plan.")] = False,
    as_json: JsonOption = False,
    address: AddressOption = None,
) -> None:
    """Free memory for a waiting engine: other engines drain and restart, one at a time; no request is lost."""
    begin = not plan_only
    by_http = functools.partial(ledger.fetch_plan, begin=begin)
    answer = operators.ask(at, address, by_http, functools.partial(ledger.ask_actor, "defrag", begin=begin))
    print_found(answer | {"begun": answer["plan"] is not None and begin}, as_json, ledger.show_plan)


@_command
def drain(
    name: Annotated[str, typer.Argument(help="A replica's id or its beginning, or a node's address, host name or id.")],
    at: EndpointOptions,
    within: Annotated[
        str | None,
        typer.Option("--within", help="When the rest is moved elsewhere, such as 30s; by default the model's drain_s."),
    ] = None,
    as_json: JsonOption = False,
    address: AddressOption = None,
) -> None:
    """Take a replica or a node out of service: requests finish or move to other replicas, none is lost."""
    within_s = None if within is None else key_commands.seconds(within, "--within")
    console = None if as_json else Console()
    by_http = functools.partial(draining.drain_by_http, name, within_s, console=console)
    found = operators.ask(at, address, by_http, functools.partial(draining.drain, name, within_s, console=console))
    print_found(found, as_json, draining.show_end)


@_command
def chat(
    at: EndpointOptions,
    prompt: Annotated[str | None, typer.Argument(help="Ask this and leave; without it, a conversation.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Which model; by default the first.")] = None,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    priority: Annotated[
        str | None, typer.Option("--priority", help="Class: low, normal, high, critical; as far as the key allows.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, help="Tokens of an answer; by default the model ends it.")
    ] = None,
) -> None:
    """Chat with a model of a running instance; the answer is streamed."""
    endpoint = at.endpoint()
    chosen = talk.first_model(endpoint) if model is None else model
    messages = [{"role": "system", "content": system}] if system else []
    conversation = talk.Conversation(endpoint, chosen, Console(), priority, messages, max_tokens)
    if prompt is None:
        conversation.interact()
    else:
        conversation.send(prompt)


@_command
def down(at: InstanceOptions) -> None:
    """End an instance, wherever it was started. Without a running instance it does nothing."""
    ended = instances.down(at.state)
    print(f"{at.instance}: ended" if ended else f"{at.instance}: nothing runs")


@_command
def presets(
    config: Annotated[Path | None, typer.Option("--config", help="Show the models of this file.")] = None,
) -> None:
    """Show what each model `preset` sets, or the resulting values of the models of a configuration."""
    print("\n".join(telling.known() if config is None else telling.of(configured(config, None))))


@_command
def doctor(
    at: EndpointOptions,
    as_json: JsonOption = False,
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port of the endpoint.")] = running.DEFAULT_PORT,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = LOOPBACK,
    address: AddressOption = None,
) -> int:
    """Check this machine, the endpoint's port, and the instance or cluster if one runs; with --url or --context that
    endpoint alone. Exit status 1 for a failure."""
    elsewhere = at.elsewhere() if at.url or at.context else None
    if elsewhere is None:
        checks = examining.checks(at.state, address, host, port)
    else:
        operators.require_one_place(address)
        checks = remote_doctor.checks(elsewhere)
    found = examining.as_json(checks)
    print_found(found, as_json, examining.show)
    return EXIT_FAILED if found["state"] == "fail" else 0


@_command
def explain(
    request_id: Annotated[
        str, typer.Argument(help="In the answer's headers (x-serve-app-request-id, x-request-id), or in its body.")
    ],
    at: EndpointOptions,
    as_json: JsonOption = False,
) -> None:
    """Show how a request ended, and why: its wait, its replica, its tokens, its refusal."""
    endpoint = at.endpoint()
    print_found(explaining.receipt(endpoint, request_id), as_json, explaining.show)


@_command
def usage(
    at: EndpointOptions,
    by: Annotated[
        list[UsageGroup] | None, typer.Option("--by", help="Add up by this; may be given again. By default tenant.")
    ] = None,
    from_day: Annotated[str | None, typer.Option("--from", help="The first day of UTC, as 2026-11-25.")] = None,
    to_day: Annotated[str | None, typer.Option("--to", help="The last day.")] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="CSV instead of a table.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what keys, tenants and models have used, and its cost; with a tenant's key that of the tenant."""
    groups = by or [UsageGroup.TENANT]
    found = usages.report(at.endpoint(), groups, from_day, to_day)
    if as_csv:
        usages.write_csv(found, sys.stdout)
    else:
        print_found(found, as_json, usages.show)


@_command
def logs(
    at: EndpointOptions,
    source: Annotated[
        str,
        typer.Argument(help="A model, or router, batch, controller, proxy, quota; by default all.", show_default=False),
    ] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new lines, until Ctrl-C.")] = False,
    replica: Annotated[str, typer.Option("--replica", help="Lines of this replica: its id begins so.")] = "",
    request: Annotated[str, typer.Option("--request", help="Lines of routers and engines about this request.")] = "",
    level: Annotated[LogLevel | None, typer.Option("--level", help="Records of this level and above.")] = None,
    since: Annotated[
        str | None, typer.Option("--since", help="Lines since a time (2027-01-31T22:00), or of the last 10m, 2h.")
    ] = None,
    lines: Annotated[
        int, typer.Option("--lines", min=1, max=MAX_LINES, help="So many lines at most, the last.")
    ] = LINES,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object a line.")] = False,
    address: AddressOption = None,
) -> int:
    """Show log lines in order of time; of an instance also after its end."""
    begin = 0.0 if since is None else reading.since_of(since, datetime.now(UTC))
    wanted = wanted_lines(source, replica, request, level, begin)
    elsewhere = at.elsewhere()
    if elsewhere is not None and address is None:
        query = {"source": source, "replica": replica, "request": wanted.request, "level": level}
        query["since"] = reading.iso(begin) if begin else None
        batches = reading.of_endpoint(elsewhere, query, lines, follow=follow)
    elif address is None and "RAY_ADDRESS" not in os.environ:
        batches = reading.of_instance(at.state, wanted, lines, follow=follow)
    else:
        batches = reading.of_cluster(deploying.find(address, at.state), wanted, lines, follow=follow)
    if reading.show(batches, Console(), as_json=as_json):
        return 0
    hint = f"; `serve-app explain {request}` shows its receipt" if request else ""
    say(Console(stderr=True), f"there is no such line{hint}")
    return EXIT_FAILED


def main() -> None:
    """Entry point of the `serve-app` command."""
    app()
