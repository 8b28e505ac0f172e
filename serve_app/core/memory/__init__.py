"""GPU memory: one tree of leases, their owners, and what is stored of them.

Decides: which engine gets which bytes on which device, what is reserved before a start, and which leases expire.
In: engine reports, requests for starts and sessions. Out: leases, replies, reservations, defragmentation steps.
Never: grants more than a device has; the leases of a device never exceed its bytes.
"""

from serve_app.core.memory.checkpoint import Changes, EngineEntry, Entry, Key, Roster, RouterEntry, Value
from serve_app.core.memory.defrag_steps import Relocation
from serve_app.core.memory.engine_grants import Alarm, Blocked, Grants
from serve_app.core.memory.leases import (
    DEFAULT_RESERVED_BYTES,
    GROWTH_SHARE,
    Device,
    DeviceUse,
    Hold,
    Kind,
    Lease,
    Phase,
    slots_of,
)
from serve_app.core.memory.ledger import Ledger
from serve_app.core.memory.reports import FENCE_S, LOADING_TTL_S, OWNER_TTL_S, EngineReply, EngineReport, Process, Rank
from serve_app.core.memory.reservations import BERTH_TTL_S, Berth
from serve_app.core.memory.sessions import (
    KEEPER,
    Reserved,
    Session,
    SessionAsk,
    Sessions,
    bucketed,
    bytes_of,
    name_of,
    own_id,
    tokens_in,
)
from serve_app.core.memory.start_reservations import Start, Starts, StartsAsk, StartsReply

__all__ = [
    "BERTH_TTL_S",
    "DEFAULT_RESERVED_BYTES",
    "FENCE_S",
    "GROWTH_SHARE",
    "KEEPER",
    "LOADING_TTL_S",
    "OWNER_TTL_S",
    "Alarm",
    "Berth",
    "Blocked",
    "Changes",
    "Device",
    "DeviceUse",
    "EngineEntry",
    "EngineReply",
    "EngineReport",
    "Entry",
    "Grants",
    "Hold",
    "Key",
    "Kind",
    "Lease",
    "Ledger",
    "Phase",
    "Process",
    "Rank",
    "Relocation",
    "Reserved",
    "Roster",
    "RouterEntry",
    "Session",
    "SessionAsk",
    "Sessions",
    "Start",
    "Starts",
    "StartsAsk",
    "StartsReply",
    "Value",
    "bucketed",
    "bytes_of",
    "name_of",
    "own_id",
    "slots_of",
    "tokens_in",
]
