"""Which node and device a demand gets, and how a fragmented cluster is repaired.

Decides: a placement for a demand, and the cheapest plan of moves that frees enough memory for one.
In: nodes, demands, replicas. Out: placements and plans.
Never: changes a ledger; `core.memory` carries plans out.
"""

from serve_app.core.placement.defrag import Move, PlacedReplica, plan_moves
from serve_app.core.placement.policy import Demand, PlacementPolicy, Workload

__all__ = ["Demand", "Move", "PlacedReplica", "PlacementPolicy", "Workload", "plan_moves"]
