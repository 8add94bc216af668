"""Counts what a step sends in each collective, its FLOPs, and the kernels that it launches."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fluxtrain.traffic import AXES, Axis, Collective, Operation

_C10D = torch.ops.c10d
_FUNCTIONAL = torch.ops._c10d_functional
_WITHOUT_KERNEL = {
    "aten::_unsafe_view",
    "aten::detach",
    "aten::empty.memory_format",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::resize_",
    "aten::set_.source_Storage",
}


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts, while it is active, the collectives by mesh axis, and the operators that launch kernels.

    A list operator, such as those of the fused AdamW, counts as one kernel.
    """

    def __init__(self, groups: dict[Axis, dist.ProcessGroup]) -> None:
        """Count the collectives of ``groups``, by the name of their mesh axis."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._axes: dict[str, Axis] = {group.group_name: axis for axis, group in groups.items()}
        self._bytes = Counter[tuple[Axis, Operation]]()
        self._calls = Counter[tuple[Axis, Operation]]()
        self.kernels = 0
        self.flops = 0
        """By torch's formulas. Its own FlopCounterMode keeps recomputed activations alive with its hooks."""

    def collectives(self) -> list[Collective]:
        """Return the collectives, in the order of `traffic.collectives`; raise KeyError for another group."""
        order = sorted(self._bytes, key=lambda key: (AXES.index(key[0]), key[1]))
        return [
            Collective(axis, operation, self._calls[axis, operation], self._bytes[axis, operation])
            for axis, operation in order
        ]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Count ``func``, and call it; DTensor's operators are counted as those of its local tensors."""
        if any(kind is DTensor for kind in types):
            return NotImplemented
        self._count(func, args)
        result = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        return result

    def _count(self, func: Any, args: tuple[Any, ...]) -> None:
        match func:
            case _C10D._allgather_base_.default:
                self._add("all_gather", args[2], args[0])
            case _C10D._reduce_scatter_base_.default:
                self._add("reduce_scatter", args[2], args[1])
            case _C10D.allreduce_.default:
                self._add("all_reduce", args[1], *args[0])
            case _FUNCTIONAL.all_reduce.default:
                self._add("all_reduce", args[2], args[0])
            case _ if func.namespace in ("c10d", "_c10d_functional"):
                if func is not _FUNCTIONAL.wait_tensor.default:
                    raise NotImplementedError(f"the collective {func} is not counted")
            case _ if func.namespace in ("aten", "fsdp"):
                self.kernels += not (func.is_view or func.name() in _WITHOUT_KERNEL)

    def _add(self, operation: Operation, group: Any, *content: Tensor) -> None:
        name = group if isinstance(group, str) else dist.ProcessGroup.unbox(group).group_name
        key = self._axes[name], operation
        self._calls[key] += 1
        self._bytes[key] += sum(tensor.nbytes for tensor in content)
