"""Dashboards for Grafana and rules for Prometheus, made from the table of the metrics (`serve_app.router.metrics`).

    python -m scripts.dashboards            # writes deploy/grafana, deploy/prometheus and deploy/kubernetes/rules.yaml
    python -m scripts.dashboards --check    # exit status 1 and the paths of files that differ

Decides: which questions a dashboard answers, and when an alert fires.
In: the definitions of the metrics. Out: the text of each file by its path.
Never: writes PromQL with a metric's name typed in; `expressions` takes a definition and checks every label.
"""
