"""Copies of a rank's training state in memory of the host, from which a checkpoint is written.

One buffer of exactly the state's size is used for every checkpoint, pinned if there is a GPU: page faults of
a new one would cost more than the copy. It is reserved when a run starts that saves on its way. On a GPU the
copy has a stream of its own, beside the next forward and backward passes; only the next change of the weights
waits for it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from fluxtrain.parallel.sharding import local_part
from fluxtrain.runtime.devices import pin, unpin
from fluxtrain.runtime.progress import Alive
from fluxtrain.runtime.step_times import Spans, record_event

State = dict[str, Tensor]
"""Tensors by name; DTensors if they are sharded."""
_ALIGNMENT = 64
"""Bytes: each copy begins at a multiple of it."""


class CopyQueue:
    """Where copies to the host are done: here at once, by a GPU beside its other work."""

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Queue the copies that begin inside, after the work that the device has by now."""
        yield

    def wait(self) -> None:
        """Return when these copies are done."""

    def before_change(self) -> None:
        """Let the device's later work wait for them."""

    def take_stall(self) -> float:
        """Return the seconds that such work has waited since the last call."""
        return 0.0


class Staging:
    """The buffer of one rank, and the copies in it."""

    def __init__(
        self, state: State, queue: CopyQueue | None = None, *, reserve_now: bool = True
    ) -> None:
        """Begin to reserve memory for copies of ``state``, in a thread; every rank must call this.

        Without ``reserve_now`` that begins with the first copy.
        """
        parts = [local_part(tensor) for tensor in state.values()]
        gpu = next((part.device for part in parts if part.is_cuda), None)
        self._state = state
        self._queue = queue or (CopyQueue() if gpu is None else _GpuQueue())
        ends = list(accumulate((_padded(part.nbytes) for part in parts), initial=0))
        self._buffer = torch.empty(ends[-1], dtype=torch.uint8)
        self.copies = _views(state, self._buffer, ends)
        """The copies of the last `copy`; whole after `wait`."""
        self._reserving = threading.Thread(target=self._reserve, args=(gpu,), daemon=True)
        if reserve_now:
            self._reserving.start()

    def _reserve(self, gpu: torch.device | None) -> None:
        self._buffer.zero_()  # every page is there from now on
        if gpu is None:
            return
        torch.cuda.set_device(gpu)  # of this thread, which else opens a context on the first GPU
        if pin(self._buffer):
            weakref.finalize(self, unpin, self._buffer).atexit = False

    def copy(self, alive: Alive) -> None:
        """Begin to copy the state; ``alive`` is called after each tensor.

        The state must not change before `before_change` was called.
        """
        if self._reserving.ident is None:
            self._reserving.start()
        self._reserving.join()
        with self._queue.copying():
            for name, tensor in self._state.items():
                local_part(self.copies[name]).copy_(local_part(tensor), non_blocking=True)
                alive()

    def wait(self) -> None:
        """Return when the copies are whole; thread-safe."""
        self._queue.wait()

    def before_change(self) -> None:
        """Let changes of the state from now on wait until the copies are whole; the host does not wait."""
        self._queue.before_change()

    def take_stall(self) -> float:
        """Return the seconds that changes have waited on the device since the last call."""
        return self._queue.take_stall()


class _GpuQueue(CopyQueue):
    """Copies in a stream of their own of the current GPU."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._copied: torch.cuda.Event | None = None
        self._is_awaited = True
        self._waits = Spans()

    @contextmanager
    def copying(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
        self._copied = self._stream.record_event()
        self._is_awaited = False

    def wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()

    def before_change(self) -> None:
        if self._copied is None or self._is_awaited:
            return
        begin = record_event()
        torch.cuda.current_stream().wait_event(self._copied)
        self._waits.add(begin, record_event())
        self._is_awaited = True

    def take_stall(self) -> float:
        return self._waits.take_passed()


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _views(state: State, buffer: Tensor, ends: list[int]) -> State:
    """Return tensors like those of ``state`` on the host, whose bytes begin in ``buffer`` at ``ends``."""
    meshes: dict[DeviceMesh, DeviceMesh] = {}
    views: State = {}
    for (name, tensor), (begin, _) in zip(state.items(), pairwise(ends), strict=True):
        part = local_part(tensor)
        own = buffer[begin : begin + part.nbytes].view(part.dtype).view(part.shape)
        if not isinstance(tensor, DTensor):
            views[name] = own
            continue
        mesh = tensor.device_mesh
        if mesh not in meshes:
            meshes[mesh] = _host_mesh(mesh)
        views[name] = DTensor.from_local(
            own,
            meshes[mesh],
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
    return views


def _host_mesh(mesh: DeviceMesh) -> DeviceMesh:
    if mesh.device_type == "cpu":
        return mesh
    return init_device_mesh("cpu", tuple(mesh.shape), mesh_dim_names=mesh.mesh_dim_names)
