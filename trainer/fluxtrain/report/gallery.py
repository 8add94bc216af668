"""The page of a run, with its losses as a drawing in SVG, images and figures; and that of other processes.

Its style is the reader's font, black on white, or white on black where that is preferred.
"""

from __future__ import annotations

import base64
import io
import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from PIL import Image

from fluxtrain import __version__
from fluxtrain.contract.process import GALLERY_FILE, SAMPLES_FOLDER
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.data.loader import AnyOrder
from fluxtrain.errors import FencedError
from fluxtrain.report.console import duration
from fluxtrain.report.records import Point, Record, losses, smoothed
from fluxtrain.runtime.files import atomic_write_by_several
from fluxtrain.state.run_state import Fence

_WIDTH, _HEIGHT = 960, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 12, 36
_MOST_POINTS = 1200


class Losses:
    """The losses so far: at most 1,200 points of each kind, neighbours averaged beyond."""

    def __init__(self) -> None:
        """Start without a point."""
        self.training, self.evaluation = list[Point](), list[Point]()

    def add(self, record: Record) -> None:
        """Add the losses of a record of metrics.jsonl; those that are not finite are left out."""
        for key, points in (("train_loss", self.training), ("eval_loss", self.evaluation)):
            points += losses([record], key)
            if len(points) > _MOST_POINTS:
                pairs = [points[start : start + 2] for start in range(0, len(points) - 1, 2)]
                means = [((a + b) / 2, (low + high) / 2) for (a, low), (b, high) in pairs]
                points[:] = [*means, points[-1]]

    def draw(self, target: float | None) -> str:
        """Return an svg element; the empty string without a point."""
        points = self.training + self.evaluation
        if not points:
            return ""
        shown = [loss for _, loss in points] + ([target] if target else [])
        scale = _Scale(max(samples for samples, _ in points), min(shown), max(shown))
        parts = [*scale.grid()]
        if target:
            y = scale.y(target)
            line = f'<line class="target" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>'
            parts.append(line)
        parts.append(_line("raw", scale, self.training))
        parts.append(_line("smooth", scale, smoothed(self.training)))
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


MOST_STEPS, MOST_PROMPTS = 12, 32
_SIDE, _SMALL = 320, 128
_QUALITY = 85
_SETTINGS = ("prompt", "negative_prompt", "seed", "index", "steps", "cfg_scale", "guidance")
ORIGINALS = "originals"
"""Folder below that of the samples with the images of validation prompts."""


@dataclass(frozen=True)
class Picture:
    """An image of the samples."""

    file: str
    """Path relative to the output of the run."""
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


class Pictures:
    """The pictures of a run, read from its samples folder once."""

    def __init__(self, folder: Path) -> None:
        """Read nothing; ``folder`` holds step_0000250/00.png and originals/00.png."""
        self._folder = folder
        self._steps = list[int]()
        self._known = dict[str, Picture | None]()

    def add(self, step: int) -> None:
        """Add the images of ``step``, and read those that are shown from now on."""
        if step not in self._steps:
            self._steps = sorted([*self._steps, step])
        wanted = {_name(step): step for step in self.shown_steps}
        for folder in (*wanted, ORIGINALS):
            for index in range(MOST_PROMPTS):
                name = f"{folder}/{index:02d}.png"
                if self._known.get(name) is None:
                    self._known[name] = self._read(name)
        kept = {*wanted, ORIGINALS}
        self._known = {name: each for name, each in self._known.items() if name[:-7] in kept}

    @property
    def shown_steps(self) -> list[int]:
        """Return the steps with a column: the first, the last, and every n-th between."""
        stride = 1
        while len(self._steps[::stride]) > MOST_STEPS - 1:
            stride *= 2
        return sorted({*self._steps[::stride], *self._steps[-1:]})

    @property
    def num_steps(self) -> int:
        """Return the number of steps with images."""
        return len(self._steps)

    @property
    def num_prompts(self) -> int:
        """Return the number of prompts with a picture: fewer than `rows` if some were changed."""
        return sum(any(self._of_prompt(index)) for index in range(MOST_PROMPTS))

    def rows(self) -> list[tuple[Picture | None, list[Picture | None]]]:
        """Return for each prompt its original image, if there is one, and the picture of each shown step.

        A prompt whose settings were changed on the way has a row for each of them.
        """
        found = list[tuple[Picture | None, list[Picture | None]]]()
        for index in range(MOST_PROMPTS):
            pictures = self._of_prompt(index)
            original = self._known.get(f"{ORIGINALS}/{index:02d}.png")
            for settings in dict.fromkeys(each.settings for each in pictures if each):
                row = [each if each and each.settings == settings else None for each in pictures]
                is_of_row = original is not None and original.settings[0] == settings[0]
                found.append((original if is_of_row else None, row))
        return found

    def _of_prompt(self, index: int) -> list[Picture | None]:
        """Return the picture of each shown step of the prompt with this number."""
        return [self._known.get(f"{_name(step)}/{index:02d}.png") for step in self.shown_steps]

    def _read(self, name: str) -> Picture | None:
        path = self._folder / name
        if not path.is_file():
            return None
        try:
            with Image.open(path) as image:
                fields = {str(key): str(value) for key, value in image.info.items()}
                width, height = image.size
                small = image.convert("RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            return None  # cut off, or not of this run
        small.thumbnail((_SIDE, _SIDE), Image.Resampling.LANCZOS)
        kind = "png" if max(small.size) <= _SMALL else "jpeg"
        buffer = io.BytesIO()
        small.save(buffer, kind, quality=_QUALITY)
        data = base64.b64encode(buffer.getvalue()).decode()
        file = f"{self._folder.name}/{name}"
        return Picture(file, f"data:image/{kind};base64,{data}", width, height, fields)


def _name(step: int) -> str:
    return f"step_{step:07d}"


Figure = tuple[str, str]
"""A name and its value, in words."""
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""Content-Security-Policy of the page: its own style and pictures, and nothing else."""
_REFRESH_SECONDS = 10
_GIB = 1 << 30


@dataclass(frozen=True)
class Contents:
    """What a page shows; texts are escaped by it."""

    title: str
    figures: Sequence[Figure] = ()
    curve: str = ""
    """An svg element of our own."""
    steps: Sequence[int] = ()
    rows: Sequence[tuple[Picture | None, Sequence[Picture | None]]] = ()
    notes: Sequence[str] = ()
    settings: Sequence[Figure] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    attribution: str = ""
    links: bool = False
    """Whether pictures link to their files, which are beside the page."""
    is_live: bool = False
    """Whether the page is loaded again every few seconds."""


def render(contents: Contents) -> str:
    """Return the page, in characters that UTF-8 has: names of files may have any bytes."""
    refresh = f'<meta http-equiv="refresh" content="{_REFRESH_SECONDS}">' * contents.is_live
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"{refresh}<title>{escape(contents.title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{escape(contents.title)}</h1>",
        _figures(contents.figures),
        *_samples(contents),
        *_curve(contents),
        *_settings(contents),
        f"<footer>{escape(contents.attribution)} <span>fluxtrain {__version__}</span></footer>",
        "</body></html>\n",
    ]
    return "\n".join(filter(None, parts)).encode(errors="backslashreplace").decode()


def record_figures(record: Mapping[str, Any], steps: int, epoch: str) -> Iterable[Figure]:
    """Yield the figures of the newest logged step of a training of ``steps``, in ``epoch`` if it is known."""
    yield "step", f"{record['step']:,} of {steps:,}"
    if epoch:
        yield "epoch", epoch
    yield "loss", f"{record['train_loss']:.4f}"
    yield "samples/s", f"{record['samples_per_second']:,.3g}"
    if record.get("mfu") is not None:
        yield "MFU", f"{record['mfu']:.1%}"
    memory = record.get("memory_reserved_bytes") or record.get("memory_allocated_bytes")
    if memory:
        yield "memory of a rank", f"{memory / _GIB:.1f} GiB"
    yield "training time", duration(record["seconds"])


def _figures(figures: Sequence[Figure]) -> str:
    if not figures:
        return ""
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in figures
    )
    return f'<dl class="figures">{items}</dl>'


def _samples(contents: Contents) -> Iterable[str]:
    if not contents.rows:
        return
    has_originals = any(original for original, _ in contents.rows)
    head = "<th></th>" + "<th>original</th>" * has_originals
    head += "".join(f"<th>step {step:,}</th>" for step in contents.steps)
    yield f'<h2>Samples</h2><div class="wide"><table class="samples"><thead><tr>{head}</tr></thead><tbody>'
    for original, pictures in contents.rows:
        shown = next(picture for picture in pictures if picture)
        cells = _cell(original, contents.links) if has_originals else ""
        cells += "".join(_cell(picture, contents.links) for picture in pictures)
        yield f"<tr><th>{_prompt(shown)}</th>{cells}</tr>"
    yield "</tbody></table></div>"
    yield from (f'<p class="note">{escape(note)}</p>' for note in contents.notes)


def _prompt(picture: Picture) -> str:
    fields = picture.fields
    details = [f"{picture.width} × {picture.height}", f"seed {fields.get('seed', '?')}"]
    details.append(f"{fields.get('steps', '?')} steps")
    if fields.get("guidance"):
        details.append(f"guidance {fields['guidance']}")
    if fields.get("cfg_scale", "1.0") != "1.0":
        details.append(f"cfg {fields['cfg_scale']}")
    if fields.get("negative_prompt"):
        details.append(f"without: {fields['negative_prompt']}")
    text = escape(fields.get("prompt", ""))
    return f'<span class="prompt">{text}</span><small>{escape(" · ".join(details))}</small>'


def _cell(picture: Picture | None, links: bool) -> str:
    if picture is None:
        return "<td></td>"
    text = escape(picture.fields.get("prompt", ""), quote=True)
    image = f'<img src="{picture.data}" alt="{text}">'
    if links:
        image = f'<a href="{escape(picture.file, quote=True)}">{image}</a>'
    return f"<td>{image}</td>"


def _curve(contents: Contents) -> Iterable[str]:
    if contents.curve:
        yield f'<h2>Loss over training samples</h2><div class="curve">{contents.curve}</div>'
        keys = [("raw", "each logged step"), ("smooth", "smoothed")]
        keys += [
            (kind, kind) for kind in ("evaluation", "target") if f'="{kind}"' in contents.curve
        ]
        items = "".join(f'<li class="{kind}">{text}</li>' for kind, text in keys)
        yield f'<ul class="legend">{items}</ul>'


def _settings(contents: Contents) -> Iterable[str]:
    if not contents.settings:
        return
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>"
        for name, value in contents.settings
    )
    yield f'<h2>Settings</h2><table class="settings">{rows}</table>'
    text = escape(json.dumps(contents.config, indent=2, ensure_ascii=False))
    yield f"<details><summary>every field</summary><pre>{text}</pre></details>"


_FRESH_SECONDS = 2.0
"""How long a page that was served is served again, whoever asks."""


class RunPage:
    """A sink whose thread writes gallery.html at each sampling and at the end; `live` is for any thread.

    All is made of what was logged: nothing is asked of the training, and its size is bounded.
    """

    last = -1
    """It begins anew, with the history."""

    def __init__(
        self,
        config: RunConfig,
        output: Path,
        fence: Fence | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with an empty page for the run in ``output``, whose file is written while ``fence`` holds."""
        self._config, self._output, self._fence, self._now = config, output, fence, now
        self._values = config.model_dump(mode="json")
        self._lock = threading.Lock()
        self._losses, self._pictures = Losses(), Pictures(output / SAMPLES_FOLDER)
        self._newest: Record = {}
        self._evaluated: float | None = None
        self._live = "", -_FRESH_SECONDS
        self.hardware, self.attribution, self.status = "", "", ""
        self.order: AnyOrder | None = None
        """That of the training samples, once they are opened."""

    def write(self, record: Record) -> None:
        """Take a record of metrics.jsonl."""
        with self._lock:
            self._losses.add(record)
            if "train_loss" in record:
                self._newest = record
            self._evaluated = record.get("eval_loss", self._evaluated)

    def show(self, samples: int, image: Path) -> None:
        """Take the sample images whose grid is ``image``, and write the file."""
        step = int(image.stem.removeprefix("step_"))
        with self._lock:
            self._pictures.add(step)
        self._save()

    def close(self) -> None:
        """Write the file."""
        self._save()

    def live(self, progress: Mapping[str, Any]) -> str:
        """Return the page of a run that goes on; ``progress`` is that of /progress."""
        with self._lock:
            page, made = self._live
            if self._now() - made >= _FRESH_SECONDS:
                page = render(self._contents(str(progress.get("phase", "")), is_live=True))
                self._live = page, self._now()
            return page

    def _save(self) -> None:
        with self._lock:
            page = render(self._contents("", is_live=False))
        with (
            suppress(FencedError),  # a newer start writes its own
            atomic_write_by_several(self._output / GALLERY_FILE) as partial,
        ):
            partial.write_text(page, encoding="utf-8")
            if self._fence is not None:
                self._fence.check()

    def _contents(self, phase: str, is_live: bool) -> Contents:
        config, pictures = self._config, self._pictures
        figures = [("status", self.status or phase)] if self.status or phase else []
        if self._newest:
            figures += record_figures(self._newest, config.schedule.steps, self._epoch())
            if not self.status and (left := self._seconds_left()) is not None:
                figures.append(("time left", duration(left)))
        if self._evaluated is not None:
            figures.insert(min(3, len(figures)), ("evaluation loss", f"{self._evaluated:.4f}"))
        rows, notes = pictures.rows(), []
        if len(pictures.shown_steps) < pictures.num_steps:
            text = f"{len(pictures.shown_steps)} of {pictures.num_steps} steps are shown"
            notes.append(f"{text}; {SAMPLES_FOLDER}/ has all.")
        if pictures.num_prompts == MOST_PROMPTS:
            notes.append(f"At most {MOST_PROMPTS} prompts are shown; {SAMPLES_FOLDER}/ has all.")
        return Contents(
            title=self._output.name,
            figures=figures,
            curve=self._losses.draw(config.evaluation.target_loss),
            steps=pictures.shown_steps,
            rows=rows,
            notes=notes,
            settings=self._settings(),
            config=self._values,
            attribution=self.attribution,
            links=not is_live,
            is_live=is_live and not self.status,
        )

    def _epoch(self) -> str:
        if self.order is None:
            return ""
        begun, last = self._newest["step"], self._config.schedule.steps
        return f"{self.order.epochs(begun):,} of {self.order.epochs(last):,}"

    def _seconds_left(self) -> float | None:
        rate, schedule = self._newest["samples_per_second"], self._config.schedule
        total = schedule.steps * schedule.global_batch_size
        if self.order is not None:
            total = self.order.samples(schedule.steps)  # some batches may be short
        return (total - self._newest["samples"]) / rate if rate else None

    def _data(self) -> str:
        data = self._config.data
        return data.source if data.source == "synthetic" else data.images or data.train

    def _settings(self) -> list[Figure]:
        config, schedule, optim = self._config, self._config.schedule, self._config.optim
        adapter = config.adapter
        side = config.data.image_size
        rate = f"{optim.learning_rate:g}, {schedule.warmup_steps} steps of warm-up"
        settings = [
            ("preset", config.preset),
            ("weights", config.initial_weights or "random"),
            ("data", self._data()),
            ("image size", f"{side} × {side}"),
            ("batch", f"{schedule.global_batch_size} samples a step"),
            ("learning rate", f"{rate}, {schedule.decay}"),
            ("optimizer", optim.name),
            ("precision", config.precision.compute),
            ("seed", str(config.seed)),
        ]
        if adapter is not None:
            settings.insert(
                2, ("adapter", f"{adapter.kind}, rank {adapter.rank}, alpha {adapter.alpha:g}")
            )
        if self.hardware:
            settings.append(("ranks", self.hardware))
        return settings


STYLE = """
:root { --ink: #1b1f23; --faint: #6a737d; --line: #d8dee4; --back: #fff; --blue: #0b6bcb; --red: #c4320a;
  --grey: #b6bec7; --green: #2da44e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ec; --faint: #98a2ad; --line: #353b42;
  --back: #14171a; --blue: #6cb2ff; --red: #ff8a65; --grey: #56606b; --green: #57c777; } }
* { box-sizing: border-box; }
body { margin: 2rem auto 4rem; padding: 0 1.5rem; max-width: 88rem;
  color: var(--ink); background: var(--back);
  font: 15px/1.45 system-ui, sans-serif; font-variant-numeric: tabular-nums; }
h1 { font-size: 1.5rem; margin: 0 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 2.2rem 0 .7rem; }
.figures { display: flex; flex-wrap: wrap; gap: .4rem 2.4rem; margin: 0; }
.figures dt { color: var(--faint); font-size: .82rem; }
.figures dd { margin: 0; font-size: 1.2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; }
.samples th { text-align: left; font-weight: 400; vertical-align: top; padding: 0 1rem .6rem 0; }
.samples thead th { color: var(--faint); font-size: .82rem; white-space: nowrap; }
.samples tbody th { position: sticky; left: 0; background: var(--back); min-width: 11rem; max-width: 16rem; }
.samples td { padding: 0 .5rem .6rem 0; vertical-align: top; }
.samples img { display: block; width: 9rem; height: auto; border-radius: 3px; }
.prompt { display: block; overflow-wrap: anywhere; max-height: 8em; overflow-y: auto; }
small, .note, footer { color: var(--faint); font-size: .82rem; }
.curve svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--faint); font-size: 12px; }
svg .grid { stroke: var(--line); }
polyline { fill: none; stroke-width: 1.6; stroke-linejoin: round; }
polyline.raw { stroke: var(--grey); stroke-width: 1; }
polyline.smooth { stroke: var(--blue); }
polyline.evaluation { stroke: var(--red); }
circle.evaluation { fill: var(--red); }
circle.smooth { fill: var(--blue); }
svg .target { stroke: var(--green); stroke-dasharray: 5 4; }
.legend { display: flex; flex-wrap: wrap; gap: 1.4rem; list-style: none; margin: .2rem 0 0; padding: 0;
  color: var(--faint); font-size: .82rem; }
.legend li::before { content: ""; display: inline-block; width: 1.2rem; height: 2px; margin-right: .45rem;
  vertical-align: middle; background: var(--grey); }
.legend .smooth::before { background: var(--blue); }
.legend .evaluation::before { background: var(--red); }
.legend .target::before { background: var(--green); }
.settings th { text-align: left; font-weight: 400; color: var(--faint); padding: .1rem 2rem .1rem 0;
  vertical-align: top; white-space: nowrap; }
.settings td { overflow-wrap: anywhere; }
details { margin-top: .8rem; }
summary { cursor: pointer; color: var(--blue); }
pre { font-size: .82rem; overflow-x: auto; }
footer { margin-top: 2.5rem; white-space: pre-line; }
"""


PAGE_HEADERS = (
    ("Content-Security-Policy", POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("Cache-Control", "no-store"),
)
"""Headers of every page that is served."""


def progress_page(title: str, progress: Mapping[str, Any]) -> str:
    """Return a page with the phase and the steps in ``progress``, the values of /progress."""
    names = {"phase": "phase", "step": "step", "steps": "of", "epoch": "epoch"}
    names |= {"status": "status", "rank": "rank"}
    figures = [(name, str(progress[key])) for key, name in names.items() if key in progress]
    return render(Contents(title, figures, is_live="status" not in progress))
