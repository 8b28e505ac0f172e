"""A request is measured once: its parts are the whole, and it costs what its client bounds until more is known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from serve_app.core.body_bounds import body_size
from serve_app.core.estimate import EstimateSource, Estimator, ObservedUse, RequestCost
from serve_app.core.estimate.estimate import MIN_SEEN
from serve_app.core.receipts import RequestMeasure
from serve_app.core.routing import TargetReason
from serve_app.core.score_inputs import score_inputs
from serve_app.errors import BadRequest
from serve_app.http import request_size, split_body
from serve_app.http.audio_form import FILE
from serve_app.http.measuring import with_costs
from serve_app.http.split_body import SplitBody
from serve_app.settings import HttpSettings, ModelSettings
from serve_app.transport import EngineInfo, Frame, Submit
from serve_app.types import Operation
from tests.fakes.asgi_client import COMPLETIONS, Client, ask, started
from tests.fakes.engines import MODEL as SERVED
from tests.fakes.engines import FakeCluster, model, run
from tests.http.test_request_size import bodies, operations

TENANT = "tenant"
MODEL = "model"
SETTINGS = ModelSettings(name=MODEL)
LONGEST = 100_000
SLOTS = 8
BLOCK = 16
LIMITS = EngineInfo(MODEL, [], LONGEST, SLOTS, 0, 0, kv_block_tokens=BLOCK)


def taught(output_tokens: int, *, cut: bool = False, prompt_tokens: int = 50) -> Estimator:
    """Prompts of 100 bytes, answers of so many tokens."""
    costs = Estimator(0.8)
    for _ in range(MIN_SEEN):
        costs.observe(ObservedUse(TENANT, MODEL, 100, prompt_tokens, output_tokens, is_cut_off=cut))
    return costs


def measured(
    operation: Operation, body: dict[str, Any], costs: Estimator | None = None, session_id: str | None = None
) -> SplitBody:
    split = split_body.split_body(operation, body, body_size(operation, body), HttpSettings())
    return with_costs(split, TENANT, session_id, costs or Estimator(0.8), SETTINGS, LIMITS)


def measure(operation: Operation, body: dict[str, Any], costs: Estimator | None = None) -> RequestMeasure:
    return measured(operation, body, costs).measure


def estimated(costs: Estimator, **body: Any) -> RequestCost:
    """Of a completion."""
    return measure(Operation.COMPLETION, {"prompt": "x" * 100} | body, costs).cost


@pytest.mark.parametrize(
    ("operation", "body", "tokens", "most"),
    [
        (Operation.COMPLETION, {"prompt": "x" * 400, "max_tokens": 50}, 150, 50),
        (Operation.COMPLETION, {"prompt": "x" * 400, "max_tokens": 5000}, 5100, 5000),
        (Operation.COMPLETION, {"prompt": ["x" * 400] * 2, "max_tokens": 50, "n": 3}, 500, 300),
        (Operation.COMPLETION, {"prompt": "x" * 401}, 101 + 256, None),
        (Operation.COMPLETION, {"prompt": "", "max_tokens": -(10**30)}, 1, 0),
        (Operation.COMPLETION, {"prompt": "x" * 400, "max_tokens": -50}, 100, 0),
        (Operation.RESPONSES, {"input": "x" * 400, "max_output_tokens": 50, "n": 9}, 150, 50),  # it has one answer
        (Operation.EMBEDDING, {"input": "x" * 400, "max_tokens": 50}, 100, 0),
        (Operation.RERANK, {"query": "x" * 40, "documents": ["x" * 160, "x" * 200], "max_tokens": 50}, 100, 0),
    ],
)
def test_before_anything_was_learned_a_request_is_given_what_it_asks_for(
    operation: Operation, body: dict[str, Any], tokens: int, most: int | None
) -> None:
    cost = measure(operation, body).cost
    assert (cost.tokens, cost.max_output_tokens, cost.source) == (tokens, most, EstimateSource.PRIOR)


def test_a_bound_above_the_model_s_longest_sequence_bounds_nothing() -> None:
    """A row with `max_tokens` of a billion would wait for all KV tokens of an engine, and everybody behind it."""
    cost = measure(Operation.COMPLETION, {"prompt": "x" * 400, "max_tokens": 10**9}).cost
    assert (cost.output_tokens, cost.max_output_tokens) == (LONGEST, LONGEST)


def test_a_prompt_is_never_estimated_above_the_longest_that_the_model_takes() -> None:
    cost = measure(Operation.COMPLETION, {"prompt": "x" * 8 * LONGEST, "max_tokens": 7}).cost
    assert (cost.prompt_tokens, cost.max_output_tokens) == (LONGEST, 7)


def test_what_was_learned_replaces_a_wide_bound_and_not_a_narrow_one() -> None:
    costs = taught(40)
    wide, narrow, none = (estimated(costs, **body) for body in ({"max_tokens": 900}, {"max_tokens": 7}, {}))
    assert 37 <= wide.output_tokens == none.output_tokens <= 44
    assert (narrow.output_tokens, wide.max_output_tokens, none.max_output_tokens) == (7, 900, None)
    assert wide.source is EstimateSource.TENANT
    assert 46 <= wide.prompt_tokens <= 55  # two bytes a token here, where English has four


def test_each_of_several_answers_is_given_what_one_needs() -> None:
    costs = taught(40)
    assert estimated(costs, n=3).output_tokens == 3 * estimated(costs).output_tokens


def test_answers_that_were_all_cut_off_teach_nothing_but_the_bound() -> None:
    cost = estimated(taught(40, cut=True), max_tokens=900)
    assert (cost.output_tokens, cost.source) == (900, EstimateSource.PRIOR)


def test_another_quantile_holds_for_what_comes_next() -> None:
    costs = Estimator(0.8)
    for tokens in range(1, 101):
        costs.observe(ObservedUse(TENANT, MODEL, 100, 25, tokens))
    before = estimated(costs).output_tokens
    costs.quantile = 0.3
    assert estimated(costs).output_tokens < before / 2


@given(operations, bodies, st.binary(max_size=99))
def test_any_body_costs_something_and_never_more_than_it_bounds(
    operation: Operation, body: dict[str, Any], file: bytes
) -> None:
    if operation.hears:
        body = body | {FILE: file}  # without one it is refused before
    for costs in (Estimator(0.8), taught(40)):
        try:
            cost = measure(operation, body, costs).cost
        except BadRequest:
            assume(False)
        assert cost.tokens >= 1
        assert cost.max_output_tokens is None or cost.output_tokens <= cost.max_output_tokens


TEXTS = ["x" * 99, "y" * 30_000, "é", {"content": [{"type": "text", "text": "z"}]}, "w"] * 20
LISTS: list[tuple[Operation, dict[str, Any]]] = [
    (Operation.COMPLETION, {"prompt": ["a", "b" * 3000, [1, 2, 3], ""], "n": 3, "suffix": "s", "max_tokens": 9}),
    (Operation.COMPLETION, {"prompt": "a", "n": 2}),
    (Operation.COMPLETION, {"prompt": ["a" * 70_000, "b", [1] * 140_000], "user": "u"}),  # two of three are large
    (Operation.EMBEDDING, {"input": ["a", [1, 2, 3], "b" * 30_000] * 30, "user": "u"}),
    (Operation.EMBEDDING, {"messages": [[{"role": "user", "content": "a"}], []] * 40, "tools": [{"a": 1}]}),
    (Operation.RERANK, {"query": "q" * 500, "documents": TEXTS, "instruction": "i"}),
    (Operation.SCORE, {"text_1": TEXTS, "text_2": TEXTS[::-1]}),
    (Operation.SCORE, {"queries": {"content": [{"type": "text", "text": "q"}]}, "items": TEXTS}),
]


def sequences_of(operation: Operation, body: dict[str, Any], bounds: HttpSettings) -> int:
    if operation.is_scoring:
        return request_size.text_count(score_inputs(operation, body), bounds)
    return request_size.sequence_count(operation, body, bounds)


@pytest.mark.parametrize(("operation", "body"), LISTS)
def test_a_part_has_the_measure_of_its_own_body_and_the_parts_are_the_whole(
    operation: Operation, body: dict[str, Any]
) -> None:
    split = measured(operation, body)
    bounds = HttpSettings()
    for part, found in ((body, split.measure), *split.parts):
        assert found.prompt_bytes == request_size.prompt_bytes(operation, part)
        assert found.sequences == sequences_of(operation, part, bounds)
    for part, found in split.parts:
        assert found == measured(operation, part).measure
    whole = split.measure
    parts = RequestMeasure.total([found for _, found in split.parts])
    assert (whole.answers, whole.slots, whole.cost.output_tokens) == (
        parts.answers,
        parts.slots,
        parts.cost.output_tokens,
    )
    shared = len(split.parts) - 1 if split.shares_query else 0
    assert whole.sequences == parts.sequences - shared, "the query of each further part"


@given(st.lists(st.text(max_size=9), min_size=2, max_size=9), st.integers(1, 3), st.integers(0, 99))
def test_a_list_costs_what_its_prompts_cost_alone(prompts: list[str], n: int, most: int) -> None:
    for costs in (Estimator(0.8), taught(40)):
        alone = [estimated(costs, prompt=prompt, n=n, max_tokens=most) for prompt in prompts]
        found = estimated(costs, prompt=prompts, n=n, max_tokens=most)
        assert found.prompt_tokens == sum(cost.prompt_tokens for cost in alone)
        assert found.output_tokens == sum(cost.output_tokens for cost in alone)
        assert found.max_output_tokens == n * len(prompts) * most


def test_texts_count_as_sequences_and_take_one_replica_at_most() -> None:
    for operation, body, texts in (
        (Operation.EMBEDDING, {"input": ["a"] * 3}, 3),
        (Operation.EMBEDDING, {"input": "a"}, 1),
        (Operation.RERANK, {"query": "a", "documents": ["b"] * 20}, 21),
    ):
        found = measure(operation, body)
        assert (found.sequences, found.slots, found.at_once) == (texts, min(texts, SLOTS), min(texts, SLOTS))
    nothing = measure(Operation.TOKENIZE, {"prompt": "a" * 4000})
    assert (nothing.sequences, nothing.slots, nothing.cost.output_tokens) == (0, 0, 0)


def test_a_measure_has_the_key_of_the_session_or_of_each_prompt_of_a_list() -> None:
    long = ["x" * 8 * BLOCK, "y" * 8 * BLOCK, "z"]
    keys = [found.key for _, found in measured(Operation.COMPLETION, {"prompt": long}).parts]
    assert keys[2] is None, "within one block of the cache"
    assert keys[0] != keys[1]
    assert all(key is not None and key.reason is TargetReason.PREFIX for key in keys[:2])
    of_session = measured(Operation.COMPLETION, {"prompt": long}, session_id="s").parts
    (only,) = {found.key for _, found in of_session}
    assert only is not None
    assert only.reason is TargetReason.SESSION


@pytest.mark.parametrize("prompts", ["one two three", ["one two", "three"]])
def test_the_limits_are_charged_by_the_one_estimate_that_the_queue_reckons_with(
    prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two estimates, a request was charged by one and queued by another, if others had ended between them."""
    made: list[int] = []
    real = Estimator.estimates

    def noted(costs: Estimator, tenant: str, name: str, sizes: list[int], bound: int | None) -> list[RequestCost]:
        made.append(len(sizes))
        more = 1000 * len(made)
        return [one._replace(prompt_tokens=one.prompt_tokens + more) for one in real(costs, tenant, name, sizes, bound)]

    monkeypatch.setattr(Estimator, "estimates", noted)

    async def scenario(cluster: FakeCluster) -> None:
        client: Client = await started(cluster, "r1", limits={"tokens_per_minute": 10**6})
        assert (await client.post(ask(prompts, 5, stream=False))).status == 200
        (receipt,) = client.edge.parts.receipts.kept.values()
        (charge,) = client.limits.charges
        reported = receipt.to_json_fields()
        assert charge.request.tokens == reported["estimated_prompt"] + reported["estimated_output"]
        assert made == [1 if isinstance(prompts, str) else len(prompts)]
        assert client.figures("serve_app_granted_tokens_total", "model") == {(SERVED,): charge.request.tokens}

    run(scenario, model())


def _listed(value: Any) -> list[Any]:
    return value if type(value) is list else [value]


@pytest.mark.parametrize(
    ("path", "body", "task"),
    [
        (COMPLETIONS, ask("a" * 101, 2, stream=False), "generate"),
        (COMPLETIONS, ask(["a" * 101, "b" * 102], 2, stream=False), "generate"),
        ("/v1/embeddings", {"model": SERVED, "input": ["a" * (101 + number) for number in range(40)]}, "embed"),
        ("/v1/rerank", {"model": SERVED, "query": "q" * 99, "documents": ["a" * 101, "b" * 30_000] * 2}, "embed"),
    ],
)
def test_each_text_is_measured_once_on_its_way(
    path: str, body: dict[str, Any], task: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a list were measured for the limits, for the size of the parts, and again in each part."""
    sizes: Counter[int] = Counter()

    def noted(text: str) -> int:
        sizes[len(text)] += 1
        return len(text)

    monkeypatch.setattr(request_size, "text_bytes", noted)

    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1", limits={"tokens_per_minute": 10**6})
        assert (await client.post(body, path=path)).status == 200

    run(scenario, model(slots=8, task=task))
    texts = [text for field in ("prompt", "input", "query", "documents") for text in _listed(body.get(field, []))]
    assert sizes == Counter(map(len, texts))


@pytest.mark.parametrize(("words", "large"), [(3, False), (20_000, True)])
def test_an_engine_is_informed_whether_the_body_is_large(words: int, large: bool) -> None:
    found: list[bool | None] = []

    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        real = cluster["r1"].engine.server.run

        async def noted(submit: Submit, put: Callable[[Frame], None]) -> None:
            found.append(submit.is_large)
            await real(submit, put)

        cluster["r1"].engine.server.run = noted
        await client.post(ask("word " * words, 2, stream=False))

    run(scenario, model())
    assert found == [large]
