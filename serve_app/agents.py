"""Agents under a bound: each task runs with KV cache of its own, no more of them at a time than asked for."""

from serve_app.client import DEFAULT_MAX_WAITING, STEP_WAIT_S, AgentRun, AgentScheduler, AgentState, Sessions, Task

__all__ = ["DEFAULT_MAX_WAITING", "STEP_WAIT_S", "AgentRun", "AgentScheduler", "AgentState", "Sessions", "Task"]
