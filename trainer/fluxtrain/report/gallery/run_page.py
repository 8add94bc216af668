"""The page of a run: takes what is logged, writes gallery.html, and is served as the run goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fluxtrain.contract.launch import GALLERY_FILE, SAMPLES_FOLDER
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.data.loader import AnyOrder
from fluxtrain.errors import FencedError
from fluxtrain.fence import Fence
from fluxtrain.files import atomic_write_by_several
from fluxtrain.report.console import duration
from fluxtrain.report.gallery.losses import Losses
from fluxtrain.report.gallery.page import Contents, Figure, record_figures, render
from fluxtrain.report.gallery.pictures import MOST_PROMPTS, Pictures
from fluxtrain.report.records import Record

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
        """Return the present epoch and their number, "" if it is unknown."""
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
