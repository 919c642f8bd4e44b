"""Definitions of Quire's dashboards. `python -m deploy.dashboards --write` generates deploy/grafana/dashboards/*.json."""
