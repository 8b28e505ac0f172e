"""A simulated engine behind the same protocol as the real one, for tests and load studies.

`SimulatedScheduler` decides (pure, the time is an argument); `SimulatedEngine` is the asyncio shell around it.
"""

from serve_app.engine.simulated.engine import SimulatedEngine
from serve_app.engine.simulated.scheduler import Sequence, SimulatedScheduler, State

__all__ = ["Sequence", "SimulatedEngine", "SimulatedScheduler", "State"]
