"""Weights & Biases: one run for the whole training, through all restarts, by its own library.

A run at the server goes on where it ended: what it has is not sent again, what a crash has lost is. Files
for an offline run are begun anew by each start, with everything from the first step on.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from fluxtrain.contract.launch import WANDB_FOLDER
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.files import atomic_write_by_several
from fluxtrain.report.records import Record
from fluxtrain.report.sinks.scalars import IMAGES, scalars

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
        self._id = _run_id(output / WANDB_FOLDER)
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


def _run_id(folder: Path) -> str:
    """Return the id of the run in ``folder``, a new one the first time."""
    path = folder / _ID_FILE
    if not path.exists():
        folder.mkdir(exist_ok=True)
        with atomic_write_by_several(path) as partial:
            partial.write_text(uuid4().hex[:16])
    return path.read_text()
