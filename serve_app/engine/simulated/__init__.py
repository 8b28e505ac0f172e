"""A simulated engine behind the same protocol as the real one, for tests and load studies.

`scheduler.SimulatedScheduler` decides (pure; the time is an argument); `SimulatedEngine` is its asyncio shell.
"""

from serve_app.engine.simulated.engine import SimulatedEngine

__all__ = ["SimulatedEngine"]
