"""Draws a dashboard as a PNG from the data of a Prometheus, like Grafana."""

from __future__ import annotations

import json
import math
import re
import urllib.parse
import urllib.request
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, Formatter, PercentFormatter, StrMethodFormatter

from dashboards.grafana import Dashboard, Panel, Query, substitute

matplotlib.use("Agg")  # needs no display

_COLUMNS, _SIZE = 3, (4.0, 2.3)
_TITLE_INCHES = 0.4
_UNITS = {"s": "s", "bytes": "B", "flops": "FLOP/s"}
_GAP_STEPS = 1.5
_TIMEOUT_SECONDS = 20.0


@dataclass(frozen=True)
class Span:
    """Unix times of start and end, and the seconds between two points."""

    start: float
    end: float
    step: float


@dataclass(frozen=True)
class Curve:
    """One series: its labels, seconds since the span's start, and finite values."""

    labels: dict[str, str]
    times: list[float]
    values: list[float]


def curves(prometheus: str, expr: str, span: Span) -> list[Curve]:
    """Return the series of ``expr`` with finite values, from the Prometheus at the URL ``prometheus``."""
    parameters = {"query": expr, "start": span.start, "end": span.end, "step": span.step}
    url = f"{prometheus}/api/v1/query_range?{urllib.parse.urlencode(parameters)}"
    with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as response:
        result = json.load(response)["data"]["result"]
    all_curves = (_curve(series, span.start) for series in result)
    return [curve for curve in all_curves if curve.values]


def draw(
    dashboard: Dashboard,
    prometheus: str,
    values: Mapping[str, str],
    span: Span,
    path: Path,
    titles: Collection[str] = (),
) -> list[str]:
    """Write the panels that have data, or of these ``titles``, to ``path``; return the titles without data.

    ``values`` are those of Grafana's variables, by name with ``$``.
    """
    data = {panel.title: _query(panel, prometheus, values, span) for panel in dashboard.panels}
    shown = [
        panel
        for panel in dashboard.panels
        if panel.kind == "timeseries" and any(data[panel.title].values())
        if not titles or panel.title in titles
    ]
    rows = math.ceil(len(shown) / _COLUMNS)
    size = (_SIZE[0] * _COLUMNS, _SIZE[1] * rows + _TITLE_INCHES)
    figure, grid = pyplot.subplots(rows, _COLUMNS, figsize=size, squeeze=False, sharex=True)
    for axes, panel in zip(grid.flat, shown, strict=False):
        _plot(axes, panel, data[panel.title], span.step)
    for axes in grid.flat[len(shown) :]:
        axes.axis("off")
    for axes in grid[-1]:
        axes.set_xlabel("seconds", fontsize=9)
    title, top = f"{dashboard.title}   {last_values(dashboard, data)}", _TITLE_INCHES / size[1]
    figure.suptitle(title, fontsize=9, y=1.0 - top / 3, verticalalignment="top")
    figure.tight_layout(pad=0.6, rect=(0.0, 0.0, 1.0, 1.0 - top / 3))
    figure.savefig(path, format="png", dpi=100, pil_kwargs={"optimize": True})
    pyplot.close(figure)
    return [p.title for p in dashboard.panels if not any(data[p.title].values())]


def _curve(series: Mapping[str, Any], start: float) -> Curve:
    points = [(float(time) - start, float(value)) for time, value in series["values"]]
    finite = [(time, value) for time, value in points if math.isfinite(value)]
    return Curve(series["metric"], [time for time, _ in finite], [value for _, value in finite])


def _query(
    panel: Panel, prometheus: str, values: Mapping[str, str], span: Span
) -> dict[Query, list[Curve]]:
    return {q: curves(prometheus, substitute(q.expr, values), span) for q in panel.queries}


def _plot(axes: Axes, panel: Panel, data: Mapping[Query, list[Curve]], step: float) -> None:
    for query, drawn in data.items():
        for curve in drawn:
            points = _with_gaps(curve, step)
            axes.plot(*points, linewidth=1.3, marker=".", markersize=3, label=_legend(query, curve))
    axes.set_title(panel.title, fontsize=11, loc="left")
    axes.tick_params(labelsize=9)
    axes.grid(alpha=0.3)
    if (formatter := _formatter(panel)) is not None:
        axes.yaxis.set_major_formatter(formatter)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=8, frameon=False, ncols=2)


def _formatter(panel: Panel, decimals: int | None = None) -> Formatter | None:
    """Return the formatter of the panel's unit, None if it has none."""
    if panel.unit == "percentunit":
        if decimals is None:
            return PercentFormatter(1.0)
        return StrMethodFormatter(f"{{x:.{decimals}%}}")  # PercentFormatter needs an axis
    unit = _UNITS.get(panel.unit)
    return None if unit is None else EngFormatter(unit, decimals)


def _with_gaps(curve: Curve, step: float) -> tuple[list[float], list[float]]:
    """Return times and values with NaN where points are missing, as Grafana draws gaps."""
    times, values = list[float](), list[float]()
    for time, value in zip(curve.times, curve.values, strict=True):
        if times and time - times[-1] > _GAP_STEPS * step:
            times.append(time)
            values.append(math.nan)
        times.append(time)
        values.append(value)
    return times, values


def _legend(query: Query, curve: Curve) -> str:
    return re.sub(r"{{(\w+)}}", lambda match: curve.labels.get(match[1], ""), query.legend)


def last_values(dashboard: Dashboard, data: Mapping[str, Mapping[Query, list[Curve]]]) -> str:
    """Return the last values of the stat panels."""
    texts = []
    for panel in dashboard.panels:
        drawn = [curve for each in data[panel.title].values() for curve in each]
        if panel.kind == "stat" and drawn:
            formatter = _formatter(panel, decimals=1) or "{:.4g}".format
            texts.append(f"{panel.title} {formatter(drawn[0].values[-1])}")
    return " · ".join(texts)
