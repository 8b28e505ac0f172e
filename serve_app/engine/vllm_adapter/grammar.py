"""The grammars that vLLM's structured outputs compile with xgrammar."""

from __future__ import annotations

from typing import Any, Final

from vllm.config import VllmConfig
from vllm.parser.abstract_parser import structured_outputs_to_format
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.backend_types import StructuredOutputOptions
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend
from vllm.v1.structured_output.request import get_structured_output_key
from vllm.v1.structured_output.utils import choice_as_grammar, grammar_is_likely_lark
from xgrammar import StructuralTag

from serve_app.engine.grammar_queue import Grammar

BACKEND: Final = "xgrammar"  # the only one with the structural tags of strict tools (docs/decisions/engine.md)


def grammar_of(constraint: StructuredOutputsParams) -> Grammar | None:
    """The grammar compiled for a constraint; None: nothing request-specific. Raises ValueError: not a grammar."""
    if constraint.choice is not None:
        return Grammar("ebnf", choice_as_grammar(constraint.choice))
    if constraint.all_constraints_none():
        return None
    kind, text = get_structured_output_key(constraint)
    match kind:
        case StructuredOutputOptions.JSON_OBJECT:
            return None
        case StructuredOutputOptions.JSON:
            return Grammar("json", text)
        case StructuredOutputOptions.REGEX:
            return Grammar("regex", text)
        case StructuredOutputOptions.GRAMMAR:
            return Grammar("lark" if grammar_is_likely_lark(text) else "ebnf", text)
    form = structured_outputs_to_format(constraint)
    return Grammar("tag", StructuralTag(format=form).model_dump_json())


def tokenizer_description(config: VllmConfig, tokenizer: Any) -> str:
    """xgrammar's description of the tokenizer, as vLLM's backend makes it."""
    backend = XgrammarBackend(config, tokenizer=tokenizer, vocab_size=config.model_config.get_vocab_size())
    description: str = backend.compiler.compile_regex("a").tokenizer_info.serialize_json()
    return description
