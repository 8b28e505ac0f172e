"""vLLM's own tests of its OpenAI server, run against our endpoint: what its server does is the reference for ours.

They come from the source distribution of the pinned version (`sources.py`), never from this repository. `shim.py` is
the `conftest.py` of their pytest and lets their `RemoteOpenAIServer` be our stack; `runner.py` starts that pytest.
`reference.yaml` says which files run, and why a test of them fails here; `verdict.py` compares that with what happened.
"""
