"""Every private name of vLLM 0.32.0 that continuing a stream needs (`NAMES`: `continuing`, `produced_tokens`), making
log probabilities in slices (`SCORING_NAMES`: `log_probabilities`; `RESPONSE_NAMES`: `response_entries`), or rendering
in turns (`RENDER_NAMES`: `render_turns`), or tool calls (`TOOL_NAMES`: `cut_calls`), or answers to Anthropic's clients
(`MESSAGE_NAMES`: `messages`), or of audio (`SPEECH_NAMES`: `transcriptions`),
or decoding it (`AUDIO_NAMES`: `audio_loader`), or how EngineCore has ended (`END_NAMES`: `engine`), or fetching media
(`MEDIA_NAMES`: `media_connector`).

Decides whether the installed vLLM has them; a test names each one that a release has moved, and so does the log of an
engine that starts with such a release.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_OPENAI = "vllm.entrypoints.openai"
CHAT_SERVING = f"{_OPENAI}.chat_completion.serving"
COMPLETION_SERVING = f"{_OPENAI}.completion.serving"
RESPONSES_SERVING = f"{_OPENAI}.responses.serving"
MESSAGES_SERVING = "vllm.entrypoints.anthropic.serving"
TAG_REGISTRY = "vllm.tool_parsers.structural_tag_registry"
TOOL_PARSER = "vllm.tool_parsers.abstract_tool_parser"


@dataclass(frozen=True, slots=True)
class PrivateName:
    """A name of vLLM: where it is, and the parameters (of a function) or attributes (of a class) that it must have."""

    module: str
    path: str
    parts: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.module}.{self.path}"


CLOCKS = tuple(
    PrivateName(f"{_OPENAI}.{api}.serving", "time") for api in ("chat_completion", "completion", "responses")
)
IDS = (
    PrivateName("vllm.renderers.chat_utils", "random_uuid"),
    *(PrivateName(f"{_OPENAI}.responses.{part}", "random_uuid") for part in ("serving", "streaming_events", "utils")),
)
SIGNATURES = PrivateName(MESSAGES_SERVING, "uuid")  # of thinking
MERGE = PrivateName(f"{_OPENAI}.completion.serving", "merge_async_iterators")
ENGINE_NAMES = (
    PrivateName("vllm.v1.engine.core", "EngineCore"),
    PrivateName("vllm.v1.request", "Request.from_engine_core_request", ("request", "block_hasher")),
    PrivateName("vllm.v1.request", "Request.append_output_token_ids", ("token_ids",)),
    PrivateName("vllm.v1.request", "Request", ("prefill_stats", "output_token_ids", "structured_output_request")),
    PrivateName("vllm.v1.structured_output", "StructuredOutputManager._create_grammar", ("request",)),
    PrivateName(
        "vllm.v1.structured_output",
        "StructuredOutputManager._get_constraint_bounds",
        ("request", "spec_tokens", "spec_tokens_committed"),
    ),
    PrivateName("vllm.v1.structured_output.request", "StructuredOutputRequest", ("reasoning_ended",)),
    PrivateName(
        "vllm.v1.structured_output.backend_types", "StructuredOutputGrammar.accept_tokens", ("request_id", "tokens")
    ),
    PrivateName("vllm.v1.worker.gpu_input_batch", "CachedRequestState.__post_init__"),
    PrivateName(
        "vllm.v1.worker.gpu_input_batch", "CachedRequestState", ("sampling_params", "generator", "output_token_ids")
    ),
)
NAMES = (
    *ENGINE_NAMES,
    *CLOCKS,
    *IDS,
    SIGNATURES,
    MERGE,
    PrivateName("vllm.config", "VllmConfig.use_v2_model_runner"),
    PrivateName("vllm.sampling_params", "SamplingParams", ("extra_args", "prompt_logprobs", "num_logprobs")),
    PrivateName("vllm.v1.core.sched.utils", "check_stop", ("request", "max_model_len")),
    PrivateName("vllm.v1.request", "Request", ("get_finished_reason", "stop_reason")),
    PrivateName("vllm.v1.engine", "EngineCoreRequest", ("request_id", "sampling_params")),
    PrivateName(
        "vllm.v1.engine",
        "EngineCoreOutput",
        ("request_id", "new_token_ids", "new_logprobs", "finish_reason", "stop_reason"),
    ),
    PrivateName("vllm.v1.outputs", "LogprobsLists", ("logprob_token_ids", "logprobs", "sampled_token_ranks")),
    PrivateName("vllm.v1.engine.async_llm", "AsyncLLM", ("output_processor", "engine_core", "model_config")),
    PrivateName("vllm.v1.engine.core_client", "AsyncMPClient.add_request_async", ("request",)),
    PrivateName("vllm.v1.engine.core_client", "AsyncMPClient.call_utility_async", ("method",)),
    PrivateName("vllm.v1.engine.output_processor", "OutputProcessor", ("request_states",)),
    PrivateName("vllm.v1.engine.output_processor", "OutputProcessor.process_outputs", ("engine_core_outputs",)),
    PrivateName("vllm.v1.engine.output_processor", "RequestState", ("is_prefilling", "num_cached_tokens")),
    PrivateName(
        "vllm.v1.engine.output_processor",
        "RequestState",
        ("external_req_id", "prompt_len", "detokenizer", "logprobs_processor"),
    ),
    PrivateName("vllm.v1.engine.logprobs", "LogprobsProcessor", ("num_logprobs", "num_prompt_logprobs")),
    PrivateName("vllm.v1.engine.detokenizer", "IncrementalDetokenizer", ("output_token_ids",)),
    PrivateName("vllm.v1.engine.output_processor", "RequestOutputCollector", ("request_id", "close")),
    PrivateName("vllm.v1.engine.output_processor", "RequestOutputCollector.get"),
    PrivateName("vllm.v1.engine.output_processor", "RequestOutputCollector.get_nowait"),
)

SCORING_NAMES = (
    PrivateName("vllm.v1.engine.logprobs", "convert_ids_list_to_tokens", ("tokenizer", "token_ids")),
    PrivateName("vllm.v1.engine.logprobs", "LogprobsProcessor", ("prompt_logprobs", "num_prompt_logprobs")),
    PrivateName(
        "vllm.v1.engine.logprobs", "LogprobsProcessor._update_prompt_logprobs", ("self", "prompt_logprobs_tensors")
    ),
    PrivateName("vllm.v1.outputs", "LogprobsTensors", ("logprob_token_ids", "logprobs", "selected_token_ranks")),
    PrivateName("vllm.v1.engine.output_processor", "RequestState._new_request_output"),
    PrivateName("vllm.v1.engine.output_processor", "RequestState", ("is_prefilling", "external_req_id")),
    PrivateName(CHAT_SERVING, "OpenAIServingChat._create_chat_logprobs", ("token_ids", "top_logprobs")),
    PrivateName(
        COMPLETION_SERVING,
        "OpenAIServingCompletion._create_completion_logprobs",
        ("token_ids", "top_logprobs", "initial_text_offset"),
    ),
    PrivateName(f"{_OPENAI}.chat_completion.protocol", "ChatCompletionLogProbs", ("content",)),
    PrivateName(f"{_OPENAI}.completion.protocol", "CompletionLogProbs", ("text_offset", "tokens")),
)

RENDER_NAMES = (
    PrivateName("vllm.renderers.base", "BaseRenderer", ("_executor",)),
    PrivateName("vllm.renderers.base", "_SwappableExecutor.submit", ("fn",)),
    PrivateName("vllm.renderers.params", "TokenizeParams", ("truncate_prompt_tokens", "truncation_side")),
    PrivateName("vllm.renderers.params", "TokenizeParams.max_input_tokens"),
    PrivateName("vllm.renderers.params", "TokenizeParams._text_len_check", ("tokenizer", "text")),
    PrivateName("vllm.tokenizers.protocol", "TokenizerLike", ("max_chars_per_token", "truncation_side")),
    PrivateName("vllm.entrypoints.pooling.base.serving", "PoolingBaseServing._preprocessing", ("io_processor", "ctx")),
    PrivateName(
        "vllm.entrypoints.pooling.base.io_processor",
        "PoolingIOProcessor",
        ("get_request_factory_online", "render_async", "renderer"),
    ),
    PrivateName(
        "vllm.entrypoints.pooling.scoring.io_processor",
        "truncate_text_to_tokens",
        ("text", "tokenizer", "max_tokens"),
    ),
)
RESPONSE_NAMES = (
    PrivateName(
        RESPONSES_SERVING, "OpenAIServingResponses._create_response_logprobs", ("token_ids", "logprobs", "top_logprobs")
    ),
)
TOOL_NAMES = (
    PrivateName(
        "vllm.parser.abstract_parser",
        "DelegatingParser.parse",
        ("model_output", "request", "enable_auto_tools", "model_output_token_ids"),
    ),
    PrivateName(
        "vllm.parser.abstract_parser",
        "DelegatingParser.parse_delta",
        ("delta_text", "delta_token_ids", "request", "prompt_token_ids", "finished"),
    ),
    PrivateName("vllm.parser.abstract_parser", "Parser", ("tool_parser",)),
    PrivateName(TOOL_PARSER, "ToolParser.get_remaining_unstreamed_args", ("self",)),
    PrivateName(TAG_REGISTRY, "_dump_tool_for_xgrammar", ("tool",)),
)
MESSAGE_NAMES = (
    PrivateName(
        MESSAGES_SERVING,
        "AnthropicServingMessages",
        ("_merge_inline_system", "_get_disabled_thinking_effort"),
    ),
    PrivateName(MESSAGES_SERVING, "AnthropicServingMessages.messages_full_converter", ("generator",)),
    PrivateName(MESSAGES_SERVING, "AnthropicServingMessages.message_stream_converter", ("generator",)),
)

_AUDIO_BOUNDS = ("path", "sr", "mono", "max_duration_s")
AUDIO_NAMES = (
    PrivateName("vllm.multimodal.media.audio", "load_audio", _AUDIO_BOUNDS),
    PrivateName("vllm.entrypoints.speech_to_text.base.serving", "load_audio", _AUDIO_BOUNDS),
    PrivateName("vllm.multimodal.audio", "resample_audio_pyav", ("audio", "orig_sr", "target_sr")),
)
SPEECH_NAMES = (
    PrivateName(
        "vllm.entrypoints.speech_to_text.base.serving",
        "SpeechToTextBaseServing._get_verbose_segments",
        ("tokens", "log_probs", "request", "segment_class", "start_time"),
    ),
    PrivateName(
        "vllm.entrypoints.speech_to_text.base.serving",
        "SpeechToTextBaseServing",
        ("_decode_and_chunk_speech_async", "asr_config"),
    ),
    PrivateName(
        "vllm.entrypoints.speech_to_text.base.serving",
        "SpeechToTextBaseServing._preprocess_speech_to_text",
        ("request", "audio_data", "request_id"),
    ),
)

MEDIA_NAMES = (
    PrivateName("vllm.connections", "HTTPConnection.get_async_client"),
    PrivateName("vllm.connections", "HTTPConnection.get_sync_client"),
    PrivateName(
        "vllm.connections", "HTTPConnection.get_async_response", ("url", "timeout", "extra_headers", "allow_redirects")
    ),
    PrivateName("vllm.connections", "HTTPConnection.get_bytes", ("url", "timeout", "allow_redirects", "max_bytes")),
    PrivateName("vllm.connections", "HTTPConnection.async_get_bytes", ("url", "timeout", "max_bytes")),
    PrivateName("vllm.multimodal.media.connector", "MediaConnector.__init__", ("connection", "allowed_media_domains")),
)

END_NAMES = (
    PrivateName("vllm.v1.engine.core_client", "MPClient", ("resources",)),
    PrivateName("vllm.v1.engine.core_client", "BackgroundResources", ("engine_manager",)),
    PrivateName("vllm.v1.engine.utils", "CoreEngineProcManager.finished_procs"),
)


def missing(names: Iterable[PrivateName] = NAMES) -> list[str]:
    """The names that the installed vLLM does not have, or not with these parts."""
    lacking = []
    for name in names:
        try:
            found: Any = functools.reduce(getattr, name.path.split("."), importlib.import_module(name.module))
        except (ImportError, AttributeError):
            lacking.append(str(name))
            continue
        lacking += [f"{name}: {part}" for part in name.parts if part not in _parts_of(found)]
    return lacking


def _parts_of(found: Any) -> set[str]:
    if not inspect.isclass(found):
        return set(inspect.signature(found).parameters)
    fields = (
        getattr(found, kind, ()) for kind in ("__struct_fields__", "__dataclass_fields__", "_fields", "model_fields")
    )
    set_in_init = getattr(found.__init__, "__code__", None)
    return {*dir(found), *(name for names in fields for name in names), *getattr(set_in_init, "co_names", ())}
