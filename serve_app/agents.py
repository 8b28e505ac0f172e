"""Runs agent tasks with bounded concurrency, each with its own KV cache session."""

from serve_app.client import DEFAULT_MAX_WAITING, STEP_WAIT_S, AgentRun, AgentScheduler, AgentState, Sessions, Task

__all__ = ["DEFAULT_MAX_WAITING", "STEP_WAIT_S", "AgentRun", "AgentScheduler", "AgentState", "Sessions", "Task"]
