"""A dashboard of panels as Grafana's JSON: only what we use of it, laid out from left to right."""

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
    """A sentence for whoever hovers over it."""
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: Literal["stat", "timeseries"] = "timeseries"
    width: int = 8


@dataclass(frozen=True)
class Row:
    """A headline."""

    title: str


@dataclass(frozen=True)
class Variable:
    """A choice at the top, of the values of a label."""

    name: str
    label: str
    query: str


@dataclass(frozen=True)
class Dashboard:
    """A page."""

    uid: str
    title: str
    text: str
    variables: tuple[Variable, ...]
    parts: tuple[Panel | Row, ...]

    @property
    def panels(self) -> list[Panel]:
        """Return the panels, without the headlines."""
        return [part for part in self.parts if isinstance(part, Panel)]

    def to_json(self) -> Json:
        """Return what Grafana loads."""
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
            "templating": {"list": [_source(), *map(_choice, self.variables)]},
            "panels": list(_placed(self.parts)),
        }


def filled(expr: str, values: Mapping[str, str]) -> str:
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


def quantiles(metric: str, selector: str, window: str = "$__rate_interval") -> tuple[Query, ...]:
    """Return the median, the 90th and the 99th percentile of a histogram."""
    rate = f"sum by (le) (rate({metric}_bucket{selector}[{window}]))"
    return tuple(
        Query(f"histogram_quantile({share / 100}, {rate})", f"p{share}") for share in (50, 90, 99)
    )


def _placed(parts: Sequence[Panel | Row]) -> Iterable[Json]:
    """Yield the parts with their places: in lines of 24 columns, each as high as its first panel."""
    x = y = height = 0
    for number, part in enumerate(parts, start=1):
        width = _COLUMNS if isinstance(part, Row) else part.width
        if x + width > _COLUMNS:
            x, y, height = 0, y + height, 0
        tall = _HEIGHTS["row" if isinstance(part, Row) else part.kind]
        height = max(height, tall)
        place = {"x": x, "y": y, "w": width, "h": tall}
        yield {"id": number, "gridPos": place, **_part(part)}
        x += width


def _part(part: Panel | Row) -> Json:
    if isinstance(part, Row):
        return {"type": "row", "title": part.title, "collapsed": False, "panels": []}
    return {
        "type": part.kind,
        "title": part.title,
        "description": part.text,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": {"unit": part.unit}, "overrides": []},
        "options": _OPTIONS[part.kind],
        "targets": [
            {"refId": chr(ord("A") + at), "expr": query.expr, "legendFormat": query.legend}
            for at, query in enumerate(part.queries)
        ],
    }


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


def _choice(variable: Variable) -> Json:
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
