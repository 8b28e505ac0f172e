"""Scaling of engine replicas by signals of the routers, and what an operator sees and changes of what runs.

Decides: nothing of its own: it reads the signals, asks a policy, and makes Serve start replicas where memory is
reserved. `operations` says with the same signals why there are as many replicas; `rollout` carries deployments out.
In: numbers that routers and engines report to Serve. Out: replica counts for Serve's controller.
Never: blocks the controller; a thread calls the quota actor.
"""

__all__ = ["operations", "recorded_decisions", "rollout"]
