"""vLLM 0.32.0 behind our engine protocol: the only package that imports vllm (private interfaces: docs/decisions.md).

This file imports nothing: EngineCore unpickles `staged_executor` from this package and needs no other module of it.
"""
