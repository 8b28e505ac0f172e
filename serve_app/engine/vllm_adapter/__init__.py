"""vLLM 0.32.0 behind our engine protocol: the only package that imports vllm (what is private: docs/decisions.md).

It imports nothing by itself: EngineCore unpickles `staged_executor` from here and needs none of the rest.
"""
