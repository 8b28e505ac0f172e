"""The pictures of `docs/explanation` that are drawn from the code that decides: `python -m tests.pictures`.

`tests/test_docs.py` compares each file with the code, so a picture is never outdated. Each has a module with `NAME`,
its file in `docs/images`, and `picture()`, its SVG text.
"""
