"""`serve-app support-bundle`: one file with what somebody needs who is to help.

Each part is collected by itself: one that fails, because nothing runs or nothing answers, is named in the manifest with
the reason, and the others go on.

Invariant: no value of a secret (`secret_values`) and no prompt is in any file of the bundle, and nobody but its owner
can read it.
"""

from __future__ import annotations

import functools
import importlib.metadata
import io
import json
import os
import platform
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console

from serve_app.cli import audit as audits
from serve_app.cli import instances
from serve_app.cli import logs as reading
from serve_app.cli.command_line import CONFIG_HELP, AddressOption, EndpointOptions
from serve_app.cli.deploy import find
from serve_app.cli.endpoint import Endpoint, request, session
from serve_app.cli.layout import say
from serve_app.cli.operators import ADDRESS_VARIABLE
from serve_app.cli.progress import Progress
from serve_app.cli.secret_values import Secrets, without_secrets
from serve_app.cluster.local import InstanceState, ask, read_text
from serve_app.errors import ConfigError, ServeAppError, Unavailable
from serve_app.names import RELEASE
from serve_app.settings import configuration_digest, read_file, resolve, split_arguments
from serve_app.system import PROMPT_MARK, LogFilter, LogPart, doctor

ANSWER_S = (5.0, 20.0)  # to connect, and between two pieces of an answer: a loaded head takes seconds
LOG_LINES = 2000  # of each file, the last ones: minutes of a busy router
HTTP_LOG_LINES = 10_000  # of all files together, as many as an endpoint gives at once
MAX_LOG_CHARS = 2_000_000  # of each file
MAX_OWN_LOG_CHARS = 200_000  # of the start's and the driver's log, which are short
MAX_LOGS_CHARS = 40_000_000  # of all together: some MB, compressed
AUDIT_SINCE = "30d"
PREFIXES = ("SERVE_APP_", "RAY_", "VLLM_", "HF_", "CUDA_", "NVIDIA_", "OMP_", "PG", "REDIS_", "AWS_")  # of variables
FILE_MODE = 0o600

FIGURES = (  # part, route, file
    ("quota", "/admin/quota", "quota.json"),
    ("metrics", "/metrics", "metrics.txt"),
    ("models", "/v1/models", "models.json"),
)

Files = Mapping[str, str]  # by their names in the bundle


@dataclass(frozen=True, slots=True)
class Place:
    """What the bundle is about.

    Args:
        at: how the command names it.
        elsewhere: the endpoint that it names; None: the instance of this machine is meant.
        endpoint: the one to ask; None: nothing runs here, or its key cannot be read.
        address: of a cluster.
        config: the file to show instead of what is deployed.
    """

    at: EndpointOptions
    elsewhere: Endpoint | None = None
    endpoint: Endpoint | None = None
    address: str | None = None
    config: Path | None = None

    @property
    def state(self) -> InstanceState:
        return self.at.state


@dataclass(slots=True)
class Bundle:
    """What was collected so far. `missing`: the parts that are not there, and why."""

    secrets: Secrets = field(default_factory=Secrets)
    files: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def collect(self, name: str, collected: Callable[[], Files]) -> None:
        """Add the files of a part, or why it is missing."""
        try:
            self.files |= collected()
        except Exception as error:  # noqa: BLE001 - whatever is broken: that is what a bundle is made for
            self.missing[name] = f"{error}" if isinstance(error, ServeAppError) else f"{type(error).__name__}: {error}"

    def write(self, path: Path) -> None:
        """Write the file. Raises ConfigError: it is there already, or its folder cannot be written."""
        manifest = {
            "made_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "release": RELEASE,
            "files": sorted(self.files),
            "missing": self.missing,
        }
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        except OSError as error:
            raise ConfigError(f"{path}: the bundle cannot be written: {error.strerror}", param="--output") from None
        with os.fdopen(descriptor, "wb") as out, tarfile.open(fileobj=out, mode="w:gz") as archive:
            for name, text in {"manifest.json": _json(manifest), **self.files}.items():
                content = self.secrets.without(text).encode("utf-8", "replace")
                entry = tarfile.TarInfo(f"{path.name.removesuffix('.tar.gz')}/{self.secrets.without(name)}")
                entry.size = len(content)
                entry.mtime = int(time.time())
                entry.mode = FILE_MODE
                archive.addfile(entry, io.BytesIO(content))


def support_bundle(
    at: EndpointOptions,
    config: Annotated[
        Path | None, typer.Option("--config", help=f"{CONFIG_HELP} By default what is deployed.", show_default=False)
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file, by default in this folder.", show_default=False)
    ] = None,
    address: AddressOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print path and missing parts as one JSON object.")] = False,
) -> None:
    """Write versions, configuration, figures and last logs into one file, without secrets, also when nothing runs."""
    path = output or Path(time.strftime("serve-app-support-%Y%m%d-%H%M%S.tar.gz"))
    elsewhere = at.elsewhere()
    found = elsewhere or _endpoint_of_instance(at)
    cluster = address or (os.environ.get(ADDRESS_VARIABLE) if elsewhere is None else None)
    place = Place(at, elsewhere, found, cluster, config)
    bundle = Bundle()
    add_known_secrets(bundle.secrets, place)
    console = Console(stderr=True)
    with Progress(console) as progress:
        for name, collected in parts(place, bundle.secrets):
            progress.begin(f"Collecting {name}")
            bundle.collect(name, collected)
        progress.begin("Writing the file")
        bundle.write(path)
    missing = {name: bundle.secrets.without(reason) for name, reason in bundle.missing.items()}
    for name, reason in missing.items():
        say(console, f"missing: {name}: {reason}", "yellow")
    print(json.dumps({"path": str(path.absolute()), "missing": missing}) if as_json else path.absolute())


def add_known_secrets(secrets: Secrets, place: Place) -> None:
    """The keys and tokens of this machine and of this command."""
    secrets.add_environment(os.environ)
    if place.endpoint is not None and place.endpoint.key:
        secrets.add(place.endpoint.key, "the API key of this command")
    for file in (place.state.generated_key_file, place.state.configured_key_file, place.state.token_file):
        secrets.add((read_text(file) or "").strip(), file.name)


def parts(place: Place, secrets: Secrets) -> Iterator[tuple[str, Callable[[], Files]]]:
    """The parts, the configuration first: its secrets are known from then on."""
    yield "configuration", lambda: configuration(place, secrets)
    yield "versions", versions
    yield "machine", lambda: {"machine.json": _json([check._asdict() for check in doctor.machine()])}
    yield "status", lambda: status(place)
    for name, path, file in FIGURES:
        yield name, functools.partial(answer, place, path, file)
    yield "audit", lambda: audit(place)
    yield "logs", lambda: logs(place)


def configuration(place: Place, secrets: Secrets) -> Files:
    """The configuration of the file, else what is deployed, with names in place of its secrets."""
    if place.config is not None:
        found = read_file(place.config)
        data: Any = found.data
        variables: Any = found.names
    elif place.elsewhere is not None and place.address is None:
        raise Unavailable("no endpoint tells its configuration: give --config or --address", code="not_running")
    else:
        target = find(place.address, place.state)
        arguments = ask({"do": "deployed", "environment": target.environment})["arguments"]
        if arguments is None:
            raise Unavailable("nothing is deployed", code="not_running")
        _, variables, declared = split_arguments(arguments)
        data = resolve(declared, {}).data
        found = None
    secrets.add_settings(data, variables)
    shown = without_secrets(data, variables)
    text = yaml.safe_dump(shown, sort_keys=False, allow_unicode=True, width=sys.maxsize)
    wrong = [] if found is None else [f"{one.path}: {one.located}" for one in found.wrong]
    about = {"digest": configuration_digest(data), "wrong": wrong}
    return {"configuration.yaml": text, "configuration.json": _json(about)}


def versions() -> Files:
    """The release, the platform, the installed packages, and the names of variables that are set."""
    packages = {one.metadata["Name"]: one.version for one in importlib.metadata.distributions()}
    system = Path("/etc/os-release")
    found = {
        "serve-app": RELEASE,
        "python": sys.version,
        "platform": platform.platform(),
        "os": read_text(system) or "",
        "cpus": sorted(os.sched_getaffinity(0)),
        "variables": sorted(name for name in os.environ if name.startswith(PREFIXES)),
    }
    names = sorted(packages, key=str.lower)
    return {"versions.json": _json(found), "packages.txt": "".join(f"{name}=={packages[name]}\n" for name in names)}


def status(place: Place) -> Files:
    """As `serve-app status --json`."""
    found = instances.status(place.at)
    if found is None:
        raise Unavailable(f"{place.state.name}: nothing runs here", code="not_running")
    return {"status.json": _json(found)}


def answer(place: Place, path: str, file: str) -> Files:
    """What the endpoint answers."""
    endpoint = _endpoint(place)
    with session(endpoint) as http:
        return {file: request(http, endpoint, "GET", path, timeout=ANSWER_S).text}


def audit(place: Place) -> Files:
    """The entries of the last weeks."""
    entries = audits.entries(_endpoint(place), AUDIT_SINCE)
    return {"audit.jsonl": "".join(f"{json.dumps(entry)}\n" for entry in entries)}


def logs(place: Place) -> Files:
    """The last lines of each log file; of an instance also after its end."""
    is_instance = place.address is None and place.elsewhere is None
    files = dict(_own_logs(place.state)) if is_instance else {}
    left = MAX_LOGS_CHARS
    for part in reversed(_log_parts(place)):  # the file that was written last comes first
        name = "-".join(filter(None, (part.source.replace("/", "--"), part.replica, Path(part.path).name)))
        lines = (line for line in part.lines if PROMPT_MARK not in line)
        text = "".join(f"{line}\n" for line in lines)[-min(MAX_LOG_CHARS, left) :]
        left -= len(text)
        if left <= 0:
            break
        files[f"logs/{len(files):03}-{name}"] = text
    if not files:
        raise Unavailable("there are no log lines", code="not_running")
    return files


def _log_parts(place: Place) -> list[LogPart]:
    """The last lines of each log file, the file that was written last at the end."""
    everything = LogFilter()
    if place.address is not None:
        target = find(place.address, place.state)
        return [part for parts in reading.parts_of_cluster(target, everything, LOG_LINES) for part in parts]
    if place.elsewhere is None:
        return [part for parts in reading.parts_of_instance(place.state, everything, LOG_LINES) for part in parts]
    lines: dict[tuple[str, str, str], list[str]] = {}
    for batch in reading.of_endpoint(place.elsewhere, {}, HTTP_LOG_LINES, follow=False):
        for found in batch:
            file = (found.source, found.replica, found.path)
            of_file = lines.pop(file, [])
            of_file.append(found.line)
            lines[file] = of_file  # now at the end
    return [LogPart(*file, tuple(of_file)) for file, of_file in lines.items()]


def _own_logs(state: InstanceState) -> Files:
    """The last lines of the logs of the instance's own processes: its start, its driver."""
    instance = state.read()
    folder = state.logs if instance is None else Path(instance.run_dir)
    found = sorted(folder.glob("*.log"))
    return {f"logs/{path.name}": path.read_text(errors="replace")[-MAX_OWN_LOG_CHARS:] for path in found}


def _endpoint_of_instance(at: EndpointOptions) -> Endpoint | None:
    """None: nothing runs here, or its key cannot be read."""
    if at.state.read() is None:
        return None
    try:
        return at.of_instance()
    except ConfigError:
        return None


def _endpoint(place: Place) -> Endpoint:
    if place.endpoint is None:
        raise Unavailable("nothing runs here; --url names another endpoint", code="not_running")
    return place.endpoint


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, default=str) + "\n"
