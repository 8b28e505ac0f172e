"""vLLM's models of request bodies, whose validation ends at the first wrong entry of a list or an object, and to which
null asks for nothing (`body_schemas`).

As vLLM makes them, they look at every entry of a list and note each branch of its union that does not fit: 20,000 empty
strings as items of a response are 1.2 million errors, made in the event loop that all tenants share.

Invariant: without these nulls a body is valid, and has the values, as vLLM's own models say; the first error of a wrong
one is theirs.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, TypeAdapter, ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.pooling.base.protocol import reject_removed_pooling_parameters
from vllm.entrypoints.pooling.classify.protocol import ClassificationRequest
from vllm.entrypoints.pooling.embed.protocol import CohereEmbedRequest, EmbeddingRequest
from vllm.entrypoints.pooling.pooling.protocol import PoolingChatRequest, PoolingCompletionRequest
from vllm.entrypoints.pooling.scoring import protocol as scoring
from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest, TokenizeRequest

from serve_app.engine.body_faults import Fault, FaultFinder, late_fault
from serve_app.engine.body_schemas import as_bodies_are_read, validator_of
from serve_app.engine.client_names import with_new_names
from serve_app.types import Operation


class SaltedEmbedRequest(CohereEmbedRequest):
    """Cohere's request with the salt that vLLM reads of every other one, so that tenants share no cached prefix."""

    cache_salt: str | None = None


# Without that of a plug-in, of which no engine here has one.
PoolingRequest = Annotated[
    PoolingCompletionRequest | PoolingChatRequest, BeforeValidator(reject_removed_pooling_parameters)
]
# vLLM's models of a score, by the field that only this form has. Of vLLM's union, an error would name the fields of
# another form.
SCORE_FORMS: dict[str, Any] = {
    "items": scoring.ScoreQueriesItemsRequest,
    "text_2": scoring.ScoreTextRequest,
    "data_2": scoring.ScoreDataRequest,
    "documents": scoring.ScoreQueriesDocumentsRequest,
}
MODELS: dict[str, Any] = {
    Operation.CHAT: ChatCompletionRequest,
    Operation.COMPLETION: CompletionRequest,
    Operation.RESPONSES: ResponsesRequest,
    Operation.INPUT_TOKENS: ResponsesRequest,
    Operation.EMBEDDING: EmbeddingRequest,
    Operation.EMBED: SaltedEmbedRequest,
    Operation.POOLING: PoolingRequest,
    Operation.CLASSIFY: ClassificationRequest,
    Operation.RERANK: scoring.RerankRequest,
    Operation.TOKENIZE: TokenizeRequest,
    Operation.DETOKENIZE: DetokenizeRequest,
}


def _validator(model: Any) -> Any:
    """pydantic's validator of a model, or of a union of models."""
    adapter: TypeAdapter[Any] = TypeAdapter(model)
    return validator_of(adapter.validator, as_bodies_are_read(adapter.core_schema))


_finder = functools.cache(FaultFinder)
# By operation, or by the form of a score. Validators are made once: one that is freed while a validated body still has
# a lazy iterator of it panics in Rust. Finders are made at the start: 0.5 s, for which the first wrong request would
# stop the event loop.
_READERS = {form: (_validator(model), _finder(model)) for form, model in (MODELS | SCORE_FORMS).items()}


def validated(operation: Operation, body: Mapping[str, Any]) -> Any:
    """vLLM's model of a body. Raises pydantic's ValidationError, and what vLLM's own checks raise."""
    return _READERS[_form(operation, body)][0].validate_python(body)


def fault_of(operation: Operation, body: Mapping[str, Any], *, by_kind: bool = False) -> Fault | None:
    """The first fault of a body that was refused, as `FaultFinder` finds it; None: vLLM's models have none. Raises what
    vLLM's own checks raise."""
    if (form := _form(operation, body)) not in _READERS:
        return None
    if operation.has_chat_body and "messages" in body:
        body = {**body, "messages": with_new_names(body["messages"])}
    found = _READERS[form][1].find(body, by_kind=by_kind)
    if found is not None:
        return found
    try:
        return late_fault(validated(operation, copy.deepcopy(dict(body))))
    except ValidationError:
        return None  # of what the finder leaves out


def _form(operation: Operation, body: Mapping[str, Any]) -> str:
    if operation.has_chat_body:
        return Operation.CHAT
    if operation is not Operation.SCORE:
        return operation
    return next((field for field in SCORE_FORMS if body.get(field) is not None), "documents")
