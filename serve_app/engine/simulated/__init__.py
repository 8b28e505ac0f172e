"""A simulated engine behind the same protocol as the real one, for tests and load studies.

`SimulatedScheduler` decides (pure; the time is an argument); `SimulatedEngine` is its asyncio shell.
"""

from serve_app.engine.simulated.engine import SimulatedEngine
from serve_app.engine.simulated.scheduler import Sequence, SequenceState, SimulatedScheduler

__all__ = ["Sequence", "SequenceState", "SimulatedEngine", "SimulatedScheduler"]
