"""A page for people: curves in SVG, samples, figures; its style and script are files beside this one.

It asks nothing of another host, and without its script it still shows everything.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from fluxtrain import __version__
from fluxtrain.report.records import Point, Record, smoothed

_MOST_POINTS = 1200
_MEASURES = ("train_loss", "learning_rate", "grad_norm", "samples_per_second")


class History:
    """What a run has logged: at most 1,200 points of each measure, each the mean of equally many beyond."""

    def __init__(self) -> None:
        self._means, self._width = list[_Mean](), 1
        self._evaluations = list[Point]()
        self.not_finite, self.first_not_finite = 0, 0

    def add(self, record: Record) -> None:
        """Add a record of metrics.jsonl; a repeated step replaces what followed it."""
        step = float(record["step"])
        if "train_loss" in record:
            values = [_number(record.get(name)) for name in _MEASURES]
            if not math.isfinite(values[0]):
                self.not_finite += 1
                self.first_not_finite = self.first_not_finite or int(step)
            self._add((step, *values))
        if math.isfinite(loss := _number(record.get("eval_loss"))):
            self._evaluations = [(at, each) for at, each in self._evaluations if at < step]
            self._evaluations.append((step, loss))
            if len(self._evaluations) > _MOST_POINTS:
                self._evaluations = self._evaluations[:-1:2] + self._evaluations[-1:]

    def _add(self, row: tuple[float, ...]) -> None:
        means = self._means
        while means and means[-1].last >= row[0]:
            means.pop()
        if not means or means[-1].rows >= self._width:
            means.append(_Mean(len(row)))
        means[-1].add(row)
        if len(means) > _MOST_POINTS:
            self._width *= 2
            for left, right in zip(means[::2], means[1::2], strict=False):
                left.merge(right)
            del means[1::2]

    def of(self, name: str) -> list[Point]:
        """Return the finite values at the steps of a measure: one of a logged step, or eval_loss."""
        if name == "eval_loss":
            return self._evaluations
        index = 1 + _MEASURES.index(name)
        found = [(mean.of(0), mean.of(index)) for mean in self._means]
        found[-1:] = [(mean.last, mean.of(index)) for mean in self._means[-1:]]
        return [(step, value) for step, value in found if math.isfinite(value)]

    def charts(self, target: float | None) -> list[Chart]:
        """Return the charts of one run; those without a point are left out."""
        loss, rate = self.of("train_loss"), self.of("samples_per_second")
        series = [
            Series("each logged step", "raw", loss),
            Series("smoothed", "smooth", smoothed(loss)),
            Series("validation", "evaluation", self.of("eval_loss")),
        ]
        norm = self.of("grad_norm")
        norms = [
            Series("each logged step", "raw", norm),
            Series("smoothed", "smooth", smoothed(norm)),
        ]
        found = [
            Chart("Loss", series, is_log=True, target=target),
            Chart("Learning rate", [Series("", "smooth", self.of("learning_rate"))]),
            Chart("Gradient norm", norms, is_log=True),
            Chart("Throughput, samples/s", [Series("", "smooth", rate)]),
        ]
        return [chart for chart in found if chart.shown()]


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


class _Mean:
    """The means of rows of numbers; those that are not finite are left out."""

    def __init__(self, columns: int) -> None:
        self.rows, self.last = 0, -math.inf
        self._sums, self._counts = [0.0] * columns, [0] * columns

    def add(self, row: tuple[float, ...]) -> None:
        self.rows, self.last = self.rows + 1, row[0]
        for index, value in enumerate(row):
            if math.isfinite(value):
                self._sums[index] += value
                self._counts[index] += 1

    def merge(self, other: _Mean) -> None:
        self.rows, self.last = self.rows + other.rows, other.last
        self._sums = [a + b for a, b in zip(self._sums, other._sums, strict=True)]
        self._counts = [a + b for a, b in zip(self._counts, other._counts, strict=True)]

    def of(self, index: int) -> float:
        return self._sums[index] / self._counts[index] if self._counts[index] else math.nan


@dataclass(frozen=True)
class Series:
    """A line of a chart: steps and values."""

    name: str
    kind: str
    """The class of its style."""
    points: Sequence[Point]

    def data(self) -> list[object]:
        """Return it for the script of the page."""
        steps, values = zip(*self.points, strict=True)
        return [self.name, self.kind, [*map(round, steps)], [*map(_short, values)]]


_COLOURS = 6


def side_by_side(runs: Mapping[str, History]) -> list[Chart]:
    """Return charts that have a line for each run."""
    titles = {
        "train_loss": ("Loss, smoothed", True),
        "eval_loss": ("Validation loss", True),
        "learning_rate": ("Learning rate", False),
        "grad_norm": ("Gradient norm, smoothed", True),
        "samples_per_second": ("Throughput, samples/s", False),
    }
    found = list[Chart]()
    for measure, (title, is_log) in titles.items():
        even = smoothed if "smoothed" in title else list
        series = [
            Series(name, f"run{index % _COLOURS}", even(history.of(measure)))
            for index, (name, history) in enumerate(runs.items())
        ]
        found.append(Chart(title, series, is_log))
    return [chart for chart in found if chart.shown()]


@dataclass(frozen=True)
class Chart:
    """Lines over steps. The drawing is stretched to any width; its words are HTML, so that they are not."""

    title: str
    series: Sequence[Series]
    is_log: bool = False
    target: float | None = None

    def shown(self) -> list[Series]:
        """Return the lines that have a point; a logarithmic scale has none at or below 0."""
        lowest = 0.0 if self.is_log else -math.inf
        kept = [
            Series(each.name, each.kind, [point for point in each.points if point[1] > lowest])
            for each in self.series
        ]
        return [each for each in kept if each.points]

    @property
    def last(self) -> float:
        """Return the last step with a point."""
        return max(step for each in self.shown() for step, _ in each.points)

    def html(self, last: float) -> str:
        """Return the chart, up to the step ``last``."""
        series = self.shown()
        values = [value for each in series for _, value in each.points]
        values += [self.target] if self.target else []
        scale = _Scale(last, min(values), max(values), self.is_log)
        lines = "".join(
            f'<line class="grid" x1="0" x2="1000" y1="{y}" y2="{y}"/>' for y in scale.rows
        )
        if self.target:
            y = scale.y(self.target)
            lines += f'<line class="target" x1="0" x2="1000" y1="{y}" y2="{y}"/>'
        lines += "".join(_line(each, scale) for each in series)
        names = [(each.kind, each.name) for each in series if each.name]
        names += [("target", "target")] if self.target else []
        items = "".join(f'<li class="{kind}">{escape(name)}</li>' for kind, name in names)
        data = [each.data() for each in series]
        title = escape(self.title)
        return (
            f'<figure class="chart" data-last="{last:g}" data-series="{escape(json.dumps(data))}">'
            f"<figcaption>{title}<output></output></figcaption>"
            f'<div class="plot" tabindex="0" role="group" aria-label="{title} over steps">'
            f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" aria-hidden="true">{lines}</svg>'
            f'{"".join(scale.labels())}<i class="cursor" hidden></i></div>'
            f'<ul class="legend">{items}</ul></figure>'
        )


class _Scale:
    """Places steps and values on a drawing of 1000 by 1000."""

    def __init__(self, last: float, low: float, high: float, is_log: bool) -> None:
        self._last, self._is_log = max(last, 1.0), is_log
        if is_log:
            self._low, self._high = math.log10(low) - 0.02, math.log10(high) + 0.02
            ticks = _log_ticks(10**self._low, 10**self._high)
        else:
            self._low, self._high = min(low, 0.0), high * 1.05 if high > 0 else 1.0
            ticks = _ticks(self._high)
        self._ticks = {self.y(tick): _text(tick) for tick in ticks}
        self.rows = list(self._ticks)

    def x(self, step: float) -> float:
        return round(step / self._last * 1000, 1)

    def y(self, value: float) -> float:
        at = math.log10(value) if self._is_log else value
        return round(1000 - (at - self._low) / (self._high - self._low) * 1000, 1)

    def labels(self) -> Iterable[str]:
        """Yield the numbers of both axes: about five of each."""
        for y, text in self._ticks.items():
            yield f'<span class="y" style="top:{y / 10:g}%">{text}</span>'
        for index, step in enumerate(reversed(_ticks(self._last))):
            x = self.x(step) / 10
            kind = "x last" if x > 92 else "x extra" if index % 2 else "x"
            yield f'<span class="{kind}" style="left:{x:g}%">{step:,.0f}</span>'


def _ticks(most: float) -> list[float]:
    unit = 10 ** math.floor(math.log10(most))
    step = next(unit * factor for factor in (0.1, 0.2, 0.5, 1, 2) if most / (unit * factor) <= 6)
    if most >= 1:
        step = max(step, 1e-9)
    return [step * index for index in range(int(most / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Return round values between two: few enough to be read on a log scale."""
    for factors in ((1.0,), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)):
        found = [
            factor * 10.0**power
            for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            for factor in factors
            if low <= factor * 10.0**power <= high
        ]
        if len(found) >= 3:
            return found[:: -(-len(found) // 6)]
    unit = 10 ** math.floor(math.log10((high - low) / 3))
    first = math.ceil(low / unit)
    count = int(high / unit) - first + 1
    return [round(unit * (first + index), 12) for index in range(0, count, max(1, count // 5))]


def _text(value: float) -> str:
    if value >= 1e4:
        return f"{value:,.0f}"
    if not 0 < abs(value) < 1e-3:
        return f"{value:.6g}"
    digits, power = f"{value:.5e}".split("e")
    return f"{float(digits):g}e{int(power)}"


def _short(value: float) -> float:
    """Return ``value`` in five digits; whole numbers as they are."""
    return int(value) if value == int(value) else float(f"{value:.5g}")


_MOST_DOTS = 60


def _line(series: Series, scale: _Scale) -> str:
    places = [f"{scale.x(step)},{scale.y(value)}" for step, value in series.points]
    drawn = f'<polyline class="{series.kind}" points="{" ".join(places)}"/>' if places[1:] else ""
    if series.kind == "evaluation" or (len(places) == 1 and series.kind != "raw"):
        dots = places if len(places) <= _MOST_DOTS else places[-1:]
        # a line without length has round ends, which a stretched circle has not
        drawn += "".join(f'<path class="dot {series.kind}" d="M{place}h0"/>' for place in dots)
    return drawn


_SETTINGS = ("prompt", "negative_prompt", "seed", "index", "steps", "cfg_scale", "guidance")


@dataclass(frozen=True)
class Picture:
    """An image of the samples."""

    file: str
    """Its address, relative to the page."""
    data: str
    """A data: URL of a small version."""
    width: int
    height: int
    fields: dict[str, str]
    """Text fields of the file."""

    @property
    def settings(self) -> tuple[object, ...]:
        """Return what it was sampled with, the prompt first: equal in all pictures of a row."""
        return *(self.fields.get(name) for name in _SETTINGS), self.width, self.height


Figure = tuple[str, str]
"""A name and its value, in words."""
Row = Sequence[tuple[str, Picture]]
"""The pictures of a prompt, each with what it is of, such as "step 500"; the newest comes first."""
_FOLDER = Path(__file__).parent
STYLE = (_FOLDER / "page.css").read_text("utf-8")
SCRIPT = (_FOLDER / "page.js").read_text("utf-8")
_HASH = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
POLICY = (
    "default-src 'none'; img-src data: 'self'; style-src 'unsafe-inline'; "
    f"script-src 'sha256-{_HASH}'; connect-src 'self'; base-uri 'none'; form-action 'none'"
)
"""Content-Security-Policy of the page: its own style, script and pictures, and nothing else."""
PAGE_HEADERS = (
    ("Content-Security-Policy", POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("Cache-Control", "no-store"),
)
_REFRESH_SECONDS = 10


@dataclass(frozen=True)
class Contents:
    """What a page shows; texts are escaped by it."""

    title: str
    figures: Sequence[Figure] = ()
    charts: Sequence[Chart] = ()
    rows: Sequence[Row] = ()
    notes: Sequence[str] = ()
    settings: Sequence[Sequence[str]] = ()
    """Names and their values, one of each run."""
    runs: Sequence[str] = ()
    """The headings of the values, if there are several."""
    config: Mapping[str, Any] = field(default_factory=dict)
    attribution: str = ""
    is_live: bool = False
    """Whether the page renews itself every few seconds."""


PAGE_START = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    '<meta name="generator" content="fluxtrain">'
)
"""By which a page is told from other files."""


def document(
    title: str, parts: Iterable[str], style: str = "", head: str = "", main: str = ""
) -> str:
    """Return a page of ``parts`` below its ``title``, in characters that UTF-8 has.

    Names of files may have any bytes. ``main`` are attributes of the element that has the parts.
    """
    lines = [
        PAGE_START,
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"{head}<title>{escape(title)}</title><style>{STYLE}{style}</style></head><body>",
        f"<main{main}><h1>{escape(title)}</h1>",
        *filter(None, parts),
        f"</main><script>{SCRIPT}</script></body></html>\n",
    ]
    return "\n".join(lines).encode(errors="backslashreplace").decode()


def render(contents: Contents) -> str:
    """Return the page of a run, or of several."""
    meta = f'<meta http-equiv="refresh" content="{_REFRESH_SECONDS}">'
    refresh = f"<noscript>{meta}</noscript>" * contents.is_live
    live = f' data-seconds="{_REFRESH_SECONDS}"' * contents.is_live
    parts = [
        _figures(contents.figures),
        *_samples(contents),
        *_charts(contents),
        *_settings(contents),
        f"<footer>{escape(contents.attribution)} <span>fluxtrain {__version__}</span></footer>",
    ]
    return document(contents.title, parts, head=refresh, main=live)


def _figures(figures: Sequence[Figure]) -> str:
    if not figures:
        return ""
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in figures
    )
    return f'<dl class="figures">{items}</dl>'


def _samples(contents: Contents) -> Iterable[str]:
    if contents.rows:
        yield "<h2>Samples</h2>"
    for row in contents.rows:
        picture = row[0][1]
        text = escape(picture.fields.get("prompt", ""))
        yield f'<article data-prompt="{text}"><h3>{text}</h3><small>{_details(picture)}</small>'
        cells = "".join(_cell(*each) for each in row)
        yield f'<div class="row"><div class="strip">{cells}</div></div></article>'
    yield from (f'<p class="note">{escape(note)}</p>' for note in contents.notes)


def _details(picture: Picture) -> str:
    fields = picture.fields
    details = [f"{picture.width} × {picture.height}", f"seed {fields.get('seed', '?')}"]
    details.append(f"{fields.get('steps', '?')} steps")
    if fields.get("guidance"):
        details.append(f"guidance {fields['guidance']}")
    if fields.get("cfg_scale", "1.0") != "1.0":
        details.append(f"cfg {fields['cfg_scale']}")
    if fields.get("negative_prompt"):
        details.append(f"without: {fields['negative_prompt']}")
    return escape(" · ".join(details))


def _cell(name: str, picture: Picture) -> str:
    text, size = escape(picture.fields.get("prompt", "")), f"{picture.width} / {picture.height}"
    image = f'<img src="{picture.data}" alt="{text}" style="aspect-ratio:{size}">'
    link = f'<a href="{escape(picture.file)}">{image}</a>'
    return f"<figure>{link}<figcaption>{escape(name)}</figcaption></figure>"


def _charts(contents: Contents) -> Iterable[str]:
    if contents.charts:
        last = max(chart.last for chart in contents.charts)
        charts = "".join(chart.html(last) for chart in contents.charts)
        yield f'<h2>Over steps</h2><div class="charts">{charts}</div>'


def _settings(contents: Contents) -> Iterable[str]:
    if not contents.settings:
        return
    head = "".join(f"<th>{escape(name)}</th>" for name in ("", *contents.runs)) * bool(
        contents.runs
    )
    rows = "".join(
        f"<tr><th>{escape(name)}</th>{''.join(f'<td>{escape(each)}</td>' for each in values)}</tr>"
        for name, *values in contents.settings
    )
    heading = "Settings that differ" if contents.runs else "Settings"
    yield f'<h2>{heading}</h2><div class="wide"><table class="settings"><tr>{head}</tr>{rows}</table></div>'
    if contents.config:
        text = escape(json.dumps(contents.config, indent=2, ensure_ascii=False))
        yield f"<details><summary>every field</summary><pre>{text}</pre></details>"


def progress_page(title: str, progress: Mapping[str, Any]) -> str:
    """Return a page with the phase and the steps in ``progress``, the values of /progress."""
    names = {"phase": "phase", "step": "step", "steps": "of", "epoch": "epoch"}
    names |= {"status": "status", "rank": "rank"}
    figures = [(name, str(progress[key])) for key, name in names.items() if key in progress]
    return render(Contents(title, figures, is_live="status" not in progress))
