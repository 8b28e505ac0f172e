"""The metrics of one router: names, types and labels in one table, what is counted, and how it is shown.

Decides: which metrics there are (`table`), and what is counted when.
In: ends of requests, the state of the models, loads of engines, answers of the deployment's parts. Out: families of
samples, and their text.
Never: asks another process; `router.scrape` does.
"""

from serve_app.router.metrics.cluster_figures import ClusterAnswers, cluster_families
from serve_app.router.metrics.counts import RouterMetrics
from serve_app.router.metrics.engine_figures import engine_families
from serve_app.router.metrics.haproxy_figures import haproxy_families
from serve_app.router.metrics.passed_on import passed_on
from serve_app.router.metrics.text_format import END, TextFormat, accepted, rendered

__all__ = [
    "END",
    "ClusterAnswers",
    "RouterMetrics",
    "TextFormat",
    "accepted",
    "cluster_families",
    "engine_families",
    "haproxy_families",
    "passed_on",
    "rendered",
]
