"""vLLM 0.32.0 behind our engine protocol: only this package imports vllm (its private names: docs/decisions/engine.md).

This file imports nothing: EngineCore unpickles `staged_executor` from this package and needs no other module of it.
"""
