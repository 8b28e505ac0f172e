"""What is wrong with a configuration: told before anything is started or changed.

Decides: the findings of a configuration (settings, size, models, vLLM's arguments).
In: a file, what the cluster has, what is known of each model. Out: `Finding`s.
Never: asks Ray or the hub itself; starts or changes anything.
"""

from serve_app.cli.check.access import check_access
from serve_app.cli.check.assumed import AssumedNode, assumed_cluster, assumed_nodes
from serve_app.cli.check.configuration import Reading, check_settings, read
from serve_app.cli.check.files import check_certificate, check_jwks, check_templates
from serve_app.cli.check.findings import Finding
from serve_app.cli.check.fit import Cluster, Node, check_fit
from serve_app.cli.check.models import check_model, kv_bytes_per_token, text_config

__all__ = [
    "AssumedNode",
    "Cluster",
    "Finding",
    "Node",
    "Reading",
    "assumed_cluster",
    "assumed_nodes",
    "check_access",
    "check_certificate",
    "check_fit",
    "check_jwks",
    "check_model",
    "check_settings",
    "check_templates",
    "kv_bytes_per_token",
    "read",
    "text_config",
]
