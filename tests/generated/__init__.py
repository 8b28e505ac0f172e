"""The lists of `docs/reference` that are made from the code: `python -m tests.generated` writes them into the pages.

A page holds each list between two comments. `tests/test_docs.py` compares them with the code.
"""
