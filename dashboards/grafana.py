"""Grafana's JSON of a dashboard: the part that we use, laid out from left to right."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Json = dict[str, Any]

_COLUMNS = 24
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_HEIGHTS = {"stat": 4, "timeseries": 8, "row": 1}
_SCHEMA = 39  # of Grafana 10.4; newer ones read it


@dataclass(frozen=True)
class Query:
    """A PromQL expression and the legend of its series."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """A number or a curve."""

    title: str
    text: str
    """The description, shown as a tooltip."""
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: Literal["stat", "timeseries"] = "timeseries"
    width: int = 8
    stacked: bool = False


@dataclass(frozen=True)
class Row:
    """A row title."""

    title: str


@dataclass(frozen=True)
class Variable:
    """A variable: a choice of the values of a label."""

    name: str
    label: str
    query: str


@dataclass(frozen=True)
class Dashboard:
    """A dashboard."""

    uid: str
    title: str
    text: str
    variables: tuple[Variable, ...]
    parts: tuple[Panel | Row, ...]

    @property
    def panels(self) -> list[Panel]:
        """Return the panels, without row titles."""
        return [part for part in self.parts if isinstance(part, Panel)]

    def to_json(self) -> Json:
        """Return Grafana's JSON."""
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.text,
            "tags": ["fluxtrain"],
            "schemaVersion": _SCHEMA,
            "version": 1,
            "editable": True,
            "graphTooltip": 1,
            "refresh": "30s",
            "time": {"from": "now-3h", "to": "now"},
            "templating": {"list": [_source(), *map(_variable, self.variables)]},
            "panels": list(_arrange(self.parts)),
        }


def substitute(expr: str, values: Mapping[str, str]) -> str:
    """Return ``expr`` with Grafana's variables, which begin with ``$``, replaced by their values."""
    for name, value in values.items():
        expr = expr.replace(name, value)
    if "$" in expr:
        raise ValueError(f"a variable without a value in {expr}")
    return expr


def stat(title: str, text: str, expr: str, unit: str = "short", width: int = 3) -> Panel:
    """Return a panel with one number."""
    return Panel(title, text, (Query(expr),), unit, "stat", width)


def curve(title: str, text: str, *queries: Query, unit: str = "short", width: int = 8) -> Panel:
    """Return a panel with curves."""
    return Panel(title, text, queries, unit, "timeseries", width)


def stacked(title: str, text: str, *queries: Query, unit: str = "short", width: int = 8) -> Panel:
    """Return a panel with curves that are added up, as areas."""
    return Panel(title, text, queries, unit, "timeseries", width, stacked=True)


def quantiles(metric: str, selector: str, window: str = "$__rate_interval") -> tuple[Query, ...]:
    """Return the median, the 90th and the 99th percentile of a histogram."""
    rate = f"sum by (le) (rate({metric}_bucket{selector}[{window}]))"
    return tuple(
        Query(f"histogram_quantile({share / 100}, {rate})", f"p{share}") for share in (50, 90, 99)
    )


def _arrange(parts: Sequence[Panel | Row]) -> Iterable[Json]:
    """Yield the parts with their positions, in lines of 24 columns."""
    x = y = height = 0
    for number, part in enumerate(parts, start=1):
        width = _COLUMNS if isinstance(part, Row) else part.width
        if x + width > _COLUMNS:
            x, y, height = 0, y + height, 0
        part_height = _HEIGHTS["row" if isinstance(part, Row) else part.kind]
        height = max(height, part_height)
        position = {"x": x, "y": y, "w": width, "h": part_height}
        yield {"id": number, "gridPos": position, **_part(part)}
        x += width


def _part(part: Panel | Row) -> Json:
    if isinstance(part, Row):
        return {"type": "row", "title": part.title, "collapsed": False, "panels": []}
    return {
        "type": part.kind,
        "title": part.title,
        "description": part.text,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": _defaults(part), "overrides": []},
        "options": _OPTIONS[part.kind],
        "targets": [
            {"refId": chr(ord("A") + at), "expr": query.expr, "legendFormat": query.legend}
            for at, query in enumerate(part.queries)
        ],
    }


def _defaults(panel: Panel) -> Json:
    """Return the unit of ``panel``, and how its curves are drawn if they are stacked."""
    custom = {"custom": {"fillOpacity": 40, "stacking": {"mode": "normal"}}}
    return {"unit": panel.unit, **(custom if panel.stacked else {})}


_OPTIONS: dict[str, Json] = {
    "stat": {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "none"},
    "timeseries": {"tooltip": {"mode": "multi"}, "legend": {"displayMode": "list"}},
}


def _source() -> Json:
    return {
        "name": "datasource",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
    }


def _variable(variable: Variable) -> Json:
    return {
        "name": variable.name,
        "label": variable.label,
        "type": "query",
        "datasource": _SOURCE,
        "definition": variable.query,
        "query": {"query": variable.query, "refId": variable.name},
        "refresh": 2,
        "sort": 1,
    }
