"""What Python's garbage collector looks at in the processes of actors, and how often.

A full collection walks every object that a module, a class or a model's configuration consists of. In an engine replica
with vLLM that took 0.55 s, in which its event loop served nobody. After `freeze_heap` it takes 24 ms.
"""

from __future__ import annotations

import gc

from serve_app.ray_adapter.sigterm import is_actor

# New objects between two collections. Python's default, 700, is the work of some ten requests, and each one walks
# what all running requests consist of: 4% of the CPU of `benchmarks.request_cost`, with 16 requests at once.
YOUNG_OBJECTS = 10_000


def freeze_heap() -> None:
    """Take all that lives now out of later collections, and have fewer of them; call it once what serves is up, and
    before it serves. No effect in a process that is no actor's. What is frozen is still freed when nothing refers to
    it, cycles excepted."""
    if is_actor():
        gc.collect()  # a cycle that is frozen is never freed
        gc.freeze()
        gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
