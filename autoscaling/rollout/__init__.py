"""Deployments to a running application: declared, followed, undone, recorded.

Decides: which replicas a deployment waits for, when it has failed, what a key may change by HTTP, who deploys now.
In: an application's entry or a configuration that was sent. Out: its progress, entries of the audit record.
Never: starts Ray or an instance.
"""

from autoscaling.rollout.audit import AuditWriter
from autoscaling.rollout.declaration import declaration, declare
from autoscaling.rollout.deployer import Deployer, DeployOrder, plan_remote
from autoscaling.rollout.deployment import Order, begin_exclusively, carry_out, exclusive

__all__ = [
    "AuditWriter",
    "DeployOrder",
    "Deployer",
    "Order",
    "begin_exclusively",
    "carry_out",
    "declaration",
    "declare",
    "exclusive",
    "plan_remote",
]
