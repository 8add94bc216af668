"""Opens the sinks of a run, and hands them what was logged before its state.

At Weights & Biases a run has one for the whole training, through all restarts. At the server it goes on
where it ended: what it has is not sent again, what a crash has lost is. Files for an offline run are
begun anew by each start, with everything from the first step on.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, Literal, Protocol
from uuid import uuid4

import numpy as np
from PIL import Image

from fluxtrain.contract.process import (
    GALLERY_FILE,
    METRICS_FILE,
    SAMPLES_FOLDER,
    TENSORBOARD_FOLDER,
    WANDB_FOLDER,
)
from fluxtrain.contract.run.closed_division import is_benchmark
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.errors import ConfigError
from fluxtrain.report.metrics import STEP_METRICS
from fluxtrain.report.records import Record, read_records
from fluxtrain.runtime.files import atomic_write_by_several
from fluxtrain.runtime.program import MLPERF_PACKAGE, needs
from fluxtrain.state.run_state import RunState


def open_sinks(
    config: RunConfig,
    output: Path,
    run: RunState,
    report: Callable[[str], object],
    page: Sink | None = None,
) -> list[SinkWorker]:
    """Return the sinks that ``config`` asks for, continued after ``run``; metrics.jsonl ends there already.

    ``page`` is one more. ``report`` is called with lines for people, by any thread.
    """
    opens = dict[str, Callable[[], Sink]]()
    if page is not None:
        opens[GALLERY_FILE] = lambda: page
    if config.logging.tensorboard:
        folder = output / TENSORBOARD_FOLDER
        opens["TensorBoard"] = lambda: TensorBoardSink(folder, run.samples)
    if uses_wandb(config):
        opens["Weights & Biases"] = lambda: WandbSink(config, output, report)
    entries = _history(output, run, config.schedule.global_batch_size) if opens else []
    return [SinkWorker(name, open_sink, entries, report) for name, open_sink in opens.items()]


def _history(output: Path, run: RunState, global_batch_size: int) -> list[Entry]:
    entries: list[Entry] = [(each["samples"], each) for each in read_records(output / METRICS_FILE)]
    for image in (output / SAMPLES_FOLDER).glob("step_*.png"):
        samples = int(image.stem.removeprefix("step_")) * global_batch_size
        if samples <= run.samples:
            entries.append((samples, image))
    return sorted(entries, key=lambda entry: entry[0])


def require_packages(config: RunConfig) -> None:
    """Raise ConfigError if ``config`` is of a training that uses a log or sink without its package."""
    logging = config.logging
    if config.task != "train":
        return
    if is_benchmark(config):
        _require("spec.run.preset", config.preset, MLPERF_PACKAGE, "mlperf")
    if logging.tensorboard:
        _require("spec.run.logging.tensorboard", "true", "tensorboard")
    if uses_wandb(config):
        _require("spec.run.logging.wandb", logging.wandb, "wandb")


def uses_wandb(config: RunConfig) -> bool:
    """Return whether ``config`` sends or writes anything for Weights & Biases."""
    wandb = config.logging.wandb
    return wandb is not None and wandb.mode != "disabled"


def _require(path: str, given: object, package: str, extra: str = "") -> None:
    if find_spec(package) is None:
        raise ConfigError(path, given, needs(package, extra or package))


_GROUPS = {"eval_loss": "loss", **{each.name: each.group for each in STEP_METRICS if each.group}}
BY_TIMESTEP = "eval_loss_by_timestep"
IMAGES = "sample_images"


def scalars(record: Record) -> dict[str, float]:
    """Return the numbers of ``record`` by group and name, such as loss/train_loss; unknown ones are left out.

    The evaluation loss at t = 3/8 is eval_loss_by_timestep/3_of_8.
    """
    found: dict[str, float] = {
        f"{group}/{name}": record[name]
        for name, group in _GROUPS.items()
        if record.get(name) is not None
    }
    if "train_loss" in record:
        found["progress/step"] = record["step"]
    losses = record.get(BY_TIMESTEP, [])
    found |= {
        f"{BY_TIMESTEP}/{index}_of_{len(losses)}": loss
        for index, loss in enumerate(losses)
        if loss is not None
    }
    return found


class Sink(Protocol):
    """Takes records of metrics.jsonl and sample images; it is used by one thread."""

    @property
    def last(self) -> int:
        """Return the training samples up to which it has everything; -1: it has nothing."""

    def write(self, record: Record) -> None:
        """Take a record."""

    def show(self, samples: int, image: Path) -> None:
        """Take the sample images after ``samples`` training samples."""

    def close(self) -> None:
        """Keep and send everything."""


class TensorBoardSink:
    """Writes event files; readers hide what an earlier start wrote beyond the state that was resumed."""

    def __init__(self, folder: Path, samples: int) -> None:
        """Continue the events in ``folder`` after ``samples`` training samples."""
        from torch.utils.tensorboard import SummaryWriter  # torch imports tensorboard itself

        has_events = any(folder.glob("events.out.tfevents.*"))
        self.last = samples if has_events else -1
        self._writer = SummaryWriter(folder, purge_step=samples + 1 if has_events else None)

    def write(self, record: Record) -> None:
        """Add the numbers of ``record``."""
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record["samples"])
        self._writer.flush()

    def show(self, samples: int, image: Path) -> None:
        with Image.open(image) as opened:
            pixels = np.asarray(opened.convert("RGB"))
        self._writer.add_image(IMAGES, pixels, samples, dataformats="HWC")
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


KEY = "WANDB_API_KEY"
"""Variable with the key; it is in no file and no log."""
_ID_FILE = "run_id"
CONNECT_SECONDS = 30.0
_SEND_SECONDS = 20.0


class WandbSink:
    """Adds rows to a run, whose steps are training samples; a row is sent when the next one begins."""

    def __init__(self, config: RunConfig, output: Path, report: Callable[[str], object]) -> None:
        """Continue the run of ``output``, or begin it; ``report`` is called with where it is found."""
        settings = config.logging.wandb
        assert settings is not None
        self._config, self._output, self._settings = config, output, settings
        folder = output / WANDB_FOLDER
        path = folder / _ID_FILE
        if not path.exists():
            folder.mkdir(exist_ok=True)
            with atomic_write_by_several(path) as partial:
                partial.write_text(uuid4().hex[:16], encoding="utf-8")
        self._id = path.read_text(encoding="utf-8")
        self._run = self._open(report)
        self._samples, self._row = -1, dict[str, Any]()

    @property
    def last(self) -> int:
        """Return the training samples up to which the run has everything already."""
        return int(self._run.starting_step) - 1

    def write(self, record: Record) -> None:
        """Add the numbers of ``record`` to the row of its samples."""
        self._begin_row(record["samples"])
        self._row |= scalars(record)

    def show(self, samples: int, image: Path) -> None:
        """Add the sample images in the file ``image`` to the row of ``samples``."""
        import wandb

        self._begin_row(samples)
        self._row[IMAGES] = wandb.Image(str(image))

    def close(self) -> None:
        """Send the last row, and wait until everything is sent."""
        self._send_row()
        self._run.finish()

    def _begin_row(self, samples: int) -> None:
        if samples != self._samples:
            self._send_row()
        self._samples = samples

    def _send_row(self) -> None:
        if self._row:
            self._run.log(self._row, step=self._samples, commit=True)
        self._row = {}

    def _open(self, report: Callable[[str], object]) -> Any:
        import wandb

        wandb.setup(settings=wandb.Settings(silent=True))  # the log in prints otherwise
        why = ""
        if self._settings.mode == "online":
            try:
                return self._open_online(report)
            except Exception as error:  # no key, no connection, no such team
                why = f"{error}; "
                wandb.teardown()  # its service would refuse the same run
        for folder in (self._output / WANDB_FOLDER).glob(f"offline-run-*-{self._id}"):
            shutil.rmtree(folder, ignore_errors=True)  # the new one has everything
        run = self._init("offline")
        folder = Path(run.dir).parent
        report(f"Weights & Biases: {why}`wandb sync {folder}` sends what is written there")
        return run

    def _open_online(self, report: Callable[[str], object]) -> Any:
        if not os.environ.get(KEY):
            raise ValueError(f"{KEY} is not set")
        run = self._init("online")
        report(f"Weights & Biases: {run.url}")
        return run

    def _init(self, mode: Literal["online", "offline"]) -> Any:
        import wandb

        settings = self._settings
        return wandb.init(
            project=settings.project,
            entity=settings.entity,
            name=settings.name,
            group=settings.group,
            tags=settings.tags,
            config=self._config.model_dump(mode="json"),
            allow_val_change=True,
            dir=str(self._output),
            id=self._id,
            resume="allow" if mode == "online" else None,
            mode=mode,
            settings=wandb.Settings(
                console="off",  # stdout has the MLPerf log
                silent=True,
                save_code=False,
                symlink=False,  # not every shared file system has them
                init_timeout=CONNECT_SECONDS,
                finish_timeout=_SEND_SECONDS,
            ),
        )


OPEN_SECONDS = 10.0
"""How long a start waits at most for a sink: usually a second or two."""
CLOSE_SECONDS = 30.0
"""How long the end of a run waits at most, such as for an upload."""

Entry = tuple[int, Record | Path]
"""Training samples, and a record or the file of the sample images there."""


class SinkWorker:
    """Hands entries to a sink, in a thread of its own."""

    def __init__(
        self,
        name: str,
        open_sink: Callable[[], Sink],
        history: Iterable[Entry],
        report: Callable[[str], object],
    ) -> None:
        """Open the sink, which first gets what it lacks of ``history``, and wait for it, but not for long.

        ``report`` is called with what went wrong.
        """
        self._name, self._open_sink, self._report = name, open_sink, report
        self._history = history
        self._entries = SimpleQueue[Entry | None]()
        self._is_open, self._is_off = Event(), False
        self._thread = Thread(target=self._work, name=f"sink {name}", daemon=True)
        self._thread.start()
        self._is_open.wait(OPEN_SECONDS)

    def put(self, samples: int, content: Record | Path) -> None:
        """Hand over a record or sample images; returns at once."""
        if not self._is_off:
            self._entries.put((samples, content))

    def close(self) -> None:
        """Wait until the sink has everything, but not for long."""
        self._entries.put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._report(f"{self._name}: not done after {CLOSE_SECONDS:.0f} s; the run continues")

    def _work(self) -> None:
        try:
            sink = self._open_sink()
            self._is_open.set()
            for samples, content in self._history:
                _give(sink, samples, content)
            while (entry := self._entries.get()) is not None:
                _give(sink, *entry)
            sink.close()
        except Exception as error:
            self._is_off = True
            reason = getattr(error, "strerror", None) or error
            self._report(f"{self._name} is no longer updated: {reason}")
        finally:
            self._is_open.set()


def _give(sink: Sink, samples: int, content: Record | Path) -> None:
    if samples <= sink.last:
        return
    if isinstance(content, Path):
        sink.show(samples, content)
    else:
        sink.write(content)
