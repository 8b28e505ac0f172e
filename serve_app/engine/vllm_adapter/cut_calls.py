"""Tool calls as clients read them, whole or streamed, of an answer that `max_tokens` cut; and their arguments' form.

vLLM parses a whole answer at once: of two calls, the second of which is cut, it finds none. Its parser of streams finds
the first, and what there is of the second. Here a whole answer that was cut is parsed as its stream would have been.

Invariant: of a cut answer, content, calls and finish reason are those of its stream, and the last item of a response is
incomplete if it is. The arguments of a call that a grammar demands are an object, where its schema does not count, too;
those that vLLM has parsed and written again are JSON.
"""

from __future__ import annotations

import importlib
import json
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

from tokenizers.decoders import DecodeStream
from vllm.entrypoints.generate.base.protocol import FunctionCall

from serve_app.engine.token_recorder import LENGTH, CutOff, recorder_of_request
from serve_app.engine.vllm_adapter.private_names import TAG_REGISTRY, TOOL_NAMES, TOOL_PARSER, missing
from serve_app.engine.vllm_adapter.wrapped import wrap

logger = logging.getLogger("ray.serve")

MAX_PIECES = 256  # of an answer; some parsers read all of the text again at each of them
INCOMPLETE = "incomplete"
_INFINITY = re.compile(r'"(?:\\.|[^"\\])*"|(-?)(Infinity)')  # not within a text

Parsed = tuple[str | None, str | None, list[FunctionCall] | None]


def install() -> None:
    """Patch vLLM's front end in this process; once."""
    if lacking := missing(TOOL_NAMES):
        logger.warning(
            "vLLM has changed and lacks %s; a cut answer may miss tool calls that its stream has", ", ".join(lacking)
        )
        return
    parser: Any = importlib.import_module("vllm.parser.abstract_parser").DelegatingParser
    wrap(parser, "parse", _as_streamed)
    tool_parser: Any = importlib.import_module(TOOL_PARSER).ToolParser
    wrap(tool_parser, "get_remaining_unstreamed_args", _none_invented)
    wrap(importlib.import_module(TAG_REGISTRY), "_dump_tool_for_xgrammar", _with_object)


def with_finish_reasons(answer: Any) -> Any:
    """A whole chat completion, whose cut choices end as in a stream: vLLM has `tool_calls` for them."""
    recorder = recorder_of_request.get()
    for choice in getattr(answer, "choices", ()):
        if recorder is not None and choice.index in recorder.cut:
            choice.finish_reason = LENGTH
    return answer


def mark_incomplete(item: Any) -> None:
    """Mark the last item of a response that was cut as incomplete, unless it is a call whose arguments are whole."""
    if not hasattr(item, "status") or (item.type == "function_call" and _is_object(item.arguments)):
        return
    item.status = INCOMPLETE


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except ValueError:
        return False


def _with_object(dump: Callable[[Any], dict[str, Any]], tool: Any) -> dict[str, Any]:
    """vLLM's description of a tool for a grammar: without `strict`, or without a schema, any JSON value would do."""
    found = dump(tool)
    function = found.get("function")
    if isinstance(function, dict) and (function.get("strict") is False or not function.get("parameters")):
        function |= {"strict": True, "parameters": {"type": "object"}}
    return found


def _as_streamed(
    parse: Callable[..., Parsed], parser: Any, model_output: str, request: Any, *given: Any, **named: Any
) -> Parsed:
    """vLLM's parser of a whole answer, for those that were not cut, or have no tools."""
    cut = _cut_off(model_output)
    if cut is None or parser.tool_parser is None or not request.tools or request.tool_choice == "none":
        reasoning, content, calls = parse(parser, model_output, request, *given, **named)
        for call in calls or ():
            call.arguments = _in_json(call.arguments)
        return reasoning, content, calls
    return _joined(parser, cut, request)


def _in_json(arguments: str) -> str:
    """Arguments as vLLM writes them again, in which a number such as `1e999` became `Infinity`, which is no JSON."""
    return _INFINITY.sub(lambda found: f"{found[1]}1e999" if found[2] else found[0], arguments)


def _none_invented(remaining: Callable[[Any], str], parser: Any) -> str:
    """vLLM's end of the last call's arguments, which are `{}` for a call that was cut before them, if its name came in
    the last piece."""
    recorder = recorder_of_request.get()
    calls = parser.prev_tool_call_arr
    if recorder is not None and recorder.cut and calls and "arguments" not in calls[-1]:
        return ""
    return remaining(parser)


def _cut_off(text: str) -> CutOff | None:
    recorder = recorder_of_request.get()
    return None if recorder is None else next((cut for cut in recorder.cut.values() if cut.text == text), None)


def _joined(parser: Any, cut: CutOff, request: Any) -> Parsed:
    """What a client would have joined from the pieces of a stream."""
    reasoning = list[str]()
    content = list[str]()
    calls = dict[int, FunctionCall]()
    pieces = list(_pieces(parser.model_tokenizer, cut, request))
    for number, (text, tokens) in enumerate(pieces, 1):
        delta = parser.parse_delta(text, tokens, request, cut.prompt, finished=number == len(pieces))
        if delta is None:
            continue
        reasoning.append(delta.reasoning or "")
        content.append(delta.content or "")
        for call in delta.tool_calls or ():
            known = calls.setdefault(call.index, FunctionCall(name="", arguments=""))
            known.id = known.id or call.id
            if call.function is not None:
                known.name += call.function.name or ""
                known.arguments += call.function.arguments or ""
    return "".join(reasoning) or None, "".join(content) or None, list(calls.values())


def _pieces(tokenizer: Any, cut: CutOff, request: Any) -> Iterator[tuple[str, list[int]]]:
    """The text in pieces with their tokens; in one, where the tokenizer does not decode in steps."""
    inner = getattr(tokenizer, "backend_tokenizer", None)
    if inner is None:
        yield cut.text, list(cut.tokens)
        return
    stream = DecodeStream(ids=list(cut.prompt), skip_special_tokens=getattr(request, "skip_special_tokens", True))
    step = -(-len(cut.tokens) // MAX_PIECES) or 1
    at = 0
    left = cut.text
    for start in range(0, len(cut.tokens), step):
        tokens = list(cut.tokens[start : start + step])
        text = "".join(stream.step(inner, token) or "" for token in tokens)
        at += len(tokens)
        if at == len(cut.tokens) or not left.startswith(text):  # the rest, as the engine decoded it
            yield left, list(cut.tokens[start:])
            return
        left = left[len(text) :]
        yield text, tokens
