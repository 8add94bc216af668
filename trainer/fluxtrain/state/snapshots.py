"""Takes snapshots during training: a copy to memory that outlives the processes, finished in a thread."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from fluxtrain.contract.process import CONFIG_FILE
from fluxtrain.contract.run.config import RunConfig
from fluxtrain.optim import NEVER
from fluxtrain.parallel.distributed import Channel, World
from fluxtrain.runtime.step_times import record_event
from fluxtrain.state.free_memory import Bound, MemoryWatch, tightest
from fluxtrain.state.run_state import RunState
from fluxtrain.state.slots import Copy, Pair, Slot, Slots, checksum, exchange, local_bytes
from fluxtrain.state.staging import State


class Snapshots:
    """Takes a snapshot every few steps; every rank must call `after_step` after the same steps.

    While memory is short on any rank, none is taken: they are paused.
    """

    def __init__(
        self,
        state: State,
        slots: Slots,
        channel: Channel,
        config: RunConfig,
        run: RunState,
        on_complete: Callable[[int, float], None],
        on_memory: Callable[[int, bool], None] = lambda size, is_paused: None,
    ) -> None:
        """Take snapshots of ``state`` in ``slots``, from ``run`` on; agree with other ranks in ``channel``.

        ``on_complete`` is called in a thread with each step whose snapshot is complete on all ranks, and the
        seconds that training waited for it; ``on_memory`` with the bytes that this rank's snapshots take, and
        whether they are paused.
        """
        self._slots, self._channel, self._config = slots, channel, config
        self._world, self._first = slots.world, run
        self._on_complete, self._on_memory = on_complete, on_memory
        self._parts = local_bytes(state, slots.shard)
        self._bad_step = torch.zeros((), dtype=torch.int64, pin_memory=_has_gpu(slots.world))
        self._interval = config.checkpoint.memory_every_steps or FIRST
        self._next_step, self._stalled = run.step + self._interval, 0.0
        self._is_paused, self._has_told, self._reason = False, False, ""
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._in_thread(self._prepare)

    def after_step(self, run: RunState, bad_step: Tensor) -> None:
        """Begin a snapshot of ``run`` if it is due; it is dropped if ``bad_step`` is not NEVER."""
        if run.step < self._next_step:
            return
        begin = time.perf_counter()
        self.finish()
        if self._is_paused:
            self._next_step = run.step + min(self._interval, FIRST)
            self._in_thread(self._prepare)
            return
        self._next_step = run.step + self._interval
        pair = self._slots.next
        wait = self._copy(pair, bad_step)
        stall = time.perf_counter() - begin
        self._in_thread(self._complete, run, pair, wait, stall)

    def finish(self) -> None:
        """Wait until the pending snapshot is complete; raise what made it fail."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error

    def watching_memory(self) -> MemoryWatch:
        """Return a watch that drops snapshots of this rank while memory is short."""
        return MemoryWatch(self._slots.volume, self.drop_one)

    def drop_one(self, bound: Bound) -> bool:
        """Free the older snapshot of this rank, else the newest, as ``bound`` is near; thread-safe.

        Returns whether there was one.
        """
        if _has_gpu(self._world):
            torch.cuda.set_device(self._world.device)
        is_freed = self._slots.drop_one(str(bound))
        if is_freed:
            self._on_memory(self._slots.size, True)
        return is_freed

    def _in_thread(self, work: Callable[..., None], *arguments: object) -> None:
        def run() -> None:
            try:
                if _has_gpu(self._world):
                    torch.cuda.set_device(self._world.device)
                work(*arguments)
                self._slots.free_dropped()
                self._on_memory(self._slots.size, self._is_paused)
            except BaseException as error:
                self._error = error

        # a daemon: it waits for other ranks, which may be lost
        self._thread = threading.Thread(target=run, name="snapshot", daemon=True)
        self._thread.start()

    def _prepare(self) -> None:
        """Reserve the next slots if a rank has none; pause if one has no room for them."""
        # also a barrier: this node's snapshots of earlier starts are removed
        [is_missing] = self._channel.maximum([float(self._slots.next is None)])
        if not (is_missing or self._is_paused):
            return
        with self._local_errors():
            self._slots.require_room()
        self._agree()
        if self._is_paused:
            return
        with self._local_errors():
            self._slots.allocate()
            if self._world.local_rank == 0:
                (self._slots.folder / CONFIG_FILE).write_text(
                    self._config.model_dump_json(), encoding="utf-8"
                )
        self._agree()

    def _copy(self, pair: Pair | None, bad_step: Tensor) -> Callable[[], float]:
        """Begin to copy the state to ``pair``; return a function that waits and returns the GPU's seconds.

        On a GPU the copies are part of its queue: the next step waits for them, this process does not.
        """
        begin = record_event() if _has_gpu(self._world) else None
        if pair is not None:
            pair.own.invalidate()
            pair.own.filling.acquire()
            offset = 0
            for part in self._parts:
                pair.own.bytes[offset : offset + len(part)].copy_(part, non_blocking=True)
                offset += len(part)
        self._bad_step.copy_(bad_step, non_blocking=True)
        end = record_event() if _has_gpu(self._world) else None

        def wait() -> float:
            if end is not None:
                end.synchronize()
            if pair is not None:
                pair.own.filling.release()
            return 0.0 if begin is None or end is None else float(begin.elapsed_time(end)) / 1000

        return wait

    def _complete(
        self, run: RunState, pair: Pair | None, wait: Callable[[], float], stall: float
    ) -> None:
        begin = time.perf_counter()
        stall = max(stall, wait())
        is_good = int(self._bad_step) == NEVER
        is_there = self._require(pair)
        copy = self._commit(run, pair.own) if is_good and pair is not None and is_there else None
        self._require(pair)
        self._agree()
        if self._is_paused:
            return
        if pair is not None and pair.received is not None:
            with self._local_errors():
                exchange(self._channel, self._world, pair.own, copy, pair.received)
        if not _has_gpu(self._world):
            stall += time.thread_time()  # this thread takes the cores from training
        self._require(pair)
        self._adapt(run, stall, time.perf_counter() - begin)
        if is_good and not self._is_paused:
            self._slots.switch()
            self._on_complete(run.step, stall)
            self._tell_continued()
            self._prepare()

    def _commit(self, run: RunState, slot: Slot) -> Copy | None:
        """Make the image in ``slot`` valid; return its record, None if that failed."""
        with self._local_errors():
            copy = Copy(
                start=self._slots.start,
                step=run.step,
                shard=self._slots.shard.index,
                num_shards=self._slots.shard.count,
                size=len(slot.bytes),
                checksum=checksum(slot.bytes),
                run=asdict(run),
            )
            return copy if slot.commit(copy) else None
        return None

    def _require(self, pair: Pair | None) -> bool:
        """Return whether the slots of ``pair`` are still there; keep it as the reason to pause if not."""
        if pair is not None and not pair.is_dropped and not pair.own.exists:
            self._slots.drop_all("the launcher removed them, as memory was short")
        if pair is None or pair.is_dropped:
            self._reason = self._reason or self._slots.shortage
            return False
        return True

    def _adapt(self, run: RunState, stall: float, background: float) -> None:
        """Wait for the other ranks; choose the interval from the highest cost of all ranks."""
        seconds = run.train_seconds - self._first.train_seconds
        stall, background, seconds = self._agree(stall, background, seconds)
        self._stalled += stall
        steps = run.step - self._first.step
        cost = Cost(steps, seconds, self._stalled, stall, background)
        fixed = self._config.checkpoint.memory_every_steps
        self._interval = fixed or next_interval(cost, self._interval)

    def _agree(self, *values: float) -> list[float]:
        """Return the maximum of each value over all ranks; pause if one rank has a reason, else do not."""
        failed = self._world.rank + 1 if self._reason else 0
        *agreed, last_failed = self._channel.maximum([*values, failed])
        self._is_paused = last_failed > 0
        if self._reason and last_failed == failed and not self._has_told:
            _print(f"snapshots in memory are paused: {self._reason}")
        self._has_told = self._has_told or self._is_paused
        self._reason = ""
        return agreed

    def _tell_continued(self) -> None:
        """Tell that snapshots are taken again, if it was told that they are paused."""
        if self._has_told and self._world.is_main:
            _print(f"snapshots in memory are taken again: {tightest(self._slots.volume)}")
        self._has_told = False

    @contextmanager
    def _local_errors(self) -> Iterator[None]:
        """Keep an OSError as the reason to pause, after the next agreement of all ranks."""
        try:
            yield
        except OSError as error:
            self._reason = error.strerror or str(error)
            if not self._slots.are_held:
                self._slots.hold(self._reason)


def _print(text: str) -> None:
    print(f"fluxtrain: {text}", file=sys.stderr, flush=True)


def _has_gpu(world: World) -> bool:
    return world.device.type == "cuda"


MAX_COST = 0.01
"""Largest part of the training time that training may wait for snapshots."""
FIRST = 10
"""Steps until a snapshot while its cost is not known yet."""
_MAX_BUSY = 0.5
"""Largest part of the time in which a snapshot may be written in the background."""
_MAX_GROWTH = 4
"""By how much one measurement may lengthen the interval: a single slow snapshot must not end them."""


@dataclass(frozen=True)
class Cost:
    """What the snapshots since the start of the processes cost."""

    steps: int
    """Steps since the start, at least 1."""
    seconds: float
    """Training time of these steps."""
    stalled: float
    """Seconds that training waited for snapshots."""
    last_stall: float
    """Seconds that it waited for the last one."""
    background: float
    """Seconds in which the last one was written in the background."""


def next_interval(cost: Cost, before: int) -> int:
    """Return the steps between two snapshots, at least 1; it was ``before``.

    So many that the next one costs no more than it may, and neither do all of them together.
    """
    seconds = max(
        cost.last_stall / MAX_COST,
        (cost.stalled + cost.last_stall) / MAX_COST - cost.seconds,
        cost.background / _MAX_BUSY,
    )
    wanted = math.ceil(seconds * cost.steps / cost.seconds) if cost.seconds > 0 else before
    return max(1, min(wanted, _MAX_GROWTH * before))
