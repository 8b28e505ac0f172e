"""One queue of a model for all routers: the messages of routers and quota actor, and both ends.

Decides: which router's request is granted at the actor, and which request a router grants on its own credit.
In: events of the router, messages of the other end. Out: messages, grants, refusals.
Never: counts a slot twice: what a router lost comes back by reconciliation, not by guessing.
"""

from serve_app.core.shared_queue.actor_queue import Lines
from serve_app.core.shared_queue.actor_sessions import DEAF_S
from serve_app.core.shared_queue.delivery import BATCH, Exchange, Reply
from serve_app.core.shared_queue.messages import Arrive, Done, Event, Hello, Reach, Rules, SessionOpened
from serve_app.core.shared_queue.router_queue import RemoteLine
from serve_app.core.shared_queue.session_admission import TOO_LARGE

__all__ = [
    "BATCH",
    "DEAF_S",
    "TOO_LARGE",
    "Arrive",
    "Done",
    "Event",
    "Exchange",
    "Hello",
    "Lines",
    "Reach",
    "RemoteLine",
    "Reply",
    "Rules",
    "SessionOpened",
]
