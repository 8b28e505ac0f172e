"""One queue per model for all routers: the messages between routers and the quota actor, and both ends.

Decides: which router's request is granted at the actor, and which request a router grants on its own credit.
In: events of the router, messages of the other end. Out: messages, grants, refusals.
Never: counts a slot twice: lost state is restored by reconciliation, not by guessing.
"""

from serve_app.core.shared_queue import messages
from serve_app.core.shared_queue.actor_queue import ActorQueue
from serve_app.core.shared_queue.class_counts import ClassCounts
from serve_app.core.shared_queue.delivery import BATCH
from serve_app.core.shared_queue.messages import ActorReply, RouterMessage
from serve_app.core.shared_queue.router_queue import RouterQueue
from serve_app.core.shared_queue.scope import lost
from serve_app.core.shared_queue.session_admission import SESSION_TOO_LARGE

__all__ = [
    "BATCH",
    "SESSION_TOO_LARGE",
    "ActorQueue",
    "ActorReply",
    "ClassCounts",
    "RouterMessage",
    "RouterQueue",
    "lost",
    "messages",
]
