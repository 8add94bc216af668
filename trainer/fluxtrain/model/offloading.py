"""Frozen weights of blocks in host memory, which are copied to a ring of buffers on the device.

The parameters of a block are views of one buffer, always the same, so whatever autograd saves of them is a
view of it too. The buffer has the block's weights while its forward and its backward pass run, recomputation
included; those of another block between them. On a GPU, copies have a stream of their own, pinned memory
of the host, and begin one block ahead. On a CPU they are done at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from fluxtrain.errors import ConfigError
from fluxtrain.model.cost import aligned, buffer_sizes
from fluxtrain.runtime.devices import pin, unpin
from fluxtrain.runtime.progress import Alive

_FORWARD, _BACKWARD = 1, -1


class Offloading:
    """The blocks of a model whose frozen weights are in host memory, in the order of the forward pass."""

    def __init__(self, blocks: Mapping[str, nn.Module]) -> None:
        """Copy the weights of ``blocks``, by their names, before their passes; they have no memory yet."""
        self._blocks = dict(blocks)
        self._ring: Ring | None = None
        self.host: dict[str, Tensor] = {}
        """The weights in host memory, by the parameters' names in the model."""
        for number, block in enumerate(self._blocks.values()):
            _watch(block, number, self)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that are in host memory."""
        return [each for block in self._blocks.values() for _, each in _frozen(block)]

    @contextmanager
    def without_parameters(self) -> Iterator[None]:
        """Take the parameters that are in host memory out of the blocks inside."""
        taken = [(block, *each) for block in self._blocks.values() for each in _frozen(block)]
        for block, name, _ in taken:
            _set_parameter(block, name, None)
        yield
        for block, name, parameter in taken:
            _set_parameter(block, name, parameter)

    @property
    def ring(self) -> Ring:
        """Return the buffers on the device, which `allocate` has made."""
        assert self._ring is not None
        return self._ring

    def allocate(self, device: torch.device, alive: Alive = lambda: None) -> None:
        """Make room for the weights on the host, and for buffers on ``device``; there are no values yet.

        ``alive`` is called after each block. Raises ConfigError if the host lacks memory that is page-locked.
        """
        hosts = list[Tensor]()
        sizes = [sum(_sizes(block)) for block in self._blocks.values()]
        for (name, block), size in zip(self._blocks.items(), sizes, strict=True):
            host = _on_host(size, device)
            if host is None:
                raise _too_large(sizes, hosts)
            hosts.append(host)
            views = _views(hosts[-1], block)
            self.host |= {f"{name}.{own}": view for (own, _), view in views}
            alive()
        self._ring = Ring(hosts, device)
        for number, block in enumerate(self._blocks.values()):
            for (name, _), view in _views(self._ring.buffer(number), block):
                _set_parameter(block, name, _in_memory(view))


class Copies(Protocol):
    """Where copies to buffers are done: at once, or by a device beside its other work."""

    def begin(self, place: int, buffer: Tensor, host: Tensor) -> None:
        """Copy ``host`` to ``buffer``, that of ``place``, after the work that the device has by now."""

    def wait(self, place: int) -> None:
        """Let later work of the device wait until the last copy to the buffer of ``place`` is whole."""


class Ring:
    """Buffers on the device, which have the weights of one block each; a block's is always the same."""

    def __init__(self, hosts: Sequence[Tensor], device: torch.device) -> None:
        """Make the buffers for the weights of blocks, ``hosts``, in the order of the forward pass."""
        self.hosts = hosts
        sizes = buffer_sizes([len(host) for host in hosts])
        self.buffers = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        on_gpu = device.type == "cuda"
        self.copies: Copies = _OnGpu(self.buffers, hosts) if on_gpu else _AtOnce()
        self._held: list[int | None] = [None] * len(sizes)
        self._in_use = set[int]()

    def buffer(self, number: int) -> Tensor:
        return self.buffers[self._place(number)][: len(self.hosts[number])]

    def begin(self, number: int, direction: int) -> None:
        """Let later work have the weights of block ``number``; copy those of the next one meanwhile.

        Those of the forward pass begin one after another, so none but this is in use by then.
        """
        if direction == _FORWARD:
            self._in_use.clear()
        self._in_use.add(number)
        self._load(number, is_needed=True)
        self.copies.wait(self._place(number))
        self._load_ahead(number, direction)

    def end(self, number: int, direction: int) -> None:
        """Use the buffer of block ``number``, whose work has been queued, for others."""
        self._in_use.discard(number)
        self._load_ahead(number, direction)

    def _place(self, number: int) -> int:
        return number % len(self.buffers)

    def _load_ahead(self, number: int, direction: int) -> None:
        for ahead in range(1, len(self.buffers) + 1):
            following = number + ahead * direction
            if 0 <= following < len(self.hosts):
                self._load(following)

    def _load(self, number: int, is_needed: bool = False) -> None:
        """Copy the weights of block ``number`` unless they are there, or their buffer is in use."""
        place = self._place(number)
        held = self._held[place]
        if held == number:
            return
        if held in self._in_use:
            assert not is_needed, "the block before it has ended"
            return
        self.copies.begin(place, self.buffer(number), self.hosts[number])
        self._held[place] = number


class _AtOnce:
    """Copies that are done when they return."""

    def begin(self, place: int, buffer: Tensor, host: Tensor) -> None:
        buffer.copy_(host)

    def wait(self, place: int) -> None:
        return


class _OnGpu:
    """Copies in a stream of their own of a GPU."""

    def __init__(self, buffers: Sequence[Tensor], hosts: Sequence[Tensor]) -> None:
        self._device = buffers[0].device
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._copied: list[torch.cuda.Event | None] = [None] * len(buffers)
        for buffer in buffers:  # not used again, once freed, before the copies are done
            buffer.record_stream(self._stream)
        weakref.finalize(self, _unpin, hosts, self._stream).atexit = False

    def begin(self, place: int, buffer: Tensor, host: Tensor) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            buffer.copy_(host, non_blocking=True)
        self._copied[place] = self._stream.record_event()

    def wait(self, place: int) -> None:
        copied = self._copied[place]
        if copied is not None:
            torch.cuda.current_stream(self._device).wait_event(copied)


def _unpin(hosts: Iterable[Tensor], stream: torch.cuda.Stream) -> None:
    stream.synchronize()
    for host in hosts:
        unpin(host)


def _watch(block: nn.Module, number: int, offloading: Offloading) -> None:
    """Call the ring of ``offloading`` around the passes of ``block``.

    A backward pass begins when the gradient of an output is known. For frozen weights it ends when those of
    all inputs are; if no input needs one, with the next forward pass.
    """

    def before(block: nn.Module, inputs: tuple[Any, ...]) -> None:
        offloading.ring.begin(number, _FORWARD)
        _on_gradients(inputs, "all", lambda: offloading.ring.end(number, _BACKWARD))

    def after(block: nn.Module, inputs: tuple[Any, ...], outputs: Any) -> None:
        offloading.ring.end(number, _FORWARD)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        _on_gradients(outputs, "any", lambda: offloading.ring.begin(number, _BACKWARD))

    # torch.compile leaves both out of the graph
    block.register_forward_pre_hook(torch.compiler.disable(before))  # type: ignore[no-untyped-call]
    block.register_forward_hook(torch.compiler.disable(after))  # type: ignore[no-untyped-call]


def _on_gradients(tensors: Iterable[Any], mode: Any, call: Callable[[], None]) -> None:
    """Call ``call`` when the gradients of ``all`` or ``any`` of ``tensors`` that need one are known."""
    needed = [each for each in tensors if isinstance(each, Tensor) and each.requires_grad]
    if needed and torch.is_grad_enabled():
        register_multi_grad_hook(needed, lambda _: call(), mode=mode)


def _frozen(block: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, each) for name, each in block.named_parameters() if not each.requires_grad]


def _sizes(block: nn.Module) -> list[int]:
    return [aligned(parameter.nbytes) for _, parameter in _frozen(block)]


def _views(memory: Tensor, block: nn.Module) -> list[tuple[tuple[str, nn.Parameter], Tensor]]:
    """Return the frozen parameters of ``block``, by name, each with its part of ``memory``."""
    ends = accumulate(_sizes(block), initial=0)
    return [
        (
            (name, each),
            memory[begin : begin + each.nbytes].view(each.dtype).view(each.shape),
        )
        for (name, each), (begin, _) in zip(_frozen(block), pairwise(ends), strict=True)
    ]


def _on_host(num_bytes: int, device: torch.device) -> Tensor | None:
    """Return memory of the host, pinned for a GPU; None if there is not enough."""
    with suppress(RuntimeError):  # torch's, of the host's memory and of CUDA
        memory = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        if device.type != "cuda" or pin(memory):
            return memory
    return None


def _too_large(sizes: Sequence[int], hosts: Sequence[Tensor]) -> ConfigError:
    """Return the error for blocks of ``sizes`` bytes, if there is no memory for the one after ``hosts``."""
    number, had = len(hosts), sum(host.nbytes for host in hosts)
    return ConfigError(
        "spec.run.parallel.offload_blocks",
        len(sizes),
        f"each rank needs {sum(sizes):,} bytes of page-locked host memory; the host refused "
        f"{sizes[number]:,} of them after {had:,}, those of {number} blocks: raise its limit of locked "
        "memory (ulimit -l) or the memory of the pod, or offload fewer blocks",
    )


def _in_memory(memory: Tensor) -> nn.Parameter:
    """Return a frozen parameter in ``memory``, changes of which are none of what autograd saved."""
    parameter = nn.Parameter(torch.empty(0, dtype=memory.dtype, device=memory.device), False)
    parameter.data = memory  # keeps the parameter's own version
    return parameter


def _set_parameter(block: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    owner, _, own = name.rpartition(".")
    setattr(block.get_submodule(owner), own, parameter)
