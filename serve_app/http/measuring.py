"""Completes the measure of a request by what its tenant and its model add to it: cost, slots, and what it is routed by.

Invariant: a request is estimated once, when it arrives; the cost of a list of prompts is that of its parts together. An
estimate never exceeds the request's own bound, and equals it until similar requests were observed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serve_app.core import audio
from serve_app.core.anthropic import chat_body
from serve_app.core.body_bounds import BYTES_PER_TOKEN
from serve_app.core.estimate import EstimateSource, Estimator, LengthRule, RequestCost
from serve_app.core.receipts import NO_COST, RequestMeasure
from serve_app.core.routing import AffinityKey, TargetReason
from serve_app.http.audio_form import audio_s
from serve_app.http.request_size import output_bound, prefix_key
from serve_app.http.split_body import SplitBody
from serve_app.settings import ModelSettings
from serve_app.transport import EngineInfo
from serve_app.types import Operation


def with_costs(
    split: SplitBody,
    tenant: str,
    session_id: str | None,
    estimator: Estimator,
    settings: ModelSettings,
    limits: EngineInfo,
) -> SplitBody:
    """The request and its parts, with complete measures.

    Args:
        settings: of the model; `limits`: of its engines.
    """
    operation = split.operation
    if operation.hears:
        return _with_seconds(split, audio_s(split.body, settings), limits.slots)
    costs = _costs(split, tenant, estimator, settings.name, limits.max_model_len)
    parts = list[tuple[dict[str, Any], RequestMeasure]]()
    for (body, measure), cost in zip(split.parts, costs, strict=True):
        slots = slots_of(operation, measure.sequences, cost, settings.length_rule, limits.slots)
        key = routing_key(operation, body, tenant, session_id, cost.prompt_tokens, limits.kv_block_tokens)
        parts.append((body, measure._replace(cost=cost, slots=slots, key=key)))
    whole = parts[0][1]
    if len(parts) > 1:
        total = RequestMeasure.total([measure for _, measure in parts])
        cost = _tokens_read(split.measure) if operation.is_pooling else total.cost  # what parts share counts once
        whole = split.measure._replace(cost=cost, slots=total.slots)
    return split._replace(measure=whole, parts=tuple(parts))


def _with_seconds(split: SplitBody, seconds: float, max_slots: int) -> SplitBody:
    """A transcription, measured by the length of its audio, each chunk of which is a sequence; vLLM runs those of
    a stream one by one. `max_slots`: as `slots_of`."""
    sequences = audio.chunks_of(seconds)
    bound = output_bound(split.body)
    text = audio.text_tokens(seconds) if bound is None else min(bound * sequences, audio.text_tokens(seconds))
    most = None if bound is None else bound * sequences
    cost = RequestCost(audio.prompt_tokens(seconds), text, EstimateSource.PRIOR, most)
    at_once = 1 if split.body.get("stream") else sequences
    slots = slots_of(split.operation, at_once, cost, None, max_slots)
    measure = split.measure._replace(sequences=sequences, cost=cost, slots=slots)
    return split._replace(measure=measure, parts=((split.body, measure),))


def _costs(split: SplitBody, tenant: str, estimator: Estimator, model: str, longest: int) -> list[RequestCost]:
    """The estimated cost of each part: of a prompt, or of texts. `longest`: tokens of the model's longest sequence."""
    measures = [measure for _, measure in split.parts]
    if not split.operation.generates:
        return [_tokens_read(one) if split.operation.is_pooling else NO_COST for one in measures]
    bound = output_bound(split.body)
    if bound is not None:
        bound = min(bound, longest)  # else a bound of a billion would take the whole pool of KV tokens
    costs = list[RequestCost]()
    sizes = [measure.prompt_bytes for measure in measures]
    for measure, found in zip(measures, estimator.estimates(tenant, model, sizes, bound), strict=True):
        # Without observed requests the client's own bound is the better guess: an excess is returned soon, a shortage
        # costs other requests their blocks.
        each = bound if found.source is EstimateSource.PRIOR and bound is not None else found.output_tokens
        most = None if bound is None else measure.answers * bound
        prompt = min(found.prompt_tokens, longest)
        costs.append(RequestCost(prompt, measure.answers * each, found.source, most))
    return costs


def _tokens_read(measure: RequestMeasure) -> RequestCost:
    """The cost of texts that nothing is generated from."""
    return RequestCost(-(-measure.prompt_bytes // BYTES_PER_TOKEN), 0, EstimateSource.PRIOR, 0)


def slots_of(
    operation: Operation, sequences: int, cost: RequestCost, length_rule: LengthRule | None, max_slots: int
) -> int:
    """The slots that a request takes of a replica's batch.

    Args:
        length_rule: slots of long sequences; not for pooling: an embedding is one step, bounded by its tokens.
        max_slots: the slots of the largest replica.
    """
    if operation.is_pooling or operation.hears:
        return min(sequences, max_slots)  # inputs end one by one: a call with many takes one whole replica at most
    if length_rule is None or not sequences:
        return sequences
    return length_rule.slots(sequences, cost.prompt_tokens + cost.output_tokens / sequences, max_slots)


def routing_key(
    operation: Operation, body: Mapping[str, Any], tenant: str, session_id: str | None, prompt: int, block: int
) -> AffinityKey | None:
    """The routing key that requests share: the session's, else the prefix's, always within one tenant.

    Args:
        prompt: tokens of the prompt.
        block: tokens of a KV cache block. A prompt within one block is never reused: only whole blocks are cached,
            and the last token is always computed.
    """
    if session_id is not None:
        return AffinityKey(session_key(tenant, session_id), TargetReason.SESSION)
    prefix = prefix_key(operation, body) if prompt > block else ""
    return AffinityKey(_prefix_text(tenant, prefix), TargetReason.PREFIX) if prefix else None


def name_key(
    operation: Operation, sent: Mapping[str, Any], tenant: str, session_id: str | None, request_id: str
) -> str:
    """What a name's target is chosen by: the session, else the prefix, always within one tenant; else the request.

    Args:
        sent: the body as the client sent it. Raises BadRequest: it is no Messages request.
    """
    if session_id is not None:
        return session_key(tenant, session_id)
    prefix = prefix_key(operation, chat_body(operation, sent) if operation.is_anthropic else sent)
    return _prefix_text(tenant, prefix) if prefix else request_id


def session_key(tenant: str, session_id: str) -> str:
    return f"{tenant}\0session\0{session_id}"


def _prefix_text(tenant: str, prefix: str) -> str:
    return f"{tenant}\0prefix\0{prefix}"
