"""Checks within seconds whether a Ray cluster is reachable and accepts the token.

Ray itself tries for minutes and then reports neither.
"""

from __future__ import annotations

from collections.abc import Mapping

import grpc

from serve_app.errors import Unavailable

REACH_S = 15.0  # the GCS answers within milliseconds, on an overloaded machine within seconds
ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"  # of Ray's GCS; an empty request names no node
NO_PROXY = (("grpc.enable_http_proxy", 0),)  # as in Ray's own calls
ASKS_TOKEN = (
    "the cluster asks for its token, and this one is missing or another's; set RAY_AUTH_MODE=token and "
    "RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH)"
)
NO_ANSWER = "no Ray cluster answers there"
NOT_A_GCS = "what answers there is no Ray cluster"
REASONS = {
    grpc.StatusCode.UNAUTHENTICATED: ASKS_TOKEN,
    grpc.StatusCode.UNAVAILABLE: NO_ANSWER,
    grpc.StatusCode.DEADLINE_EXCEEDED: NO_ANSWER,
    grpc.StatusCode.UNIMPLEMENTED: NOT_A_GCS,
    grpc.StatusCode.UNKNOWN: NOT_A_GCS,
    grpc.StatusCode.INTERNAL: NOT_A_GCS,
}  # of a failed call; after any other failure Ray itself connects and reports


def require_cluster(address: str, headers: Mapping[str, str]) -> None:
    """Check that the GCS at host:port answers. `headers`: they authenticate a call; empty without authentication.

    Raises:
        Unavailable: no answer, the answer is not a GCS's, or the GCS refuses the token.
    """
    metadata = tuple((name.lower(), value) for name, value in headers.items())
    with grpc.insecure_channel(address, options=NO_PROXY) as channel:
        try:
            channel.unary_unary(ALIVE)(b"", timeout=REACH_S, metadata=metadata)
        except grpc.RpcError as error:
            if error.code() in REASONS:
                raise Unavailable(f"{address}: {REASONS[error.code()]}", code="cluster_failed") from None
