"""One model: its answers, its times, its replicas."""

from __future__ import annotations

from scripts.dashboards import questions
from scripts.dashboards.boards import RATE, Board, Kind, Panel, Query, Section, Unit, Variable
from scripts.dashboards.expressions import Source, growth, mean, now, observations, quantile, rate
from scripts.dashboards.vllm_panels import vllm_panels
from serve_app.router.metrics.table import ClusterFigure, EngineFigure, Figure, Metric

MODEL = questions.MODEL
THIRD = 8  # of the width


def model() -> Board:
    return Board(
        "serve-app-model",
        "serve-app: a model",
        "Answers, times and replicas of one model.",
        (
            Section("Requests", (*_requests(), *_service_level())),
            Section("Times", _times()),
            Section("Replicas", (*_replicas(), *_engines())),
            Section("vLLM's own metrics", vllm_panels(MODEL)),
            Section("Continuity", _continuity()),
            Section("Names", _names()),
        ),
        (Variable("model", Figure.WAITING, is_single=True),),
    )


def _requests() -> tuple[Panel, ...]:
    outcomes = rate(Metric.REQUESTS, RATE, model=MODEL).summed("outcome")
    arrivals = rate(Metric.ARRIVALS, RATE, model=MODEL).summed("priority")
    return (
        Panel(
            "Arrivals by class",
            "Requests that were read and understood.",
            Unit.REQUESTS_PER_SECOND,
            (Query(arrivals, "{{priority}}"),),
            Kind.STACK,
            THIRD,
        ),
        Panel(
            "Ends by outcome",
            "How requests ended.",
            Unit.REQUESTS_PER_SECOND,
            (Query(outcomes, "{{outcome}}"),),
            Kind.STACK,
            THIRD,
        ),
        Panel(
            "Length of prompts and answers",
            "Tokens, the median and the longest 5%.",
            Unit.COUNT,
            tuple(
                Query(quantile(part, source, RATE, model=MODEL), f"{name} p{part * 100:g}")
                for source, name in ((Metric.REQUEST_PROMPT_TOKENS, "prompt"), (Metric.REQUEST_OUTPUT_TOKENS, "output"))
                for part in (0.5, 0.95)
            ),
            width=THIRD,
        ),
    )


def _service_level() -> tuple[Panel, ...]:
    missed = growth(Metric.SLO_MISSED, questions.HOUR, model=MODEL).summed("priority", "reason")
    met = growth(Metric.SLO_MET, questions.HOUR, model=MODEL).summed("priority")
    offered = growth(Metric.SLO_OFFERED, questions.HOUR, model=MODEL).summed("priority")
    goodput = rate(Metric.GOODPUT_TOKENS, RATE, model=MODEL).summed("priority")
    return (
        Panel(
            "Tokens",
            "Of ended answers, and those of generations within their service level.",
            Unit.PER_SECOND,
            (
                Query(rate(Metric.PROMPT_TOKENS, RATE, model=MODEL).summed(), "prompt"),
                Query(rate(Metric.COMPLETION_TOKENS, RATE, model=MODEL).summed(), "output"),
                Query(goodput.or_zero("priority", "no class"), "within the service level: {{priority}}"),
            ),
            width=THIRD,
        ),
        Panel(
            "Service level kept in the last hour",
            "Of the classes that declare one (`ttft_slo_s`, `itl_slo_s`).",
            Unit.RATIO,
            (Query(met.over(offered), "{{priority}}"),),
            Kind.BARS,
            THIRD,
            nothing="no class declares a service level, or had a request",
        ),
        Panel(
            "Service level missed in the last hour",
            "Generations, by class and reason.",
            Unit.COUNT,
            (Query(missed.or_zero("reason"), "{{priority}} {{reason}}"),),
            Kind.BARS,
            THIRD,
        ),
    )


def _quantiles(title: str, about: str, source: Source) -> Panel:
    """The median and the slowest 5% by class."""
    queries = tuple(
        Query(quantile(part, source, RATE, "priority", model=MODEL), "{{priority}} p" + f"{part * 100:g}")
        for part in (0.5, 0.95)
    )
    return Panel(title, about, Unit.SECONDS, queries, width=THIRD)


def _times() -> tuple[Panel, ...]:
    return (
        _quantiles("First token", "From the arrival, waits included.", Metric.TIME_TO_FIRST_TOKEN),
        _quantiles("Wait in the queue", "Before the last grant.", Metric.QUEUE_WAIT),
        _quantiles("Whole answer", "From the arrival to the end of an answer.", Metric.DURATION),
        _quantiles("First token: the router's part", "Without waits.", Metric.FIRST_TOKEN_IN_ROUTER),
        _quantiles("First token: the engine's part", "From the replica on.", Metric.FIRST_TOKEN_IN_ENGINE),
        _quantiles("Time between tokens", "The mean of a request.", Metric.TIME_PER_TOKEN),
        _quantiles("Longest pause between tokens", "Of a streamed request.", Metric.LONGEST_GAP),
        questions.who_waits(),
    )


def _replicas() -> tuple[Panel, ...]:
    slots = now(Figure.SLOTS, model=MODEL, state="granted").summed("replica")
    size = now(Figure.SLOTS, model=MODEL, state="total").highest("replica")
    return (
        Panel(
            "Slots in use",
            "Of each replica, over all of its slots.",
            Unit.RATIO,
            (Query(slots.over(size), "{{replica}}"),),
            width=THIRD,
        ),
        Panel(
            "KV tokens in use",
            "Of each replica, over all that it has. Near 100% requests wait for kv_tokens.",
            Unit.RATIO,
            (Query(now(ClusterFigure.KV_USED_RATIO, model=MODEL).highest("replica"), "{{replica}}"),),
            width=THIRD,
        ),
        Panel(
            "Sequences in the engine",
            "Those that run, those that wait in the engine, and the mean batch.",
            Unit.COUNT,
            (
                Query(now(EngineFigure.RUNNING, model=MODEL).summed("replica"), "{{replica}} running"),
                Query(now(EngineFigure.WAITING, model=MODEL).summed("replica"), "{{replica}} waiting"),
                Query(now(EngineFigure.BATCH_SIZE, model=MODEL).summed("replica"), "{{replica}} batch"),
            ),
            width=THIRD,
        ),
    )


def _engines() -> tuple[Panel, ...]:
    computed = rate(EngineFigure.PREFILLED_TOKENS, RATE, model=MODEL).summed()
    prompts = rate(EngineFigure.PROMPT_TOKENS, RATE, model=MODEL).summed()
    preempted = rate(EngineFigure.PREEMPTIONS, RATE, model=MODEL).summed("replica")
    return (
        Panel(
            "Tokens of a replica",
            "Prompt and output tokens a second, over ten seconds.",
            Unit.PER_SECOND,
            (Query(now(EngineFigure.TOKENS_PER_S, model=MODEL).summed("replica"), "{{replica}}"),),
            Kind.STACK,
            THIRD,
        ),
        Panel(
            "Prompt tokens that had to be computed",
            "Over all prompt tokens. Low: the prefix cache hits. Above 100%: much is computed again after stops.",
            Unit.RATIO,
            (Query(computed.over(prompts), "computed"),),
            width=THIRD,
        ),
        Panel(
            "Stopped in the engine",
            "Sequences that the engine stopped for want of KV blocks. If it grows, KV tokens are short.",
            Unit.PER_SECOND,
            (Query(preempted, "{{replica}}"),),
            width=THIRD,
        ),
    )


def _continuity() -> tuple[Panel, ...]:
    window = RATE
    counts = (
        (Metric.RETRIES, "run again after a loss"),
        (Metric.PREEMPTIONS, "stopped for others"),
        (Metric.MIGRATIONS, "streams continued elsewhere"),
        (Metric.MOVES, "moved from a replica that was taken away"),
    )
    gap = mean(Metric.MIGRATION_GAP, questions.HOUR, model=MODEL)
    placed = rate(Figure.PLACEMENTS, RATE, model=MODEL).summed("key", "place")
    generations = observations(Metric.TIME_TO_FIRST_TOKEN, RATE, model=MODEL).summed("priority")
    return (
        Panel(
            "Requests that changed their replica, or stopped for a while",
            "Since the point before. None fails by that.",
            Unit.COUNT,
            tuple(Query(growth(source, window, model=MODEL).summed().or_zero(), name) for source, name in counts),
            width=THIRD,
        ),
        Panel(
            "Pause of a stream that continued elsewhere",
            "The mean of the last hour, from the loss to the next token.",
            Unit.SECONDS,
            (Query(gap.or_zero(), "pause"),),
            width=THIRD,
        ),
        Panel(
            "Where requests are placed",
            "By key and place; `home` finds a cached prefix.",
            Unit.REQUESTS_PER_SECOND,
            (Query(placed, "{{key}} {{place}}"),),
            Kind.STACK,
            THIRD,
        ),
        Panel(
            "Generations with a first token",
            "By class.",
            Unit.REQUESTS_PER_SECOND,
            (Query(generations, "{{priority}}"),),
            width=THIRD,
        ),
        questions.what_failed(),
    )


def _names() -> tuple[Panel, ...]:
    here = growth(Metric.NAMED_REQUESTS, questions.HOUR, model=MODEL).summed("name")
    everywhere = growth(Metric.NAMED_REQUESTS, questions.HOUR).summed("name")
    ended = rate(Metric.NAMED_REQUESTS, RATE, model=MODEL).summed("name", "outcome")
    left = growth(Metric.NAMED_HOPS, RATE, model=MODEL).summed("name", "reason")
    return (
        Panel(
            "Part of each name that ran here",
            "Of the requests of the last hour to a name of `routes`, those that ended on this model. Compare with its "
            "weight.",
            Unit.RATIO,
            (Query(here.over(everywhere).or_zero("name", "no name"), "{{name}}"),),
            width=THIRD,
        ),
        Panel(
            "Requests to names by outcome",
            "How those ended that asked for a name and not for this model.",
            Unit.REQUESTS_PER_SECOND,
            (Query(ended.or_zero("outcome", "none"), "{{name}} {{outcome}}"),),
            Kind.STACK,
            THIRD,
        ),
        Panel(
            "Left for a fallback",
            "Requests to a name that left this model for the next one, since the point before, by reason.",
            Unit.COUNT,
            (Query(left.or_zero("reason", "none"), "{{name}} {{reason}}"),),
            Kind.STACK,
            THIRD,
        ),
    )
