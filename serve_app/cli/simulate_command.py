"""`serve-app simulate`: how many GPUs recorded traffic needs, and at which service levels, without a cluster."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, TextIO

import typer
from rich import progress as bars
from rich.console import Console

from autoscaling.policies import POLICIES
from autoscaling.simulator import PROFILES, EngineProfile, SimulatedRequest, World
from serve_app import settings as configuration
from serve_app.cli import simulate as simulating
from serve_app.cli.command_line import CONFIG_HELP, JsonOption, print_found
from serve_app.cli.key_commands import seconds
from serve_app.cli.layout import NOTHING, Listing
from serve_app.cli.simulate import (
    Arm,
    ArmResult,
    ClassResult,
    Comparison,
    Configuration,
    GpuBound,
    LoadOptions,
    TraceSummary,
)
from serve_app.errors import BadRequest

DEFAULT_ATTAINMENT = 0.99  # of a class: the field's usual objective
COLUMNS = ("arm", "replicas", "GPUs", "GPU hours", "cost", "refused", "changes")

TraceOption = Annotated[
    Path,
    typer.Option("--trace", help="Azure's or BurstGPT's CSV, Mooncake's JSON lines, or `requests --export`; also .gz."),
]
PolicyOption = Annotated[
    str | None,
    typer.Option(
        "--policy",
        help=f"Policies to compare, with commas between them: {', '.join(POLICIES)}; by default the configuration's.",
    ),
]
WhatIfOption = Annotated[
    list[str] | None,
    typer.Option(
        "--what-if", help="Also with a changed setting, such as max_num_seqs=128 or a=1,b=2; may be given again."
    ),
]
ProfileOption = Annotated[
    list[str] | None,
    typer.Option(
        "--profile",
        help=f"Speed of the engines, as PROFILE or MODEL=PROFILE: {', '.join(PROFILES)}, or FILE.json; "
        "may be given again.",
    ),
]
LevelOption = Annotated[
    list[str] | None,
    typer.Option("--level", help="First token of a class within, such as normal=2s; may be given again."),
]


@dataclass(frozen=True)
class WorldOptions:
    """The options of what is simulated."""

    policy: PolicyOption = None
    what_if: WhatIfOption = None
    profile: ProfileOption = None
    level: LevelOption = None
    attainment: Annotated[
        float, typer.Option("--attainment", min=0.0, max=1.0, help="Part of a class that has to meet its level.")
    ] = DEFAULT_ATTAINMENT
    gpus: Annotated[
        int | None, typer.Option("--gpus", min=1, help="All there are; by default as many as asked for.")
    ] = None
    gpus_per_node: Annotated[int | None, typer.Option("--gpus-per-node", min=1, help="By default 8.")] = None


@dataclass(frozen=True)
class TraceOptions:
    """The options of the load."""

    model: Annotated[
        str | None, typer.Option("--model", help="All requests ask for it; by default the trace's, or the first one.")
    ] = None
    request_class: Annotated[
        str | None, typer.Option("--class", help="All requests have it; by default the trace's, or normal.")
    ] = None
    scale: Annotated[float, typer.Option("--scale", min=0.001, max=1000.0, help="Arrivals so many times as fast.")] = (
        1.0
    )
    last: Annotated[str | None, typer.Option("--last", help="Only the end of the trace, such as 1h.")] = None
    most: Annotated[int | None, typer.Option("--most", min=1, help="So many requests at most.")] = None

    @property
    def load(self) -> LoadOptions:
        last_s = None if self.last is None else seconds(self.last, "--last")
        return LoadOptions(self.model, self.request_class, self.scale, last_s, self.most)


def simulate(
    config: Annotated[Path, typer.Argument(help=CONFIG_HELP)],
    trace: TraceOption,
    world: WorldOptions,
    of_trace: TraceOptions,
    plot: Annotated[Path | None, typer.Option("--plot", help="Write a picture, such as plan.png.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a page with charts, one file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate recorded traffic: replicas, GPU hours, cost and first tokens, for settings and policies side by side."""
    if plot is not None:
        simulating.require_pictures()
    base, changes = configurations(config, world)
    load = _load(trace, [model.name for model in base.settings.models], of_trace.load)
    comparison = compared(Planned(config, str(trace), base, changes, load), world, of_trace.scale)
    if html is not None:
        _write(html, simulating.page(comparison))
    if plot is not None:
        simulating.write_picture(comparison, plot)
    print_found(asdict(comparison), as_json, lambda _, console: show(comparison, console))


@dataclass(frozen=True, slots=True)
class Planned:
    """What was read. `trace`: where the load is from; `changes`: the configurations of `--what-if`, by its texts."""

    config: Path
    trace: str
    base: Configuration
    changes: Mapping[str, Configuration]
    load: Sequence[SimulatedRequest]


def configurations(config: Path, options: WorldOptions) -> tuple[Configuration, dict[str, Configuration]]:
    """The configuration with its levels, and the changed ones by the texts of their changes."""
    settings = configuration.load(config)
    base = Configuration(configuration.read_file(config).data, settings)
    for text in options.level or ():
        base = simulating.changed(base, simulating.level_of(text))
    what_ifs = [simulating.what_if_of(text) for text in options.what_if or ()]
    return base, {what_if.text: simulating.changed(base, what_if) for what_if in what_ifs}


def compared(planned: Planned, options: WorldOptions, scale: float) -> Comparison:
    """Run all arms. `scale`: see `TraceOptions`."""
    bound = GpuBound(options.gpus, options.gpus_per_node)

    def profiles_of(each: Configuration) -> dict[str, EngineProfile]:
        return simulating.chosen_profiles(options.profile or (), each.settings.models, _text_of)

    def world_of(each: Configuration) -> World:
        return simulating.world_of(each.settings, profiles_of(each), bound)

    worlds = {text: world_of(each) for text, each in planned.changes.items()}
    arms = simulating.arms_of(_policies(options.policy, planned.base), world_of(planned.base), worlds)
    found = _run_all(arms, planned.load, options.attainment)
    profiles = profiles_of(planned.base)
    return Comparison(
        str(planned.config),
        _trace_figures(planned.trace, planned.load, scale),
        options.attainment,
        {name: asdict(profile) for name, profile in profiles.items()},
        tuple(simulating.notes_on(planned.base.settings, profiles, bound)),
        tuple(found),
        simulating.recommendation(found, options.attainment),
    )


def _policies(text: str | None, configured: Configuration) -> list[str]:
    if text is None:
        return list(dict.fromkeys(model.replicas.policy for model in configured.settings.models))
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in POLICIES:
            raise BadRequest(f"--policy {name}: it is none of {', '.join(POLICIES)}", param="--policy")
    return list(dict.fromkeys(names))


def _run_all(arms: Sequence[Arm], load: Sequence[SimulatedRequest], attainment: float) -> list[ArmResult]:
    """The figures of all arms, one after the other, with a bar on a terminal."""
    errors = Console(stderr=True)
    columns = (bars.BarColumn(), bars.TaskProgressColumn(), bars.TimeRemainingColumn())
    title = bars.TextColumn("{task.description}", markup=False)
    with bars.Progress(title, *columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        tasks = [progress.add_task(arm.name, total=1.0) for arm in arms]

        def run(arm: Arm, task: bars.TaskID) -> ArmResult:
            def on_progress(part: float) -> None:
                progress.update(task, completed=min(1.0, part))

            return simulating.run_arm(arm, load, attainment, on_progress)

        return [run(arm, task) for arm, task in zip(arms, tasks, strict=True)]


def _load(trace: Path, models: Sequence[str], options: LoadOptions) -> list[SimulatedRequest]:
    with _reading(trace, "--trace") as file:
        return simulating.load_of(file, models, options)


def _trace_figures(trace: str, load: Sequence[SimulatedRequest], scale: float) -> TraceSummary:
    return TraceSummary(
        trace,
        len(load),
        load[-1].at_s,
        scale,
        sum(request.prompt_tokens for request in load),
        sum(request.output_tokens for request in load),
    )


def _text_of(name: str) -> str:
    with _reading(Path(name), "--profile") as file:
        return file.read()


@contextmanager
def _reading(path: Path, option: str) -> Iterator[TextIO]:
    """A text file, by its name compressed or not. Raises BadRequest: it cannot be read."""
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            yield file
    except (OSError, EOFError) as error:
        raise BadRequest(f"{option} {path}: {getattr(error, 'strerror', None) or error}", param=option) from None
    except UnicodeDecodeError:
        raise BadRequest(f"{option} {path}: it is no text", param=option) from None


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadRequest(f"--html {path}: {error.strerror}", param="--html") from None


def show(found: Comparison, console: Console) -> None:
    """Print a row for each arm, the notes and the recommendation."""
    listing = Listing(console)
    classes = list(dict.fromkeys(each.request_class for arm in found.arms for each in arm.classes))
    if console.is_terminal:
        of_class = {name: f"{name} " if len(classes) > 1 else "" for name in classes}
        heads = [f"{of_class[name]}{head}" for name in classes for head in ("in time", "p50", "p99")]
        columns = [*COLUMNS, *heads]
        rows = [[*_arm_row(arm), *_class_cells(arm, classes)] for arm in found.arms]
        if all(model.gpus_per_replica == 1 for arm in found.arms for model in arm.models):
            for row in (columns, *rows):
                del row[COLUMNS.index("replicas")]  # it would be the GPUs again
        styles = ["green" if arm.name == found.recommendation.arm else "" for arm in found.arms]
        listing.table("arm", columns, rows, styles=styles)
        listing.say("GPUs: mean/most. p50, p99: of the first token.", (), style="dim")
    else:
        listing.table("arm", COLUMNS, [_arm_row(arm) for arm in found.arms])
        of_classes = [[arm.name, each.request_class, *_class_row(each)] for arm in found.arms for each in arm.classes]
        listing.table("class", ("arm", "class", "in time", "first token p50", "p99", "refused"), of_classes)
    for note in found.notes:
        listing.say(f"Note: {note}.", ("note", note), style="yellow")
    listing.say(found.recommendation.text, ("recommendation", found.recommendation.text), style="bold")


def _arm_row(arm: ArmResult) -> list[str]:
    return [
        arm.name,
        f"{arm.replicas_mean:.1f}/{arm.replicas_peak}",
        f"{arm.gpus_mean:.1f}/{arm.gpus_peak}",
        f"{arm.gpu_hours:.1f}",
        simulating.money(arm.cost),
        str(arm.refused),
        str(arm.changes),
    ]


def _class_cells(arm: ArmResult, classes: Sequence[str]) -> list[str]:
    by_name = {each.request_class: each for each in arm.classes}
    return [cell for name in classes for cell in (_class_row(by_name[name])[:3] if name in by_name else [NOTHING] * 3)]


def _class_row(found: ClassResult) -> list[str]:
    in_time = simulating.percent(found.attainment)
    level = "" if found.level_s is None else f" in {found.level_s:g} s"
    return [
        f"{in_time}{level}",
        simulating.seconds(found.ttft_p50_s),
        simulating.seconds(found.ttft_p99_s),
        str(found.refused),
    ]
