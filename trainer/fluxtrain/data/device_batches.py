"""The batches of a loader on the device; a GPU copies the next one while it computes with the present one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from fluxtrain.data.loader import AnyBatch


class DeviceBatches(Iterator[AnyBatch]):
    """An iterator over batches on ``device``.

    On a GPU copies have a stream of their own, and the stream that computes waits for them: so a batch whose
    copy was begun with `stage` costs no time. The host waits for nothing but the loader.
    """

    def __init__(self, batches: Iterable[AnyBatch], device: torch.device) -> None:
        """Begin to load ``batches``, which are in page-locked memory if ``device`` is a GPU."""
        self._batches, self._device = iter(batches), device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._staged: tuple[AnyBatch, torch.cuda.Event] | None = None

    def stage(self) -> None:
        """Begin to copy the next batch to a GPU, if there is one; wait until the loader has it."""
        if self._stream is None or self._staged is not None:
            return
        batch = next(self._batches, None)
        if batch is None:
            return
        with torch.cuda.stream(self._stream):
            self._staged = batch.to(self._device), self._stream.record_event()

    def __next__(self) -> AnyBatch:
        """Return the next batch, for work of the current stream."""
        if self._stream is None:
            return next(self._batches).to(self._device)
        self.stage()
        if self._staged is None:
            raise StopIteration
        (batch, copied), self._staged = self._staged, None
        current = torch.cuda.current_stream(self._device)
        current.wait_event(copied)
        # memory of the batch is not used again before the work of this stream is done
        for tensor in batch.device_tensors().values():
            tensor.record_stream(current)
        return batch


class EvaluationData:
    """The batches of each evaluation, on the device."""

    def __init__(self, batches: Iterable[AnyBatch], device: torch.device) -> None:
        """Iterate over ``batches`` for each evaluation; nothing is loaded yet."""
        self._batches, self._device = batches, device
        self._begun: DeviceBatches | None = None

    def begin(self) -> None:
        """Begin to load for the next evaluation, and to copy its first batch to a GPU."""
        if self._begun is None:
            self._begun = DeviceBatches(self._batches, self._device)
            self._begun.stage()

    def __iter__(self) -> DeviceBatches:
        """Return all batches, from the first."""
        self.begin()
        assert self._begun is not None
        begun, self._begun = self._begun, None
        return begun
