"""The losses of a run as a drawing in SVG: training and evaluation over samples, the loss on a log scale."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from fluxtrain.report.records import Record

Point = tuple[float, float]
"""Training samples and a loss."""
_WIDTH, _HEIGHT = 960, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 12, 36
_MOST_POINTS = 1200
_KEPT = 0.9


class Losses:
    """The losses so far: at most 1,200 points of each kind, neighbours averaged beyond."""

    def __init__(self) -> None:
        """Start without a point."""
        self.training, self.evaluation = list[Point](), list[Point]()

    def add(self, record: Record) -> None:
        """Add the losses of a record of metrics.jsonl; those that are not finite are left out."""
        for key, points in (("train_loss", self.training), ("eval_loss", self.evaluation)):
            loss = record.get(key)
            if isinstance(loss, int | float) and math.isfinite(loss) and loss > 0:
                points.append((float(record["samples"]), float(loss)))
                if len(points) > _MOST_POINTS:
                    points[:] = _averaged(points)

    def draw(self, target: float | None) -> str:
        """Return an svg element; the empty string without a point."""
        points = self.training + self.evaluation
        if not points:
            return ""
        losses = [loss for _, loss in points] + ([target] if target else [])
        scale = _Scale(max(samples for samples, _ in points), min(losses), max(losses))
        parts = [*scale.grid()]
        if target:
            y = scale.y(target)
            line = f'<line class="target" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>'
            parts.append(line)
        parts.append(_line("raw", scale, self.training))
        parts.append(_line("smooth", scale, _smoothed(self.training)))
        parts.append(_line("evaluation", scale, self.evaluation))
        if len(self.training) == 1:
            parts += _circles("smooth", scale, self.training)
        parts += _circles("evaluation", scale, self.evaluation[-100:])
        label = "training and evaluation loss over training samples"
        box = f"0 0 {_WIDTH} {_HEIGHT}"
        return f'<svg viewBox="{box}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


class _Scale:
    """Places samples and losses on the drawing."""

    def __init__(self, samples: float, low: float, high: float) -> None:
        self._samples = max(samples, 1.0)
        margin = 1.05
        self._low, self._high = math.log10(low / margin), math.log10(high * margin)

    def x(self, samples: float) -> float:
        return round(_LEFT + samples / self._samples * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(self, loss: float) -> float:
        part = (math.log10(loss) - self._low) / (self._high - self._low)
        return round(_HEIGHT - _BOTTOM - part * (_HEIGHT - _TOP - _BOTTOM), 1)

    def grid(self) -> Iterable[str]:
        """Yield lines with their numbers: about five of each axis."""
        for loss in _loss_ticks(10**self._low, 10**self._high):
            y = self.y(loss)
            yield f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>'
            yield f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{loss:g}</text>'
        for samples in _ticks(self._samples):
            x = self.x(samples)
            anchor = "end" if x > _WIDTH - 60 else "middle"
            text = f"{samples:,.0f}"
            yield f'<text x="{x}" y="{_HEIGHT - 14}" text-anchor="{anchor}">{text}</text>'


def _ticks(most: float) -> list[float]:
    """Return round numbers from 0 to ``most``."""
    unit = 10 ** math.floor(math.log10(most))
    step = next(unit * factor for factor in (0.1, 0.2, 0.5, 1, 2) if most / (unit * factor) <= 6)
    return [step * index for index in range(int(most / step + 1e-9) + 1)]


def _loss_ticks(low: float, high: float) -> list[float]:
    """Return round losses between two losses: few enough to be read on a log scale."""
    for factors in ((1.0,), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)):
        found = [
            factor * 10.0**power
            for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            for factor in factors
            if low <= factor * 10.0**power <= high
        ]
        if len(found) >= 3:
            return found[:: -(-len(found) // 8)]
    unit = 10 ** math.floor(math.log10((high - low) / 3))
    first = math.ceil(low / unit)
    count = int(high / unit) - first + 1
    return [round(unit * (first + index), 12) for index in range(0, count, max(1, count // 5))]


def _line(kind: str, scale: _Scale, points: Sequence[Point]) -> str:
    if len(points) < 2:
        return ""
    places = " ".join(f"{scale.x(samples)},{scale.y(loss)}" for samples, loss in points)
    return f'<polyline class="{kind}" points="{places}"/>'


def _circles(kind: str, scale: _Scale, points: Sequence[Point]) -> Iterable[str]:
    for samples, loss in points:
        yield f'<circle class="{kind}" cx="{scale.x(samples)}" cy="{scale.y(loss)}" r="3">'
        yield f"<title>{loss:.5g} after {samples:,.0f} samples</title></circle>"


def _smoothed(points: Sequence[Point]) -> list[Point]:
    smooth, weight, result = 0.0, 0.0, []
    for samples, loss in points:
        smooth = _KEPT * smooth + (1 - _KEPT) * loss
        weight = _KEPT * weight + (1 - _KEPT)
        result.append((samples, smooth / weight))
    return result


def _averaged(points: Sequence[Point]) -> list[Point]:
    """Return the means of neighbours."""
    pairs = [points[start : start + 2] for start in range(0, len(points), 2)]
    return [(pair[-1][0], sum(loss for _, loss in pair) / len(pair)) for pair in pairs]
