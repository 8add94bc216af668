"""The page of a run: its samples, its curves and its settings; and a page of several runs side by side."""

from __future__ import annotations

import base64
import io
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from PIL import Image

from fluxtrain.contract.process import CONFIG_FILE, GALLERY_FILE, METRICS_FILE, SAMPLES_FOLDER
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.data.loader import AnyOrder
from fluxtrain.errors import ConfigError, FencedError
from fluxtrain.report.console import duration
from fluxtrain.report.page import (
    PAGE_START,
    Contents,
    Figure,
    History,
    Picture,
    Row,
    render,
    side_by_side,
)
from fluxtrain.report.records import Record, read_records
from fluxtrain.runtime.files import atomic_write_by_several, writing
from fluxtrain.state.run_state import Fence

MOST_STEPS, MOST_PROMPTS = 12, 32
_SIDE, _SMALL = 320, 128
_QUALITY = 85
ORIGINALS = "originals"
"""Folder below that of the samples with the images of validation prompts."""


class Pictures:
    """The pictures of a run, read from its samples folder once."""

    def __init__(self, folder: Path, base: str = "") -> None:
        """Read nothing; ``folder`` holds step_0000250/00.png and originals/00.png.

        ``base`` is the path from the page to the run, with a slash at its end.
        """
        self._folder, self._base = folder, base
        self._steps = list[int]()
        self._known = dict[str, Picture | None]()

    def add(self, *steps: int) -> None:
        """Add the images of ``steps``, and read those that are shown from now on."""
        self._steps = sorted({*self._steps, *steps})
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
        return len(self._steps)

    @property
    def num_prompts(self) -> int:
        """Return the number of prompts with a picture: fewer than `rows` if some were changed."""
        return sum(any(self._of_prompt(index)) for index in range(MOST_PROMPTS))

    def rows(self) -> list[tuple[Picture | None, list[Picture | None]]]:
        """Return for each prompt its original image, if there is one, and the picture of each shown step.

        A prompt whose settings were changed on the way has a row for each of them, the newest first.
        """
        found = list[tuple[Picture | None, list[Picture | None]]]()
        for index in range(MOST_PROMPTS):
            pictures = self._of_prompt(index)
            original = self._known.get(f"{ORIGINALS}/{index:02d}.png")
            for settings in dict.fromkeys(each.settings for each in pictures[::-1] if each):
                row = [each if each and each.settings == settings else None for each in pictures]
                is_of_row = original is not None and original.settings[0] == settings[0]
                found.append((original if is_of_row else None, row))
        return found

    def strips(self) -> list[Row]:
        """Return the pictures of each row with their names, the newest first and the original last."""
        names = [f"step {step:,}" for step in self.shown_steps]
        found = list[Row]()
        for original, pictures in self.rows():
            named = [(name, each) for name, each in zip(names, pictures, strict=True) if each]
            found.append(named[::-1] + ([("original", original)] if original else []))
        return found

    def file(self, name: str) -> bytes | None:
        """Return the file of a picture that is shown, None if ``name`` is not the address of one."""
        if all(name != each.file for each in self._known.values() if each):
            return None
        try:
            return (self._folder.parent / unquote(name)).read_bytes()
        except OSError:
            return None

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
        file = quote(f"{self._base}{self._folder.name}/{name}", errors="surrogateescape")
        return Picture(file, f"data:image/{kind};base64,{data}", width, height, fields)


def _name(step: int) -> str:
    return f"step_{step:07d}"


_GIB = 1 << 30


def _record_figures(record: Mapping[str, Any], steps: int, epoch: str) -> Iterable[Figure]:
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
        self._history, self._pictures = History(), Pictures(output / SAMPLES_FOLDER)
        self._newest: Record = {}
        self._evaluated: float | None = None
        self._live = "", -_FRESH_SECONDS
        self.hardware, self.attribution, self.status = "", "", ""
        self.order: AnyOrder | None = None
        """That of the training samples, once they are opened."""

    def write(self, record: Record) -> None:
        with self._lock:
            self._history.add(record)
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
        self._save()

    def live(self, progress: Mapping[str, Any]) -> str:
        """Return the page of a run that goes on; ``progress`` is that of /progress."""
        with self._lock:
            page, made = self._live
            if self._now() - made >= _FRESH_SECONDS:
                page = render(self._contents(str(progress.get("phase", "")), is_live=True))
                self._live = page, self._now()
            return page

    def file(self, name: str) -> bytes | None:
        """Return the PNG file of a picture of the page by its address."""
        with self._lock:
            return self._pictures.file(name)

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
            figures += _record_figures(self._newest, config.schedule.steps, self._epoch())
            if not self.status and (left := self._seconds_left()) is not None:
                figures.append(("time left", duration(left)))
        if self._evaluated is not None:
            figures.insert(min(3, len(figures)), ("validation loss", f"{self._evaluated:.4f}"))
        notes = list[str]()
        if len(pictures.shown_steps) < pictures.num_steps:
            text = f"{len(pictures.shown_steps)} of {pictures.num_steps} steps are shown"
            notes.append(f"{text}; {SAMPLES_FOLDER}/ has all.")
        if pictures.num_prompts == MOST_PROMPTS:
            notes.append(f"At most {MOST_PROMPTS} prompts are shown; {SAMPLES_FOLDER}/ has all.")
        if count := self._history.not_finite:
            first = self._history.first_not_finite
            notes.append(
                f"{count:,} logged steps have no finite loss, the first one is step {first:,}."
            )
        return Contents(
            title=self._output.name,
            figures=figures,
            charts=self._history.charts(config.evaluation.target_loss),
            rows=pictures.strips(),
            notes=notes,
            settings=self._settings(),
            config=self._values,
            attribution=self.attribution,
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


_MOST_RUNS = 8


def compare_runs(runs: Sequence[Path], output: Path) -> None:
    """Write a page of ``runs`` side by side into the file ``output``; of one run, its own page.

    Raises ConfigError for a folder that no run has written, too many of them, and an ``output`` that holds
    something else; StorageError if it cannot be written.
    """
    _require_page(output, runs)
    if len(runs) > _MOST_RUNS:
        raise ConfigError(
            "RUN", f"{len(runs)} runs", f"at most {_MOST_RUNS} are shown side by side"
        )
    names = [run.name for run in runs]
    titles = [run.name if names.count(run.name) == 1 else str(run) for run in runs]
    configs, histories, pictures = list[dict[str, Any]](), dict[str, History](), list[Pictures]()
    for title, run in zip(titles, runs, strict=True):
        records = read_records(run / METRICS_FILE)
        configs.append(_config_of(run))
        if not records and not configs[-1]:
            text = f"has no {METRICS_FILE} and no {CONFIG_FILE}; give the output folder of a run"
            raise ConfigError("RUN", str(run), text)
        histories[title] = History()
        for record in records:
            histories[title].add(record)
        base = os.path.relpath(run.resolve(), output.parent.resolve())
        pictures.append(Pictures(run / SAMPLES_FOLDER, f"{base}/"))
        pictures[-1].add(*_steps_with_pictures(run))
    alone = len(runs) == 1
    contents = Contents(
        title=" · ".join(titles),
        charts=histories[titles[0]].charts(None) if alone else side_by_side(histories),
        rows=pictures[0].strips() if alone else _rows_of_runs(titles, pictures),
        settings=[] if alone else _differences(configs),
        runs=titles,
    )
    with writing(output), atomic_write_by_several(output) as partial:
        partial.write_text(render(contents), encoding="utf-8")


def _require_page(output: Path, runs: Sequence[Path]) -> None:
    """Raise ConfigError if ``output`` is something else than a page, or that of one of several ``runs``."""
    if len(runs) > 1 and output.resolve() in [run.resolve() / GALLERY_FILE for run in runs]:
        raise ConfigError("--output", str(output), "is the page of one run; name another file")
    try:
        with output.open("rb") as file:
            is_page = file.read(len(PAGE_START)) == PAGE_START.encode()
    except FileNotFoundError:
        return
    except OSError:
        is_page = False
    if not is_page:
        raise ConfigError("--output", str(output), "exists, and is no page; name another file")


def _config_of(run: Path) -> dict[str, Any]:
    try:
        found = json.loads((run / CONFIG_FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _steps_with_pictures(run: Path) -> Iterable[int]:
    for folder in (run / SAMPLES_FOLDER).glob("step_*/"):
        if (number := folder.name.removeprefix("step_")).isdecimal():
            yield int(number)


def _rows_of_runs(titles: Sequence[str], pictures: Sequence[Pictures]) -> list[Row]:
    """Return a row for each prompt and its settings, with the newest picture that each run has of it."""
    rows = dict[tuple[object, ...], list[tuple[str, Picture]]]()
    for title, of_run in zip(titles, pictures, strict=True):
        for row in of_run.strips():
            name, picture = row[0]
            rows.setdefault(picture.settings, []).append((f"{title} · {name}", picture))
    return list(rows.values())


def _differences(configs: Sequence[Mapping[str, Any]]) -> list[Sequence[str]]:
    """Return the fields whose values differ, with the value of each run."""
    flat = [dict(_flat(config)) for config in configs]
    paths = dict.fromkeys(path for each in flat for path in each)
    rows = [(path, *(each.get(path, "-") for each in flat)) for path in paths]
    return [row for row in rows if len(set(row[1:])) > 1]


def _flat(values: Mapping[str, Any], above: str = "") -> Iterable[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", json.dumps(value, ensure_ascii=False)[:200].strip('"')
