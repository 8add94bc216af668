"""Worker processes: results come in the order of the tasks, and no worker outlives the parent process.

Why not ``ProcessPoolExecutor``: docs/decisions/0008. The start method is ``forkserver``, because ``fork``
copies locks that the parent's other threads hold.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable, Generator, Iterable
from functools import partial
from itertools import chain, islice
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

from fluxtrain.errors import FluxtrainError

Task = TypeVar("Task")
Result = TypeVar("Result")
Outcome = tuple[Any, FluxtrainError | None]
"""The result of a task, or the error that it raised."""
_TASKS_AHEAD = 2
"""Tasks started per worker beyond the last result taken: bounds the results held in memory."""


def available_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def map_in_order(
    function: Callable[[Task], Result], tasks: Iterable[Task], num_workers: int
) -> Generator[Result]:
    """Yield ``function(task)`` for every task, in order; ``function`` is a module's function or its partial.

    Closing the generator kills the workers. Raises a FluxtrainError that ``function`` raised as it is, and
    FluxtrainError, naming the task, if a worker died.
    """
    rest = iter(tasks)
    first = list(islice(rest, num_workers))
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
    """Run tasks from the pipe until its other end is closed."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches all processes; the parent handles it
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
