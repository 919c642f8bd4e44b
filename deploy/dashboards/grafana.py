"""Parts of a dashboard, and their conversion to Grafana's JSON (schema 39, read by Grafana 10.4 and newer)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

SOURCE = {"type": "prometheus", "uid": "prometheus"}
TAG = "quire"
_SCHEMA = 39
_COLUMNS = 24
_STAT_HEIGHT, _GRAPH_HEIGHT = 4, 8
_REFS = "ABCDEFGH"


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL query and the legend of its series: "{{label}}" stands for a label's value."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel. `text`: how to read it. `unit`: Grafana's name of the unit. `kind`: "timeseries", "stat" or "heatmap".

    `width`: of 24 columns. `stacked`: series add up. `most`: upper end of the axis. `red`, `yellow`: values
    from which on it is coloured so (up to which, with `low_is_bad`). `words`: names of stat values.
    `may_be_empty`: no data means that there were no events.
    """

    title: str
    text: str
    unit: str
    queries: tuple[Query, ...]
    kind: str = "timeseries"
    width: int = 8
    stacked: bool = False
    most: float | None = None
    yellow: float | None = None
    red: float | None = None
    low_is_bad: bool = False
    words: tuple[tuple[int, str], ...] = ()
    may_be_empty: bool = False

    @property
    def description(self) -> str:
        """The text, with the meaning of an empty panel if it may be empty."""
        return f"{self.text} No data: there were none." if self.may_be_empty else self.text

    @property
    def height(self) -> int:
        """Rows of Grafana's grid."""
        return _STAT_HEIGHT if self.kind == "stat" else _GRAPH_HEIGHT


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A dashboard. `name`: in its file name and address. `text`: what it shows."""

    name: str
    title: str
    text: str
    panels: tuple[Panel, ...]

    def model(self) -> dict[str, Any]:
        """Grafana's JSON."""
        return {
            "uid": f"quire-{self.name}",
            "title": f"Quire: {self.title}",
            "description": self.text,
            "tags": [TAG],
            "schemaVersion": _SCHEMA,
            "version": 1,
            "editable": False,
            "graphTooltip": 1,
            "refresh": "5s",
            "time": {"from": "now-15m", "to": "now"},
            "timezone": "browser",
            "links": [_link()],
            "templating": {"list": []},
            "annotations": {"list": []},
            "panels": list(self._placed()),
        }

    def _placed(self) -> Iterator[dict[str, Any]]:
        """Panels from left to right; one that does not fit into its row begins the next."""
        x = y = row_height = 0
        for number, panel in enumerate(self.panels, 1):
            if x + panel.width > _COLUMNS:
                x, y, row_height = 0, y + row_height, 0
            place = {"x": x, "y": y, "w": panel.width, "h": panel.height}
            yield _panel(panel, number, place)
            x, row_height = x + panel.width, max(row_height, panel.height)


def _link() -> dict[str, Any]:
    """Link to the other dashboards."""
    return {
        "title": "Quire",
        "type": "dashboards",
        "tags": [TAG],
        "asDropdown": True,
        "keepTime": True,
        "includeVars": False,
    }


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "gridPos": place,
        "targets": [_target(panel, query, ref) for query, ref in zip(panel.queries, _REFS, strict=False)],
        "fieldConfig": {"defaults": _field(panel), "overrides": []},
        "options": _OPTIONS[panel.kind],
    }


def _target(panel: Panel, query: Query, ref: str) -> dict[str, Any]:
    return {
        "refId": ref,
        "datasource": SOURCE,
        "editorMode": "code",
        "expr": query.expr,
        "format": "heatmap" if panel.kind == "heatmap" else "time_series",
        "instant": panel.kind == "stat",
        "range": panel.kind != "stat",
        "exemplar": panel.kind == "timeseries" and "histogram_quantile" in query.expr,
        "legendFormat": "{{le}}" if panel.kind == "heatmap" else query.legend or "__auto",
    }


def _field(panel: Panel) -> dict[str, Any]:
    field: dict[str, Any] = {"unit": panel.unit, "min": 0, "thresholds": _thresholds(panel)}
    if panel.most is not None:
        field["max"] = panel.most
    if panel.words:
        options = {str(value): {"text": text, "index": i} for i, (value, text) in enumerate(panel.words)}
        field["mappings"] = [{"type": "value", "options": options}]
    if panel.kind == "timeseries":
        field["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 40 if panel.stacked else 10,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
            "thresholdsStyle": {"mode": "line" if panel.red is not None else "off"},
        }
    return field


def _thresholds(panel: Panel) -> dict[str, Any]:
    marks = [(value, colour) for value, colour in ((panel.yellow, "yellow"), (panel.red, "red")) if value is not None]
    if panel.low_is_bad:
        steps = [{"value": None, "color": "red"}, *({"value": value, "color": "green"} for value, _ in marks[:1])]
    else:
        steps = [{"value": None, "color": "green"}, *({"value": value, "color": colour} for value, colour in marks)]
    return {"mode": "absolute", "steps": steps}


_OPTIONS: dict[str, dict[str, Any]] = {
    "timeseries": {
        "legend": {"displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull", "max"], "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {
        "colorMode": "value",
        "graphMode": "none",
        "justifyMode": "auto",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "textMode": "auto",
    },
    "heatmap": {
        "calculate": False,
        "cellGap": 1,
        "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64, "exponent": 0.5, "fill": "dark-orange"},
        "yAxis": {"unit": "s"},
        "tooltip": {"mode": "single", "yHistogram": True},
        "legend": {"show": True},
    },
}
