"""What the preparations of raw sets share: the images' format, worker processes, and a staging directory.

Images are PNGs of 256 x 256 pixels in RGB. Results come in the order of the tasks, and no worker
outlives its parent. Why not ``ProcessPoolExecutor``: docs/decisions/0008; ``forkserver``, because
``fork`` copies locks that the parent's other threads hold. An output grows as ``OUTPUT.partial``,
survives SIGKILL, so that the next run resumes, and is renamed when complete; settings.json is in it
meanwhile, then part of report.json.
"""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import re
import shutil
import signal
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Generic, TypeVar

import PIL
from PIL import Image

from fluxtrain.data.formats.tar_index import UNFINISHED_SIDECARS
from fluxtrain.errors import DataError, FluxtrainError
from fluxtrain.runtime.files import atomic_write, exclusive_lock, storage_errors, write_to_disk
from fluxtrain.runtime.program import without_interrupts

SIZE = 256
"""Height and width in pixels."""
PNG_LEVEL = 1
"""zlib level: two thirds of the time of Pillow's default, a tenth more bytes (docs/log.md)."""

SETTINGS: dict[str, Any] = {
    "format": 1,
    "size": SIZE,
    "png_level": PNG_LEVEL,
    "pillow": PIL.__version__,
}
"""What the bytes of prepared images depend on; a staging directory with other settings is emptied."""


def encode(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "PNG", compress_level=PNG_LEVEL)
    return buffer.getvalue()


def error_summary(error: Exception) -> str:
    """Return type and message of ``error``: at most 200 printable characters, without memory addresses."""
    text = re.sub(r" at 0x[0-9a-f]+", "", f"{type(error).__name__}: {error}")[:200]
    return text if text.isprintable() else type(error).__name__


Task = TypeVar("Task")
Result = TypeVar("Result")
Outcome = tuple[Any, FluxtrainError | None]
"""The result of a task, or the error that it raised."""
_TASKS_AHEAD = 2
"""Tasks started per worker beyond the last result taken: bounds the results held in memory."""


def map_in_order(
    function: Callable[[Task], Result], tasks: Iterable[Task], num_workers: int | None
) -> Generator[Result]:
    """Yield ``function(task)`` for every task, in order; ``function`` is a module's function or its partial.

    ``num_workers`` None is one per available core. Closing the generator kills the workers. Raises a
    FluxtrainError that ``function`` raised as it is, and FluxtrainError, naming the task, if a worker died.
    """
    rest = iter(tasks)
    first = list(islice(rest, num_workers or len(os.sched_getaffinity(0))))
    num_workers = len(first)  # more would have nothing to do
    remaining = enumerate(chain(first, rest))
    outcomes, num_started, num_yielded = dict[int, Outcome](), 0, 0
    workers = list[_Worker[Task, Result]]()
    try:
        for _ in range(num_workers):
            workers.append(_Worker(function))
            workers[-1].start()
        while True:
            for worker in workers:
                limit = num_yielded + _TASKS_AHEAD * num_workers
                if worker.index is None and num_started < limit:
                    num_started += worker.submit(next(remaining, None))
            if num_yielded in outcomes:
                result, error = outcomes.pop(num_yielded)
                if error is not None:
                    raise error
                yield result
                num_yielded += 1
            elif num_yielded == num_started:
                return
            else:
                outcomes.update(worker.receive() for worker in _wait_for_any(workers))
    finally:
        for worker in workers:
            worker.kill()


class _Worker(Generic[Task, Result]):
    """One process and the pipe to it; ``index`` is that of its current task, None if it is idle."""

    def __init__(self, function: Callable[[Task], Result]) -> None:
        context = multiprocessing.get_context("forkserver")
        imported = function.func if isinstance(function, partial) else function
        context.set_forkserver_preload([imported.__module__])  # imported once, then inherited
        self.connection, self._child_connection = context.Pipe()
        self._process = context.Process(target=_serve, args=(self._child_connection, function))
        self.index: int | None = None
        self._task: Task | None = None

    def start(self) -> None:
        """Start the process; if this is interrupted, ``kill`` still ends it."""
        resource_tracker.ensure_running()  # it would unblock Ctrl-C, which only the parent handles
        with without_interrupts():
            self._process.start()
        self._child_connection.close()

    def submit(self, indexed_task: tuple[int, Task] | None) -> int:
        """Send the task, if there is one; return how many were sent."""
        if indexed_task is None:
            return 0
        self.index, self._task = indexed_task
        try:
            self.connection.send(self._task)
        except OSError:
            raise self._died() from None
        return 1

    def receive(self) -> tuple[int, Outcome]:
        """Return the index of the current task and its outcome; the worker is idle afterwards."""
        assert self.index is not None
        try:
            outcome = self.connection.recv()
        except (EOFError, OSError):
            raise self._died() from None
        index, self.index = self.index, None
        return index, outcome

    def kill(self) -> None:
        """Kill the process if it was started, and close the pipe."""
        if self._process.pid is not None:
            self._process.kill()
            self._process.join()
        self._child_connection.close()
        self.connection.close()

    def _died(self) -> FluxtrainError:
        self._process.join()
        code = self._process.exitcode or 0
        cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        hint = "; out of memory? fewer --workers need less" if -code == signal.SIGKILL else ""
        return FluxtrainError(f"a worker process ended with {cause} at {self._task}{hint}")


def _wait_for_any(workers: list[_Worker[Any, Result]]) -> list[_Worker[Any, Result]]:
    """Wait until a busy worker has sent its outcome or died; return all that have."""
    busy: dict[Any, _Worker[Any, Result]] = {
        worker.connection: worker for worker in workers if worker.index is not None
    }
    return [busy[connection] for connection in wait(list(busy))]


def _serve(connection: Connection, function: Callable[[Any], Any]) -> None:
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    warnings.simplefilter("ignore")  # Pillow's, about files that are validated here
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        connection.send(_run(function, task))


def _exit_with_parent() -> None:
    """Exit as soon as the parent process has ended, even by SIGKILL."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run(function: Callable[[Any], Any], task: Any) -> Outcome:
    try:
        return function(task), None
    except FluxtrainError as error:
        return None, error


Settings = dict[str, Any]
_REPORT = "report.json"
_SETTINGS = "settings.json"
_WORK = "work"


class StagingDir:
    """The directory ``path``, which becomes ``output``; scratch files go to ``work``."""

    def __init__(self, output: Path, path: Path) -> None:
        """Take the final and the staging path; nothing is created."""
        self.output, self.path, self.work = output, path, path / _WORK

    def finish(self, report: dict[str, Any]) -> None:
        """Write ``report`` and rename the directory to the output, which it replaces."""
        write_json(self.path / _REPORT, report)
        if self.output.exists():
            shutil.rmtree(self.output)
        self.path.replace(self.output)
        _remove_work(self.output)


@contextmanager
def open_staging_dir(output: Path, settings: Settings, force: bool = False) -> Iterator[StagingDir]:
    """Yield the staging directory of ``output``, emptied unless it was begun with equal ``settings``.

    Raises DataError if ``output`` is not empty and not ``force``, StorageError if another process is writing.
    """
    output = output.resolve()
    if output.is_mount():
        raise DataError(f"{output}: is a mount point; name a folder in it")
    if not force and _has_entries(output):
        raise DataError(f"{output}: is not empty; --force replaces it")
    path = output.with_name(f"{output.name}.partial")
    with storage_errors(path):
        path.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(path), storage_errors(path):
        if read_json(path / _SETTINGS) != settings:
            for each in path.iterdir():
                remove(each)
            write_json(path / _SETTINGS, settings)
        staging = StagingDir(output, path)
        staging.work.mkdir(exist_ok=True)
        # what a killed process has left: its folders, and unfinished indices of tars
        for path in staging.work.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
        for path in staging.path.glob(UNFINISHED_SIDECARS):
            path.unlink(missing_ok=True)
        yield staging


def finished_report(output: Path, settings: Settings) -> dict[str, Any] | None:
    """Return the report of ``output`` if it is complete and was made with ``settings``, else None."""
    report = read_json(output / _REPORT)
    if not isinstance(report, dict) or report.get("settings") != settings:
        return None
    _remove_work(output)  # a run killed after the rename did not get to it
    return report


def read_json(path: Path) -> Any:
    """Return the content of ``path``, or None if it is missing or malformed."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def write_json(path: Path, content: Any) -> None:
    """Write ``content`` to ``path`` atomically and flush it to the disk."""
    with atomic_write(path) as partial:
        write_to_disk(partial, json.dumps(content, indent=1, ensure_ascii=False))


def _has_entries(output: Path) -> bool:
    try:
        return any(output.iterdir())
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        raise DataError(f"{output}: not a folder") from None


def remove(path: Path) -> None:
    """Remove the file, folder or link ``path``, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _remove_work(output: Path) -> None:
    shutil.rmtree(output / _WORK, ignore_errors=True)
    (output / _SETTINGS).unlink(missing_ok=True)
