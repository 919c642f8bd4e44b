"""Dashboards of Quire as they are defined. `python -m deploy.dashboards --write` makes deploy/grafana/dashboards/*.json of them."""
