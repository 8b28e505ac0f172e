"""The Python handle: an application called from the cluster, a driver or a notebook, without HTTP.

Decides: which cluster and application a client reaches, and in which event loop a call runs.
In: calls with OpenAI's fields. Out: objects of the `openai` package, streams, maps, agent sessions, errors.
Never: checks a request; the router does, as over HTTP.
"""

from serve_app.client.agent_session import AgentSession
from serve_app.client.client import Client
from serve_app.client.connection import connect
from serve_app.client.map import MapResult
from serve_app.client.map_progress import MapProgress

__all__ = ["AgentSession", "Client", "MapProgress", "MapResult", "connect"]
