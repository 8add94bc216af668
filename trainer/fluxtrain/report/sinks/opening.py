"""Opens the sinks of a run, and hands them what was logged before its state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fluxtrain.contract.launch import GALLERY_FILE, METRICS_FILE, SAMPLES_FOLDER, TENSORBOARD_FOLDER
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.report.records import read_records
from fluxtrain.report.sinks.packages import uses_wandb
from fluxtrain.report.sinks.sink import Sink
from fluxtrain.report.sinks.tensorboard import TensorBoardSink
from fluxtrain.report.sinks.wandb import WandbSink
from fluxtrain.report.sinks.worker import Entry, SinkWorker
from fluxtrain.run_state import RunState


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
    """Return the records and the sample images up to ``run``, by training samples."""
    entries: list[Entry] = [(each["samples"], each) for each in read_records(output / METRICS_FILE)]
    for image in (output / SAMPLES_FOLDER).glob("step_*.png"):
        samples = int(image.stem.removeprefix("step_")) * global_batch_size
        if samples <= run.samples:
            entries.append((samples, image))
    return sorted(entries, key=lambda entry: entry[0])
