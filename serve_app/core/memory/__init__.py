"""GPU memory: one tree of leases, their owners, and what is stored of them.

Decides: which engine gets which bytes on which device, what is reserved before a start, and which leases expire.
In: engine reports, requests for starts and sessions. Out: leases, replies, reservations, defragmentation steps.
Never: grants more than a device has; the leases of a device never exceed its bytes.
"""

from serve_app.core.memory.checkpoint import Checkpoint, CheckpointChanges, CheckpointKey, EntryKind
from serve_app.core.memory.defrag_steps import Relocation
from serve_app.core.memory.drains import Drain, DrainRequest
from serve_app.core.memory.engine_grants import OVERUSE_SHARE, BlockedEngine, EngineGrants
from serve_app.core.memory.leases import Device, DeviceUse, Hold, Lease, LeaseKind, Phase
from serve_app.core.memory.ledger import GROWTH_SHARE, Ledger
from serve_app.core.memory.reports import (
    DrainReport,
    EngineReply,
    EngineReport,
    NodeProcesses,
    Process,
    Rank,
    StartReport,
)
from serve_app.core.memory.reservations import Reservation
from serve_app.core.memory.sessions import (
    SESSIONS_OWNER,
    Session,
    SessionEntry,
    SessionLeases,
    SessionRequest,
    bytes_for_tokens,
    round_up_to_bucket,
    session_name,
    tenant_session_id,
    tokens_in_bytes,
)
from serve_app.core.memory.start_reservations import Start, StartPlanner, StartsReply, StartsRequest

__all__ = [
    "GROWTH_SHARE",
    "OVERUSE_SHARE",
    "SESSIONS_OWNER",
    "BlockedEngine",
    "Checkpoint",
    "CheckpointChanges",
    "CheckpointKey",
    "Device",
    "DeviceUse",
    "Drain",
    "DrainReport",
    "DrainRequest",
    "EngineGrants",
    "EngineReply",
    "EngineReport",
    "EntryKind",
    "Hold",
    "Lease",
    "LeaseKind",
    "Ledger",
    "NodeProcesses",
    "Phase",
    "Process",
    "Rank",
    "Relocation",
    "Reservation",
    "Session",
    "SessionEntry",
    "SessionLeases",
    "SessionRequest",
    "Start",
    "StartPlanner",
    "StartReport",
    "StartsReply",
    "StartsRequest",
    "bytes_for_tokens",
    "round_up_to_bucket",
    "session_name",
    "tenant_session_id",
    "tokens_in_bytes",
]
