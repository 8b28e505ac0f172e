"""The times by which one process finds out that another has failed, and what has to be shorter or longer than they are.

Which times are here: those that are right only beside a time of another process: how often one reports and how long
the other waits for a report, how long a caller waits and how long the called one needs, when a lease ends and when its
holder stops. Times of one process alone (pauses, grace at an ordered end, windows of figures) stay where they are used,
defaults of settings with the settings.

Invariant: `tests/test_times.py` states every inequality between these times, with its reason; each time is in one.
All are seconds, the shortest of a group first. `python -m tests.times_picture` draws `docs/images/times.svg` from here.
"""

from __future__ import annotations

# Router and quota actor
ROUTER_LOOK_S = 0.2  # between the actor's looks for silent routers: what a dead one held is free within a second
ACTOR_RETRY_S = 0.25  # before a failed call of a head actor is repeated; Ray needs seconds to restart one
ACTOR_TICK_S = 0.5  # between the actor's ticks, which end leases
WATCH_S = 0.5  # of a router's watch call since the router's last message; the next call is the next message
ROUTER_SILENT_S = 0.6  # without a message of a router: the actor looks for its process
ROUTER_HEARTBEAT_S = 1.0  # between a router's messages when there is nothing to report
ACTOR_STALL_S = 1.5  # the actor has not ticked for so long: silence in that time is no evidence
UNRESPONSIVE_S = 2.0  # a router acknowledges nothing; it takes a round trip, and a second on a very busy machine
FENCE_S = 3.5  # after its last answered message a router grants nothing from its credit, and waits for no answer
OWNER_TTL_S = 4.0  # without a message of a router or a running engine: it has left, and its leases end
SESSION_ANSWER_S = 5.0  # for the actor's answer about a session, beyond the wait that the client asked for
MIN_SESSION_TTL_S = 5.0  # of an agent's session
RECOVERY_S = 9.0  # after a restart of the actor: whoever has not reported by then has left
MIN_OPEN_WAIT_S = 12.0  # to open a session, even if its client waits less: Ray restarts the actor, which recovers

# Engine and quota actor
ENGINE_ASK_S = 0.25  # between reports of an engine that waits for memory, or that got no answer
ENGINE_HEARTBEAT_S = 1.0  # between reports of a running engine
NODE_LOOK_S = 1.0  # between the actor's looks at the nodes and at the processes of silent engines
ENGINE_SILENT_S = 2.0  # without a report of an engine: the actor looks for its processes
ENGINE_ANSWER_S = 2.5  # for the actor's answer to a report, which takes milliseconds
LOADING_TTL_S = 9.0  # without a report of an engine that loads, which holds Python's GIL for seconds: it has left

# Quota actor, GCS and nodes
GCS_S = 2.0  # for Ray's GCS to store what an answer of the actor depends on; then the caller gets an error
NODE_LIST_S = 5.0  # for Ray's list of the nodes, which only reads
NODE_ANSWER_S = 5.0  # a node answers in milliseconds; its first answer comes once a process has started there
FIRST_NODES_S = 6.0  # for the first answers of all nodes
DEVICES_S = 50.0  # that a starting engine waits for the sizes of devices
FIRST_LOOK_S = 60.0  # that the actor lets its callers wait for the first devices
NODE_SILENT_S = 120.0  # without an answer a node's watch is replaced; at a load of 80 one needs a minute to start

# Starts of engines: Serve's controller and quota actor
START_ASK_S = 0.2  # between the controller's requests while a start waits for its answer
START_RENEW_S = 1.0  # the same otherwise: reservations are renewed by them
START_FRESH_S = 5.0  # an older answer does not describe the present free memory
START_ANSWER_S = 5.0  # for the actor's answer, which takes milliseconds
START_WAIT_S = 10.0  # of a start for its place; then Ray places it
CONTROLLER_SILENT_S = 10.0  # without a tick of the controller, which are four a second: the application is gone
RESERVATION_TTL_S = 10.0  # a reservation that is not renewed; a new controller starts within this time
RESTART_TTL_S = 30.0  # the same, of an ended engine's next start: Serve checks its replicas, a busy controller late

# Router and engine replica
MAX_RETRY_PAUSE_S = 1.0  # before a failed replica that stays in use gets the same request again
FIRST_EJECTION_S = 1.0  # of a replica that failed; Serve takes as long to notice a dead one
SILENCE_CHECK_S = 1.0  # between looks whether a replica is silent
SILENCE_FLOOR_S = 5.0  # without any first frame; a machine that swaps or compiles stands still as long
CHANNEL_CONNECT_S = 5.0  # within a cluster a connection opens in milliseconds
CHANNEL_ATTACH_S = 10.0  # a local attach takes 2 ms; Serve retries an unreachable replica without end
TICKET_LIFE_S = 10.0  # of a ticket for a connection, which the router opens as soon as it has it
MAX_EJECTION_S = 60.0  # a recovered replica is used again within a minute
FORGET_EJECTIONS_S = 60.0  # without an ejection: the count of ejections falls by one

# Engine, its replica and Serve
ENGINE_LOOK_S = (
    0.5  # between the replica's looks: a dead engine holds memory that others wait for, a frozen one requests
)
LAST_FRAMES_S = 0.5  # for the last frames, or errors, of a replica that ends to reach their routers
RANK_NODES_S = 2.0  # for Ray's answer where an engine's ranks are; without one, the next check asks again
HEALTH_PERIOD_S = 5.0  # between Serve's checks of a replica; three that fail, and it is replaced
HEALTH_TIMEOUT_S = 20.0  # of one check

# Drain
DRAIN_POLL_S = 0.5  # between Serve's looks whether a replica that drains has open calls
IDLE_CLOSE_S = 1.0  # after its last request a channel, which is an open call, closes
MIN_DRAINING_S = 2.0  # an ending router still answers: HAProxy removes it from its list after about a second
MOVE_S = 5.0  # from an engine's deadline to its end: its requests are on their way within milliseconds
OVERDUE_S = 15.0  # after its deadline a router gives up an engine, whose end takes seconds where a machine is busy
ROUTER_DRAIN_S = 3600.0  # the longest stream that a draining router finishes
HARD_STOP_S = 3600  # after which HAProxy cuts the streams of a replaced worker

# HAProxy and machines
PROXY_CHECK_S = 1  # between Serve's checks of its HAProxy; three that fail, and a new one starts
MACHINE_CHECK_S = 3  # between Ray's checks of a machine: its default
MACHINE_ANSWER_S = 5  # for the answer to one
PROBE_INTERVAL_S = 5  # between TCP's probes of a router's connection that are not answered
PROBE_IDLE_S = 10  # of such a connection, before the first probe
MACHINE_CHECKS = 4  # that fail, and the machine is lost; by Ray's defaults after 63 s, longer than a request may wait
PROBES = 3  # without an answer, and the connection is closed
FALLBACK_S = 120.0  # of our HAProxy in place of Serve's dead one; without a new one by then, Serve was shut down

# Requests with an Idempotency-Key, and limits
CLAIM_HEARTBEAT_S = 1.0  # between a router's reports of its runs
CLAIM_CALL_S = 2.0  # for one call; an actor that answers later has died
CLAIM_RECOVERY_S = 5.0  # after a restart of the actor: a router that has not reported its runs has left
PART_WAIT_S = 5.0  # in which another router answers with a part of an answer, or with nothing new
CLAIM_WAIT_S = 10.0  # for an actor that is away or recovers
JOIN_S = 10.0  # for the router of a run, if it does not answer
LIMIT_WAIT_S = 10.0  # of a request with limits, for an actor or a store that is away; then it is refused
RUN_GRACE_S = 30.0  # a run goes on so long without a reader: SDKs repeat after seconds

# Store, files, and rows of batches
USAGE_FLUSH_S = 1.0  # between a router's reports of use: what is lost with its node
USAGE_HEARTBEAT_S = 5.0  # between reports of unchanged requests in flight
ROW_RENEW_S = 8.0  # between renewals of a worker's leases, and for each renewal
USAGE_ANSWER_S = 10.0  # a busy database takes seconds; a later answer changes nothing, since a repeat counts once
STORE_CALL_S = 10.0  # for the store's actor, which answers in milliseconds
DATABASE_SILENT_S = 10  # after this a PostgreSQL that answers no packet counts as lost
ROW_CLAIM_S = 12.0  # for the answer to a claim of rows
USAGE_SILENT_S = 20.0  # without a report of a router with requests in flight: it has left
ROW_LEASE_S = 25.0  # of a worker's rows and batches: a dead worker's go to another
DATABASE_STATEMENT_S = 30  # of PostgreSQL; a year of use of 10,000 keys is summed in seconds
FILES_CALL_S = 30.0  # for the files' actor: a piece takes milliseconds, the sync at the end and a restart seconds
BUCKET_CALL_S = 60.0  # the copy of a large file at the end takes longest
BATCH_CALL_S = 75.0  # of a batch worker to the store or the files; what hangs longer is lost

# Driver and command line
STATUS_PERIOD_S = 5.0  # between the states that `up` writes; one costs the controller some milliseconds of CPU
STATUS_FRESH_S = 12.0  # of such a state; where it is older, Serve is asked
