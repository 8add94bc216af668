"""Worker processes: results in the order of their tasks, and no process outlives the one that asked.

``fork`` is not used: a parent with threads would hand locks to its children that nobody releases.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable, Generator, Iterable
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

from fluxtrain.errors import FluxtrainError

Task = TypeVar("Task")
Result = TypeVar("Result")
_TASKS_AHEAD = 2
"""Tasks begun per worker before the first of them is asked for: bounds what waits in memory."""


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def map_in_order(
    work: Callable[[Task], Result], tasks: Iterable[Task], num_workers: int
) -> Generator[Result]:
    """Yield ``work(task)`` of every task, in their order; ``work`` is a module's function or its partial.

    Closing the iterator ends the workers at once. Raises what ``work`` raised where that is a
    FluxtrainError, and FluxtrainError where a worker ended in any other way.
    """
    following = iter(enumerate(tasks))
    done, given, wanted = dict[int, tuple[Any, FluxtrainError | None]](), 0, 0
    workers = list[_Worker[Task, Result]]()
    try:
        for _ in range(num_workers):
            workers.append(_Worker(work))
            workers[-1].start()
        while True:
            for worker in workers:
                if worker.number is None and given < wanted + _TASKS_AHEAD * num_workers:
                    given += worker.begin(next(following, None))
            if wanted in done:
                result, error = done.pop(wanted)
                if error is not None:
                    raise error
                yield result
                wanted += 1
            elif wanted == given:
                return
            else:
                for worker in _finished(workers):
                    number, outcome = worker.outcome()
                    done[number] = outcome
    finally:
        for worker in workers:
            worker.end()


class _Worker(Generic[Task, Result]):
    """One process and the pipe to it; ``number`` is that of the task it is at."""

    def __init__(self, work: Callable[[Task], Result]) -> None:
        context = multiprocessing.get_context("forkserver")
        function = work.func if isinstance(work, partial) else work
        context.set_forkserver_preload([function.__module__])  # imported once, then inherited
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, work))
        self._theirs = theirs
        self.number: int | None = None
        self._task: Task | None = None

    def start(self) -> None:
        """Start the process; whatever interrupts this, ``end`` ends it."""
        self._process.start()
        self._theirs.close()

    def begin(self, numbered: tuple[int, Task] | None) -> int:
        """Begin a task, if there is one; return how many were begun."""
        if numbered is None:
            return 0
        self.number, self._task = numbered
        try:
            self.connection.send(self._task)
        except OSError:
            raise self._lost() from None
        return 1

    def outcome(self) -> tuple[int, tuple[Any, FluxtrainError | None]]:
        """Return the number of the task, and what came of it: a result or an error."""
        assert self.number is not None
        try:
            outcome = self.connection.recv()
        except (EOFError, OSError):
            raise self._lost() from None
        number, self.number = self.number, None
        return number, outcome

    def end(self) -> None:
        """End the process whatever it does, if it began."""
        if self._process.pid is not None:
            self._process.kill()
            self._process.join()
        self._theirs.close()
        self.connection.close()

    def _lost(self) -> FluxtrainError:
        self._process.join()
        code = self._process.exitcode or 0
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        hint = "; out of memory? fewer --workers need less" if -code == signal.SIGKILL else ""
        return FluxtrainError(f"a worker process ended with {how} at {self._task}{hint}")


def _finished(workers: list[_Worker[Any, Result]]) -> list[_Worker[Any, Result]]:
    """Wait until a busy worker has something to say; return those that have."""
    busy: dict[Any, _Worker[Any, Result]] = {
        worker.connection: worker for worker in workers if worker.number is not None
    }
    return [busy[connection] for connection in wait(list(busy))]


def _serve(connection: Connection, work: Callable[[Any], Any]) -> None:
    """Do what comes through the pipe until its other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    warnings.simplefilter("ignore")  # of Pillow, about files that we judge ourselves
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        connection.send(_attempt(work, task))


def _end_with_parent() -> None:
    """Leave as soon as the parent is gone, even by SIGKILL: nobody waits for the result."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _attempt(work: Callable[[Any], Any], task: Any) -> tuple[Any, FluxtrainError | None]:
    try:
        return work(task), None
    except FluxtrainError as error:
        return None, error
